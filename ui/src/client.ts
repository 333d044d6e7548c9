// The one way to data: the server, or what an exported file carries with it.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { Metrics } from "./api";
import { onChange } from "./live";

export type Params = Record<string, string | number | null | undefined>;

export class Failure extends Error {
  constructor(
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

const embedded: Record<string, unknown> | null = (() => {
  const element = document.getElementById("headwater-data");
  return element ? (JSON.parse(element.textContent ?? "{}") as Record<string, unknown>) : null;
})();

export const isExport = embedded !== null;

export async function ask<T>(path: string[], params: Params = {}, signal?: AbortSignal): Promise<T> {
  const pairs = Object.entries(params)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => [name, String(value)] as [string, string])
    .sort(([a], [b]) => (a < b ? -1 : 1));
  if (embedded) {
    const search = pairs.map(([name, value]) => `${name}=${value}`).join("&");
    const key = `/api/${path.join("/")}${search ? `?${search}` : ""}`;
    if (key in embedded) return embedded[key] as T;
    throw new Failure("not_in_export", "This part is not in the exported file.");
  }
  const search = new URLSearchParams(pairs).toString();
  let response: Response;
  try {
    response = await fetch(`/api/${path.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`, { signal });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Failure("offline", "The server of the dashboard does not answer. Start it again with: headwater ui");
  }
  const answer = (await response.json().catch(() => null)) as { error?: { code: string; message: string } } | null;
  if (response.ok && answer !== null) return answer as T;
  throw new Failure(answer?.error?.code ?? "internal", answer?.error?.message ?? `The server answered ${response.status}.`);
}

/** Where an image or a frame of a video is; null if an exported file does not have it. */
export function pictureUrl(run: string, digest: string, frame: number | null): string | null {
  const search = frame === null ? `digest=${digest}` : `digest=${digest}&frame=${frame}`;
  if (!embedded) return `/api/runs/${encodeURIComponent(run)}/media?${search}`;
  return (embedded[`/api/runs/${run}/media?${search}`] as { url: string | null } | undefined)?.url ?? null;
}

/** Several metrics of one run. An exported file has them one by one. */
export async function askMetrics(run: string, keys: string[], kind: string, signal?: AbortSignal, range: [number, number] | null = null): Promise<Metrics> {
  const path = ["runs", run, "metrics"];
  const kindParam = kind === "train" ? undefined : kind;
  if (!isExport) {
    const joined = keys.map((key) => key.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
    return ask<Metrics>(path, { keys: joined, kind: kindParam, from: range?.[0], to: range?.[1] }, signal);
  }
  const found: Metrics[] = [];
  for (const key of keys) {
    try {
      found.push(await ask<Metrics>(path, { keys: key, kind: kindParam }));
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
    }
  }
  const first = found[0];
  if (!first) throw new Failure("not_in_export", "These metrics are not in the exported file.");
  return { ...first, series: Object.assign({}, ...found.map((each) => each.series)) };
}

interface Loaded<T> {
  key: string | null;
  scope: string | null;
  data: T | null;
  error: Failure | null;
}

export interface Answer<T> {
  data: T | null;
  error: Failure | null;
  isLoading: boolean;
  reload: () => void;
}

/**
 * Loads when `key` changes, and again when one of `parts` of the shown run changes. Meanwhile, old data stay visible if
 * they are of the same `scope`, so that a filter or the next page does not empty the screen.
 */
export function useLoad<T>(key: string | null, load: (signal: AbortSignal) => Promise<T>, parts: string[] = [], scope = key): Answer<T> {
  const [state, setState] = useState<Loaded<T>>({ key: null, scope: null, data: null, error: null });
  const [count, setCount] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  const busy = useRef(false);
  const again = useRef(false);
  useEffect(() => {
    if (key === null) return;
    const abort = new AbortController();
    busy.current = true;
    latest
      .current(abort.signal)
      .then((data) => setState({ key, scope, data, error: null }))
      .catch((error: unknown) => {
        if (abort.signal.aborted) return;
        const failure = error instanceof Failure ? error : new Failure("internal", `The page could not read the answer: ${String(error)}`);
        setState({ key, scope, data: null, error: failure });
      })
      .finally(() => {
        if (abort.signal.aborted) return;
        busy.current = false;
        if (again.current) {
          again.current = false;
          setCount((before) => before + 1);
        }
      });
    return () => abort.abort();
  }, [key, count]);
  const reload = useCallback(() => {
    // A slow answer is not interrupted by the next change of a live run.
    if (busy.current) again.current = true;
    else setCount((before) => before + 1);
  }, []);
  const watched = parts.join(",");
  useEffect(() => (watched ? onChange(watched.split(","), reload) : undefined), [watched, reload]);
  const isCurrent = state.key === key;
  return { data: isCurrent || state.scope === scope ? state.data : null, error: isCurrent ? state.error : null, isLoading: key !== null && !isCurrent, reload };
}

export function useAnswer<T>(path: string[] | null, params: Params = {}, parts: string[] = []): Answer<T> {
  const key = path === null ? null : JSON.stringify([path, params]);
  return useLoad<T>(key, (signal) => ask<T>(path ?? [], params, signal), parts, path && JSON.stringify(path));
}
