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

const [WIDTH, TOP, ROW] = [640, 8, 44];

export function LedgerFlow({ ledger }: { ledger: Ledger }) {
  const parts = partsOf(ledger);
  const whole = ledger.dispatched || 1;
  const height = TOP * 2 + Math.max(parts.length * ROW, 120);
  const flow = height - TOP * 2;
  let from = TOP;
  const sum = parts.reduce((total, part) => total + part.count, 0);
  const equation = `${number(ledger.dispatched)} dispatched = ${number(ledger.trained)} trained + ${number(ledger.dropped)} dropped + ${number(ledger.buffered)} buffered + ${number(ledger.in_flight)} in flight${ledger.missing ? ` + ${number(ledger.missing)} missing` : ""}`;
  return (
    <div class="ledger">
      <svg viewBox={`0 0 ${WIDTH} ${height}`} role="img" aria-label={equation}>
        <rect class="flow-node" x="118" y={TOP} width="8" height={flow} rx="2" />
        <text x="108" y={height / 2 - 8} text-anchor="end" class="flow-name">
          dispatched
        </text>
        <text x="108" y={height / 2 + 14} text-anchor="end" class="flow-count">
          {number(ledger.dispatched)}
        </text>
        {parts.map((part, at) => {
          const size = (part.count / whole) * flow;
          const y = TOP + at * (flow / parts.length);
          const room = flow / parts.length - 8;
          const end = Math.max(part.count ? 2 : 0, Math.min(room, size));
          const middle = y + room / 2;
          const begin = from;
          from += size;
          return (
            <g key={part.name} class={`flow-${part.kind}`}>
              <title>{`${part.name}: ${part.text}`}</title>
              {part.count ? (
                <path
                  class="flow"
                  d={`M126,${begin} C250,${begin} 250,${middle - end / 2} 370,${middle - end / 2} L370,${middle + end / 2} C250,${middle + end / 2} 250,${begin + Math.max(1, size)} 126,${begin + Math.max(1, size)} Z`}
                />
              ) : null}
              <rect class="flow-end" x="370" y={middle - Math.max(1, end / 2)} width="6" height={Math.max(2, end)} rx="1" />
              <text x="388" y={middle - 2} class="flow-name">
                {part.name}
              </text>
              <text x="388" y={middle + 15} class="flow-count">
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
