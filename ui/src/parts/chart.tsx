// Curves over steps or time, drawn by uPlot.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { Maybe } from "../api";
import { faint, line } from "../colours";
import { clock, NONE, number } from "../format";
import { useTheme } from "../theme";
import type { Range } from "./zoom";

export interface Curve {
  label: string;
  values: Maybe[];
  low?: Maybe[] | null;
  high?: Maybe[] | null;
  colour?: number;
  text?: string;
}

export interface View {
  byTime: boolean;
  isLog: boolean;
  smoothing: number;
}

export const PLAIN: View = { byTime: false, isLog: false, smoothing: 0 };

/** An exponential mean that is not pulled towards the first value. */
export function smooth(values: Maybe[], weight: number): Maybe[] {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const positive = (values: Maybe[]) => values.map((value) => (value !== null && value > 0 ? value : null));
/** Some room above and below; values that are all equal are not stretched over the whole height. */
function aroundValues(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  return [low - (high - low) * 0.06, high + (high - low) * 0.06];
}

function lastOf(values: Maybe[]): Maybe {
  return values.findLast((value) => value !== null) ?? null;
}

/** The steps that a chart shows; null if it shows all. */
function inView(plot: uPlot, steps: number[], byTime: boolean): Range | null {
  const [x, low, high] = [plot.data[0], plot.scales["x"]?.min, plot.scales["x"]?.max];
  const last = x.length - 1;
  if (low === undefined || high === undefined || last < 1 || (low <= (x[0] ?? 0) && high >= (x[last] ?? 0))) return null;
  if (!byTime) return [Math.max(0, Math.floor(low)), Math.ceil(high)];
  // A mean stands at the last of its steps, so the neighbours are in view, too.
  const first = x.findIndex((each) => each >= low);
  const end = x.findLastIndex((each) => each <= high);
  return [steps[Math.max(0, first - 1)] ?? 0, steps[Math.min(last, end + 1)] ?? 0];
}

const SYNC = uPlot.sync("headwater");

interface Props {
  title: string;
  text?: string;
  unit?: string;
  steps: number[];
  times?: number[];
  curves: Curve[];
  view?: View;
  height?: number;
  /** Values are parts of a whole and lie on one another. */
  isStacked?: boolean;
  format?: (value: Maybe | undefined) => string;
  minimum?: number;
  /** Curves are steps of one scale, from light to dark. */
  isOrdered?: boolean;
  /** Called with the steps in view, or null when all of them are. */
  onZoom?: (range: Range | null) => void;
  /** A sentence below the curves. */
  note?: string;
}

export function Chart({ title, text, unit, steps, times, curves, view = PLAIN, height = 180, isStacked, isOrdered, format = number, minimum, onZoom, note }: Props) {
  const theme = useTheme();
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const zoomed = useRef({ onZoom, steps });
  zoomed.current = { onZoom, steps };
  const [at, setAt] = useState<number | null>(null);
  const [hidden, setHidden] = useState<string[]>([]);
  const byTime = view.byTime && times !== undefined && !isStacked;
  const isLog = view.isLog && !isStacked;
  const shown = curves.filter((curve) => !hidden.includes(curve.label));
  const drawn = [...shown].reverse(); // the first curve lies on top
  const shape = JSON.stringify([theme, byTime, isLog, isStacked, isOrdered && curves.length, height, view.smoothing > 0, shown.map((each) => [each.label, each.low != null, each.colour]), minimum]);
  const labels = curves.map((curve) => curve.label);
  const colourAt = (at: number) => (isOrdered ? faint(line(theme, 0), Math.min(1, 0.3 + (0.7 * at) / Math.max(1, curves.length - 1))) : line(theme, at));

  const data = useMemo((): uPlot.AlignedData => {
    const x = byTime ? (times ?? []) : steps;
    const columns: Maybe[][] = [];
    if (isStacked) {
      let below: number[] = steps.map(() => 0);
      for (const curve of shown) {
        below = below.map((sum, place) => sum + (curve.values[place] ?? 0));
        columns.unshift([...below]);
      }
    } else {
      for (const curve of drawn) {
        const values = isLog ? positive(curve.values) : curve.values;
        if (view.smoothing > 0) columns.push(smooth(values, view.smoothing), values);
        else columns.push(values);
        if (curve.low != null && curve.high != null) columns.push(...[curve.low, curve.high].map((each) => (isLog ? positive(each) : each)));
      }
    }
    return [x, ...columns] as uPlot.AlignedData;
  }, [steps, times, curves, hidden, byTime, isLog, view.smoothing, isStacked]);

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const style = getComputedStyle(document.documentElement);
    const [muted, grid] = [style.getPropertyValue("--muted").trim(), style.getPropertyValue("--grid").trim()];
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    const colourOf = (curve: Curve) => colourAt(curve.colour ?? labels.indexOf(curve.label));
    if (isStacked) {
      for (const curve of [...shown].reverse()) {
        series.push({ stroke: colourOf(curve), width: 1, fill: faint(colourOf(curve), theme === "dark" ? 0.55 : 0.45), points: { show: false } });
      }
      for (let each = 1; each < shown.length; each++) bands.push({ series: [each, each + 1] });
    } else {
      for (const curve of drawn) {
        const colour = colourOf(curve);
        const points = { show: steps.length < 3, size: 6, fill: colour };
        series.push({ stroke: colour, width: 1.75, spanGaps: true, points });
        if (view.smoothing > 0) series.push({ stroke: faint(colour, 0.3), width: 1, spanGaps: true, points: { show: false } });
        if (curve.low != null && curve.high != null) {
          const [low, high] = [series.length, series.length + 1];
          series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
          bands.push({ series: [high, low], fill: faint(colour, 0.14) });
        }
      }
    }
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: muted, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const made = new uPlot(
      {
        width: element.clientWidth || 300,
        height,
        legend: { show: false },
        cursor: { sync: { key: SYNC.key }, y: false, drag: { x: true, y: false }, points: { size: 6 } },
        scales: {
          x: { time: byTime, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
          y: isLog ? { distr: 3 } : minimum !== undefined ? { range: (_, low, high) => [Math.min(low, minimum), high > minimum ? high * 1.05 : minimum + 1] } : { range: aroundValues },
        },
        axes: [
          { ...axis, size: 26, gap: 4, values: byTime ? undefined : (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? number(tick) : "")) },
          { ...axis, size: 52, gap: 4, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick).replace(/\.?0+e/, "e"))) },
        ],
        series,
        bands,
        hooks: {
          setCursor: [(self) => setAt(self.cursor.idx ?? null)],
          setScale: [(self, scale) => scale === "x" && zoomed.current.onZoom?.(inView(self, zoomed.current.steps, byTime))],
        },
      } as uPlot.Options,
      data,
      element,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    // A zoom by hand stays when a live run adds points.
    const made = plot.current;
    if (!made || made.data === data) return;
    const before = made.data[0];
    const isZoomed = before.length > 1 && (made.scales["x"]?.min !== before[0] || made.scales["x"]?.max !== before[before.length - 1]);
    made.setData(data, !isZoomed);
    if (isZoomed) made.redraw();
  }, [data]);

  const place = at !== null && at < steps.length ? at : steps.length - 1;
  const move = (event: KeyboardEvent) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const next = Math.min(steps.length - 1, Math.max(0, place + (event.key === "ArrowLeft" ? -1 : 1)));
    const made = plot.current;
    made?.setCursor({ left: made.valToPos(data[0][next] ?? 0, "x"), top: 10 });
    setAt(next);
  };
  const toggle = (label: string) => setHidden((before) => (before.includes(label) ? before.filter((each) => each !== label) : [...before, label]));
  const where = steps.length === 0 ? "" : byTime ? clock(times?.[place]) : `step ${number(steps[place])}`;
  const summary = steps.length === 0 ? "no values yet" : curves.map((curve) => `${curve.label}: ${format(curve.values[0])} at first, ${format(curve.values[curve.values.length - 1])} at step ${steps[steps.length - 1]}`).join("; ");
  return (
    <figure class="chart">
      <figcaption>
        <h3 title={text}>{title}</h3>
        {unit ? <span class="unit">{unit}</span> : null}
        <span class="where num">{where}</span>
      </figcaption>
      <ul class="legend">
        {curves.map((curve, index) => (
          <li key={curve.label}>
            <button type="button" class="key" title={curve.text || undefined} aria-pressed={!hidden.includes(curve.label)} onClick={() => toggle(curve.label)}>
              <span class="swatch" aria-hidden="true" style={{ background: colourAt(curve.colour ?? index) }} />
              <span>{curve.label}</span>
              <span class="num value">{at === null ? format(lastOf(curve.values)) : curve.values.length ? format(curve.values[place]) : NONE}</span>
            </button>
          </li>
        ))}
      </ul>
      {note ? <p class="muted small">{note}</p> : null}
      <div class="plot" ref={box} style={{ height: `${height}px` }} tabIndex={0} role="application" aria-roledescription="chart" aria-label={`${title}. ${summary}`} onKeyDown={move} />
    </figure>
  );
}
