// Curves of a long run are means over many steps. After a zoom, the steps in view are asked for again.
import { useCallback, useState } from "preact/hooks";
import type { Maybe, Metrics, Series } from "../api";
import { type Answer, isExport, useLoad } from "../client";

/** The first and the last step in view. */
export type Range = [number, number];

/** `whole`, with the steps of `range` as `detail` has them. */
export function spliced(whole: Metrics, detail: Metrics, [from, to]: Range): Metrics {
  const before = whole.steps.filter((step) => step < from).length;
  const after = whole.steps.filter((step) => step <= to).length;
  const join = <T>(outer: T[], inner: T[]): T[] => [...outer.slice(0, before), ...inner, ...outer.slice(after)];
  const bounds = (outer: Series, inner: Series, side: "min" | "max"): Maybe[] => join(outer[side] ?? outer.mean, inner[side] ?? inner.mean);
  const series = Object.entries(whole.series).map(([key, outer]): [string, Series] => {
    const inner = detail.series[key] ?? { mean: detail.steps.map(() => null), min: null, max: null, num_not_finite: 0 };
    return [key, { ...outer, mean: join(outer.mean, inner.mean), min: bounds(outer, inner, "min"), max: bounds(outer, inner, "max") }];
  });
  return { ...whole, steps: join(whole.steps, detail.steps), times: join(whole.times, detail.times), series: Object.fromEntries(series) };
}

export interface Zoomed<T> {
  answer: Answer<T>;
  /** Steps in view and their data, once a part of a long run is shown in more detail. */
  part: { range: Range; data: T } | null;
  zoom: (range: Range | null) => void;
}

/** `isSampled`: whether there is more to see. `join`: the whole with a part of it in more detail. */
export function useZoomed<T>(
  key: string,
  load: (signal: AbortSignal, range: Range | null) => Promise<T>,
  isSampled: (whole: T) => boolean,
  join: (whole: T, detail: T, range: Range) => T,
): Zoomed<T> {
  const [range, setRange] = useState<Range | null>(null);
  const whole = useLoad(key, (signal) => load(signal, null), ["metrics"]);
  const isAsked = range !== null && !isExport && whole.data !== null && isSampled(whole.data);
  const detail = useLoad(
    isAsked ? JSON.stringify([key, range]) : null,
    async (signal): Promise<{ range: Range; data: T }> => ({ range: range!, data: await load(signal, range) }),
    ["metrics"],
    key,
  );
  const part = isAsked ? detail.data : null;
  const zoom = useCallback((next: Range | null) => setRange((now) => (String(now) === String(next) ? now : next)), []);
  return { answer: whole.data && part ? { ...whole, data: join(whole.data, part.data, part.range) } : whole, part, zoom };
}
