// What became of every group that was dispatched. The parts always add up.
import type { Ledger } from "../api";
import { number, percent } from "../format";

interface Part {
  name: string;
  count: number;
  text: string;
  kind: "trained" | "dropped" | "open" | "missing";
}

export function partsOf(ledger: Ledger): Part[] {
  const parts: Part[] = [
    { name: "trained", count: ledger.trained, text: "used in an update", kind: "trained" },
    ...ledger.drops.map((drop) => ({ name: `dropped: ${drop.kind.replaceAll("_", " ")}`, count: drop.count, text: drop.text + (drop.message ? ` For example: ${drop.message}` : ""), kind: "dropped" as const })),
    { name: "buffered", count: ledger.buffered, text: "complete, waiting for the learner", kind: "open" },
    { name: "in flight", count: ledger.in_flight, text: "being generated or scored", kind: "open" },
  ];
  if (ledger.missing) parts.push({ name: "missing", count: ledger.missing, text: "not accounted for: please report it", kind: "missing" });
  return parts;
}

const [WIDTH, TOP, FLOW, LABEL, GAP] = [640, 6, 150, 38, 8];

export function LedgerFlow({ ledger }: { ledger: Ledger }) {
  const parts = partsOf(ledger);
  const whole = Math.max(1, ledger.dispatched);
  const sizes = parts.map((part) => (part.count / whole) * FLOW);
  const slots = sizes.map((size) => Math.max(size, LABEL) + GAP);
  const height = slots.reduce((sum, slot) => sum + slot, 2 * TOP);
  const left = (height - FLOW) / 2;
  const sum = parts.reduce((total, part) => total + part.count, 0);
  const equation = `${number(ledger.dispatched)} dispatched = ${number(ledger.trained)} trained + ${number(ledger.dropped)} dropped + ${number(ledger.buffered)} buffered + ${number(ledger.in_flight)} in flight${ledger.missing ? ` + ${number(ledger.missing)} missing` : ""}`;
  const before = (values: number[], at: number) => values.slice(0, at).reduce((total, value) => total + value, 0);
  return (
    <div class="ledger">
      <svg viewBox={`0 0 ${WIDTH} ${height}`} role="img" aria-label={equation}>
        <rect class="flow-node" x="118" y={left} width="6" height={FLOW} rx="1" />
        <text x="106" y={height / 2 - 6} text-anchor="end" class="flow-name">
          dispatched
        </text>
        <text x="106" y={height / 2 + 13} text-anchor="end" class="flow-count">
          {number(ledger.dispatched)}
        </text>
        {parts.map((part, at) => {
          const size = sizes[at] ?? 0;
          const shown = part.count ? Math.max(1.5, size) : 0;
          const begin = left + before(sizes, at);
          const middle = TOP + before(slots, at) + ((slots[at] ?? 0) - GAP) / 2;
          const end = middle - shown / 2;
          return (
            <g key={part.name} class={`flow-${part.kind}`}>
              <title>{`${part.name}: ${part.text}`}</title>
              {part.count ? <path class="flow" d={`M124,${begin} C260,${begin} 260,${end} 400,${end} L400,${end + shown} C260,${end + shown} 260,${begin + shown} 124,${begin + shown} Z`} /> : null}
              <rect class="flow-end" x="400" y={middle - Math.max(1, shown / 2)} width="6" height={Math.max(2, shown)} rx="1" />
              <text x="418" y={middle - 4} class="flow-name">
                {part.name}
              </text>
              <text x="418" y={middle + 14} class="flow-count">
                {number(part.count)} <tspan class="flow-share">{percent(part.count / whole)}</tspan>
              </text>
            </g>
          );
        })}
      </svg>
      <p class={sum === ledger.dispatched && !ledger.missing ? "adds-up" : "adds-up is-wrong"}>
        <span class="num">{equation}</span> {ledger.missing ? <strong>Groups are missing.</strong> : sum === ledger.dispatched ? "✓ adds up" : <strong>The parts do not add up.</strong>}
      </p>
    </div>
  );
}
