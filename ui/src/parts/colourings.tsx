// By what tokens are coloured, and the legend that says so.
import type { Rollout, Tokens, Values } from "../api";
import { diverging, sequential, type Theme, tint } from "../colours";
import { number } from "../format";
import { useTheme } from "../theme";

export type Kind = "sequential" | "diverging" | "category" | "none";

export interface Colouring {
  id: string;
  name: string;
  text: string;
  kind: Kind;
  /** The full colour is at least for this value, so that rounding errors do not look like differences. */
  least?: number;
  column?: "logprobs" | "learner_logprobs" | "difference" | "advantages" | "entropies";
}

export const COLOURINGS: Colouring[] = [
  { id: "logprobs", name: "Rollout log-prob", text: "What the engine computed when it sampled the token. The stronger the colour, the less likely the token was.", kind: "sequential", column: "logprobs", least: 1 },
  { id: "learner", name: "Learner log-prob", text: "What the learner computes for the same token. The stronger the colour, the less likely the token.", kind: "sequential", column: "learner_logprobs", least: 1 },
  { id: "difference", name: "Difference", text: "Learner minus rollout. Orange: the learner gives the token more; blue: less.", kind: "diverging", column: "difference", least: 0.02 },
  { id: "advantage", name: "Advantage", text: "Orange: the update makes the token more likely; blue: less likely.", kind: "diverging", column: "advantages", least: 0.1 },
  { id: "entropy", name: "Entropy", text: "How undecided the model was, in nats.", kind: "sequential", column: "entropies", least: 1 },
  { id: "version", name: "Policy version", text: "Which version of the weights sampled the token.", kind: "category" },
  { id: "mask", name: "Mask", text: "Whether the token is in the loss.", kind: "category" },
  { id: "turn", name: "Turn", text: "In which turn of the model the token was written.", kind: "category" },
  { id: "none", name: "Nothing", text: "No colours.", kind: "none" },
];

export const KINDS = ["prompt", "trained", "sampled, not trained", "inserted"];

export function isThere(colouring: Colouring, rollout: Rollout): boolean {
  if (!colouring.column) return true;
  if (colouring.column === "difference") return rollout.columns.includes("learner_logprobs");
  return rollout.columns.includes(colouring.column);
}

/** The value with the strongest colour. */
export function mostOf(colouring: Colouring, rollout: Rollout): number {
  const [low, high] = rollout.ranges[colouring.column ?? ""] ?? [null, null];
  return Math.max(Math.abs(low ?? 0), Math.abs(high ?? 0), colouring.least ?? 0) || 1;
}

export function colourOf(colouring: Colouring, rollout: Rollout, tokens: Tokens, at: number, theme: Theme): string | undefined {
  if (colouring.id === "mask") return tint(theme, [6, 0, 1, 3][tokens.kinds[at] ?? 0] ?? 6);
  if (colouring.id === "version") {
    const version = tokens.versions[at] ?? -1;
    return version < 0 ? undefined : tint(theme, rollout.policy_versions.indexOf(version));
  }
  if (colouring.id === "turn") {
    const turn = tokens.turns[at] ?? -1;
    return turn < 0 ? undefined : tint(theme, turn);
  }
  if (!colouring.column) return undefined;
  const value = (tokens[colouring.column] as Values)?.[at];
  if (value === null || value === undefined) return undefined;
  const most = mostOf(colouring, rollout);
  return colouring.kind === "sequential" ? sequential(theme, value, most) : diverging(theme, value, most);
}

export function Legend({ colouring, rollout }: { colouring: Colouring; rollout: Rollout }) {
  const theme = useTheme();
  return (
    <div class="scale">
      <Marks colouring={colouring} rollout={rollout} theme={theme} />
      <span class="muted">{colouring.text}</span>
    </div>
  );
}

function Marks({ colouring, rollout, theme }: { colouring: Colouring; rollout: Rollout; theme: Theme }) {
  if (colouring.kind === "none") return null;
  const entries: [string, string][] =
    colouring.id === "mask"
      ? KINDS.map((kind, at) => [kind, tint(theme, [6, 0, 1, 3][at] ?? 6)])
      : colouring.id === "version"
        ? rollout.policy_versions.slice(0, 12).map((version, at) => [`version ${version}`, tint(theme, at)])
        : colouring.id === "turn"
          ? Array.from({ length: Math.min(12, Math.max(1, rollout.turns)) }, (_, at) => [`turn ${at + 1}`, tint(theme, at)])
          : gradient(colouring, mostOf(colouring, rollout), theme);
  return (
    <ul class={colouring.kind === "category" ? "swatches" : "swatches joined"}>
      {entries.map(([text, colour]) => (
        <li key={text} class="num" style={{ background: colour }}>
          {text}
        </li>
      ))}
    </ul>
  );
}

function gradient(colouring: Colouring, most: number, theme: Theme): [string, string][] {
  const sign = colouring.column === "entropies" ? 1 : -1;
  if (colouring.kind === "sequential") return [0, 0.05, 0.25, 0.5, 1].map((share) => [number(share * most * sign || 0, 2), sequential(theme, share * most, most)]);
  return [-1, -0.25, 0, 0.25, 1].map((share) => [`${share > 0 ? "+" : ""}${number(share * most, 2)}`, diverging(theme, share * most, most)]);
}
