// Numbers, times and values as people read them.
import type { Maybe } from "./api";

export const NONE = "–";

/** Four significant digits; very small and very large numbers in powers of ten. */
export function number(value: Maybe | undefined, digits = 4): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US").replaceAll(",", "\u202f");
  if (size >= 1e6 || size < 1e-3) return Number(value.toPrecision(Math.max(1, digits - 1))).toExponential().replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f");
  return Number(value.toPrecision(digits)).toString();
}

/** A fixed number of decimals, so that numbers in a column align. */
export function fixed(value: Maybe | undefined, decimals = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -decimals) return value.toExponential(1).replace("e+", "e");
  return Math.abs(value) >= 1e6 ? number(value) : value.toFixed(decimals);
}

export function signed(value: Maybe | undefined, decimals = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return `${value > 0 ? "+" : ""}${fixed(value, decimals)}`.replace(/^-/, "−");
}

export function short(value: Maybe | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  return number(value, 3);
}

function trim(value: number): string {
  return value.toFixed(Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0);
}

export function percent(value: Maybe | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value !== 0 ? 1 : 0)}%`;
}

export function duration(seconds: Maybe | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${number(seconds * 1000, 3)} ms`;
  if (seconds < 60) return `${number(seconds, 3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function ago(time: Maybe | undefined): string {
  if (!time) return NONE;
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export function clock(time: Maybe | undefined): string {
  return time ? new Date(time * 1000).toLocaleString("sv-SE") : NONE;
}

export function bytes(count: Maybe | undefined): string {
  if (count === null || count === undefined) return NONE;
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]] as const) {
    if (count >= size) return `${trim(count / size)} ${unit}`;
  }
  return `${count} bytes`;
}

/** A setting as it would be written in a recipe. */
export function setting(value: unknown): string {
  if (value === undefined) return "(not there)";
  return typeof value === "string" ? value || '""' : JSON.stringify(value);
}

/** Text on one line, with what cannot be seen made visible. */
export function visible(text: string): string {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

export function isText(value: unknown): value is string {
  return typeof value === "string";
}
