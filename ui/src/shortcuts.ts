// Keys that work everywhere but in fields.
import { useEffect, useRef } from "preact/hooks";

export type Keys = Record<string, (event: KeyboardEvent) => void>;

export function useShortcuts(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const target = event.target as HTMLElement | null;
      if (target && /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) && event.key !== "Escape") return;
      if (document.querySelector("dialog[open]") && event.key !== "Escape") return;
      const call = latest.current[event.key];
      if (call) {
        event.preventDefault();
        call(event);
      }
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
}

/** Move the focus between rows of a list. */
export function moveRow(by: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  const at = rows.findIndex((row) => row === document.activeElement);
  const next = rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

export function focusSearch(): void {
  const field = document.querySelector<HTMLInputElement>("[data-search]");
  field?.focus();
  field?.select();
}

export const HELP: [string, [string, string][]][] = [
  ["Everywhere", [["?", "Show this list"], ["/", "Go to the search field"], ["j  k", "Next or previous row of a list"], ["Enter", "Open the focused row"], ["d", "Light, dark, or as the system"], ["h", "All runs"], ["Esc", "Close a dialog or leave a field"]]],
  ["In a run", [["1 … 6", "Overview, metrics, rollouts, timeline, engine, config"], ["l", "Logarithmic scale"], ["x", "Steps or time on the x-axis"], ["← →", "In a chart: move the cursor"]]],
  ["Rollout", [["← →", "In the tokens: previous or next token"], ["↑ ↓", "In the tokens: ten tokens back or ahead"], ["c", "Next colouring"], ["m  M", "Next or previous largest mismatch"], ["[  ]", "Previous or next rollout"], ["g", "The whole group side by side"]]],
  ["Timeline", [["+  −", "Zoom"], ["← →", "Move"], ["0", "The whole run"]]],
];
