// Everything that is known about one token.
import type { Maybe, Rollout, Tokens, Values } from "../api";
import { fixed, NONE, number, percent, signed } from "../format";
import { KINDS } from "./colourings";
import { itemAt, nameOf, Pictures } from "./picture";
import { shownText } from "./tokens";

function exact(value: Maybe | undefined): string {
  return value === null || value === undefined ? NONE : fixed(value, 6);
}

const COLUMNS: ["learner_logprobs" | "advantages" | "returns" | "values" | "reference_logprobs" | "entropies", string][] = [
  ["advantages", "advantage"],
  ["returns", "return"],
  ["values", "value"],
  ["reference_logprobs", "reference log-prob"],
  ["entropies", "entropy"],
];

export function TokenFacts({ run, rollout: shown, tokens, place }: { run: string; rollout: Rollout; tokens: Tokens; place: number }) {
  const at = place - tokens.offset;
  if (at < 0 || at >= tokens.ids.length) return <p class="muted">The chosen token is on another page.</p>;
  const of = (values: Values) => values?.[at] ?? null;
  const [rollout, learner] = [of(tokens.logprobs), of(tokens.learner_logprobs)];
  const version = tokens.versions[at] ?? -1;
  const turn = tokens.turns[at] ?? -1;
  const media = itemAt(shown, place);
  const rows: [string, string, string, string?][] = [
    ["token-place", "place", `${number(place + 1)} of ${number(tokens.total)}`],
    ["token-id", "token id", String(tokens.ids[at] ?? NONE)],
    ["token-bytes", "bytes", spaced(tokens.bytes[at] ?? "") || "not known", tokens.is_split.includes(at) ? "Not a whole character: several tokens write it together." : undefined],
    ["token-kind", "kind", KINDS[tokens.kinds[at] ?? 0] ?? NONE],
    ["token-mask", "in the loss", tokens.mask[at] ? "yes" : "no"],
    ["token-version", "version", version < 0 ? "not sampled" : String(version)],
    ["token-turn", "turn", turn < 0 ? NONE : String(turn + 1)],
    ["token-logprob", "rollout log-prob", exact(rollout)],
    ["token-prob", "probability", rollout === null ? NONE : percent(Math.exp(rollout))],
    ["token-learner", "learner log-prob", exact(learner)],
    ["token-difference", "difference", signed(of(tokens.difference), 6)],
    ...COLUMNS.filter(([column]) => column === "advantages" || tokens[column]).map(([column, text]): [string, string, string] => [`token-${column}`, text, column === "advantages" ? signed(of(tokens[column]), 6) : exact(of(tokens[column]))]),
  ];
  return (
    <section class="panel token-facts" aria-live="polite" aria-label="The chosen token">
      <p class="token-shown">
        <code>{shownText(tokens.texts[at] ?? "")}</code>
        {tokens.retokenised.includes(at) ? <span class="badge">earlier reply</span> : null}
      </p>
      {media ? (
        <div class="token-media">
          <p class="muted">
            Stands for {nameOf(shown, media.item)}: token {number(place - media.from + 1)} of {number(media.to - media.from)}
          </p>
          <Pictures key={media.item.digest} run={run} item={media.item} digest={media.item.digest} name={nameOf(shown, media.item)} />
        </div>
      ) : null}
      <dl>
        {rows.map(([id, name, value, note]) => (
          <div key={id}>
            <dt>{name}</dt>
            <dd class="num" data-value={id} title={note}>
              {value}
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function spaced(hex: string): string {
  return hex.replaceAll(/(..)(?=.)/g, "$1 ");
}
