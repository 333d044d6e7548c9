// A long list of rows of equal height: only those in view are in the document.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

const SPARE = 8;

export function VirtualRows<T>({ rows, height, most, label, render }: { rows: T[]; height: number; most: number; label: string; render: (row: T, at: number) => ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  useEffect(() => {
    if (box.current && box.current.scrollTop > rows.length * height) box.current.scrollTop = 0;
  }, [rows.length, height]);
  const first = Math.max(0, Math.floor(top / height) - SPARE);
  const last = Math.min(rows.length, Math.ceil((top + most) / height) + SPARE);
  return (
    <div
      class="virtual"
      ref={box}
      role="region"
      aria-label={label}
      tabIndex={0}
      style={{ maxHeight: `${most}px` }}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
    >
      <div style={{ height: `${rows.length * height}px`, position: "relative" }}>
        <div style={{ position: "absolute", top: `${first * height}px`, left: 0, right: 0 }}>{rows.slice(first, last).map((row, at) => render(row, first + at))}</div>
      </div>
    </div>
  );
}
