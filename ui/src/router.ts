// Where the page is, in the part of the address after "#": it works from a file, and survives a reload.
import { useEffect, useState } from "preact/hooks";

export interface Place {
  path: string[];
  query: URLSearchParams;
}

export type Query = Record<string, string | number | null | undefined>;

export function readPlace(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function href(path: (string | number)[], query: Query = {}): string {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(pairs.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map((each) => encodeURIComponent(each)).join("/")}${search ? `?${search}` : ""}`;
}

export function go(to: string): void {
  location.hash = to;
}

/** Change parts of the query. The place before stays out of the history, as filters change with every key. */
export function setQuery(changes: Query): void {
  const { path, query } = readPlace();
  const next: Query = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", href(path, next));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function usePlace(): Place {
  const [place, setPlace] = useState(readPlace);
  useEffect(() => {
    const update = () => setPlace(readPlace());
    addEventListener("hashchange", update);
    update(); // the address may have changed after the first drawing
    return () => removeEventListener("hashchange", update);
  }, []);
  return place;
}
