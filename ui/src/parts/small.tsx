// Small things that several pages show.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Maybe } from "../api";

const MARKS: Record<string, string> = { running: "●", finished: "✓", failed: "✕", killed: "✕", unresponsive: "!", interrupted: "‖", unknown: "?" };

export function State({ state, text }: { state: string; text?: string }) {
  return (
    <span class={`badge state-${state}`} title={text}>
      <span aria-hidden="true">{MARKS[state] ?? "·"}</span> {state}
    </span>
  );
}

export function Sparkline({ values, label }: { values: Maybe[]; label: string }) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) return <span class="muted">–</span>;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [width, height] = [96, 22];
  const x = (at: number) => (at / (values.length - 1)) * (width - 4) + 2;
  const y = (value: number) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
  const points = values.flatMap((value, at) => (value === null ? [] : [`${x(at).toFixed(1)},${y(value).toFixed(1)}`]));
  const last = points[points.length - 1]?.split(",") ?? ["0", "0"];
  return (
    <svg class="sparkline" width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}>
      <polyline points={points.join(" ")} />
      <circle cx={last[0]} cy={last[1]} r="2" />
    </svg>
  );
}

/** A share of a whole, as a bar and in words. */
export function Meter({ share, label }: { share: Maybe; label: string }) {
  return (
    <span class="meter" role="img" aria-label={label}>
      <span style={{ width: `${Math.min(1, Math.max(0, share ?? 0)) * 100}%` }} />
    </span>
  );
}

export function Fact({ name, children, title }: { name: string; children: ComponentChildren; title?: string }) {
  return (
    <div class="fact" title={title}>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** A field that reports what was typed after a short pause. */
export function SearchField({ value, onChange, label, id }: { value: string; onChange: (text: string) => void; label: string; id: string }) {
  const [text, setText] = useState(value);
  const timer = useRef(0);
  useEffect(() => setText(value), [value]);
  return (
    <span class="search">
      <label class="visually-hidden" for={id}>
        {label}
      </label>
      <input
        id={id}
        type="search"
        data-search
        placeholder={label}
        value={text}
        onInput={(event) => {
          const typed = event.currentTarget.value;
          setText(typed);
          clearTimeout(timer.current);
          timer.current = window.setTimeout(() => onChange(typed), 200);
        }}
        onKeyDown={(event) => {
          if (event.key === "Escape") event.currentTarget.blur();
        }}
      />
      <kbd aria-hidden="true">/</kbd>
    </span>
  );
}

export function Choice<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: [T, string][]; onChange: (value: T) => void }) {
  return (
    <label class="choice">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value as T)}>
        {options.map(([each, text]) => (
          <option key={each} value={each} selected={each === value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function NumberField({ label, value, onChange, step }: { label: string; value: string; onChange: (value: string) => void; step?: string }) {
  return (
    <label class="choice">
      <span>{label}</span>
      <input type="number" step={step ?? "any"} value={value} onChange={(event) => onChange(event.currentTarget.value)} />
    </label>
  );
}

export function Pager({ offset, limit, total, isComplete, onMove }: { offset: number; limit: number; total: number; isComplete?: boolean; onMove: (offset: number) => void }) {
  const last = Math.min(total, offset + limit);
  return (
    <nav class="pager" aria-label="Pages">
      <button type="button" disabled={offset <= 0} onClick={() => onMove(Math.max(0, offset - limit))}>
        Previous
      </button>
      <span class="num">
        {total === 0 ? 0 : offset + 1}–{last} of {total.toLocaleString("en-US").replaceAll(",", "\u202f")}
        {isComplete === false ? "+" : ""}
      </span>
      <button type="button" disabled={last >= total} onClick={() => onMove(offset + limit)}>
        Next
      </button>
    </nav>
  );
}
