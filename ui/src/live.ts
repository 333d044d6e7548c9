// Server-sent events: which parts of which runs changed.
import { useEffect, useState } from "preact/hooks";

type Listener = (parts: string[]) => void;
export type Connection = "off" | "connecting" | "live" | "paused" | "lost" | "gone";

const listeners = new Set<Listener>();
const watchers = new Set<(state: Connection) => void>();
let source: EventSource | null = null;
let watched: string | null | undefined; // a run, all runs, or nothing yet
let wasLost = false;
let state: Connection = "off";

function report(next: Connection): void {
  state = next;
  for (const each of watchers) each(next);
}

/** Follow one run, or all of them if it is null. */
export function follow(run: string | null): void {
  if (run === watched) return;
  watched = run;
  wasLost = false;
  if (document.hidden) pause();
  else connect(run);
}

/** A browser opens few connections to one server, so pages that nobody sees do not hold any. */
function pause(): void {
  source?.close();
  source = null;
  wasLost = true;
  report("paused");
}

document.addEventListener("visibilitychange", () => {
  if (watched === undefined || state === "gone") return;
  if (document.hidden) pause();
  else if (source === null) connect(watched);
});

function connect(run: string | null): void {
  source?.close();
  report("connecting");
  source = new EventSource(run === null ? "/api/events" : `/api/runs/${encodeURIComponent(run)}/events`);
  source.addEventListener("hello", () => {
    report("live");
    // Changes during a pause of the connection were not told.
    if (wasLost) for (const each of listeners) each(["metrics", "status", "ledger", "rollouts", "eval", "config", "trace"]);
    wasLost = false;
  });
  source.addEventListener("changed", (event) => {
    const { parts } = JSON.parse((event as MessageEvent<string>).data) as { parts: string[] };
    for (const each of [...listeners]) each(parts);
  });
  source.addEventListener("gone", () => {
    for (const each of [...listeners]) each(["status", "metrics", "rollouts", "gone"]);
    if (run !== null) report("gone");
  });
  source.onerror = () => {
    if (state === "gone") source?.close();
    else {
      wasLost = true;
      report("lost");
    }
  };
}

export function onChange(parts: string[], call: () => void): () => void {
  const listener: Listener = (changed) => {
    if (parts.includes("*") || changed.includes("gone") || changed.some((each) => parts.includes(each))) call();
  };
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function useConnection(): Connection {
  const [shown, setShown] = useState(state);
  useEffect(() => {
    setShown(state);
    watchers.add(setShown);
    return () => void watchers.delete(setShown);
  }, []);
  return shown;
}
