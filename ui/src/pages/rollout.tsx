// One rollout: every token with both log-probs, version, mask and advantage.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Mismatches, Rollout, Tokens } from "../api";
import { isExport, useAnswer } from "../client";
import { fixed, number, signed } from "../format";
import { COLOURINGS, isThere, Legend } from "../parts/colourings";
import { Conversation } from "../parts/conversation";
import { Choice, Fact, Pager } from "../parts/small";
import { Failed, Loading, Problems, Shown } from "../parts/states";
import { TokenFacts } from "../parts/tokenfacts";
import { shownText, TokenField } from "../parts/tokens";
import { go, href, type Place, setQuery } from "../router";
import { useShortcuts } from "../shortcuts";
import { useTheme } from "../theme";

const PAGE = 4096;

export function RolloutPage({ name, place }: { name: string; place: Place }) {
  const id = place.query.get("id") ?? "";
  const answer = useAnswer<Rollout>(["runs", name, "rollout"], { id });
  return (
    <Shown answer={answer} what="the rollout">
      {(rollout) => <Body key={rollout.id} name={name} rollout={rollout} place={place} />}
    </Shown>
  );
}

function Body({ name, rollout, place }: { name: string; rollout: Rollout; place: Place }) {
  const isConversation = place.query.get("view") === "conversation";
  const source = rollout.source === "train" ? null : rollout.source;
  const open = (id: string | null) => id && go(href(["run", name, "rollout"], { id, view: place.query.get("view"), colour: place.query.get("colour") }));
  useShortcuts({
    "[": () => open(rollout.previous),
    "]": () => open(rollout.next),
    g: () => go(href(["run", name, "group"], { step: rollout.step, uid: rollout.uid, source })),
  });
  return (
    <>
      <div class="bar">
        <h2>
          <code>{rollout.uid}</code>
        </h2>
        <span class="muted num">
          step {number(rollout.step)} · sample {rollout.sample}
        </span>
        <a href={href(["run", name, "group"], { step: rollout.step, uid: rollout.uid, source })}>Group side by side</a>
        <a href={href(["run", name, "prompt"], { uid: rollout.uid, source })}>This prompt over steps</a>
        <span class="spacer" />
        <button type="button" disabled={!rollout.previous} onClick={() => open(rollout.previous)} title="Previous rollout ([)">
          ‹ Previous
        </button>
        <button type="button" disabled={!rollout.next} onClick={() => open(rollout.next)} title="Next rollout (])">
          Next ›
        </button>
        {isExport ? null : (
          <a class="button" href={`/api/runs/${encodeURIComponent(name)}/export?id=${encodeURIComponent(rollout.id)}`} download={`${name}-${rollout.id.replaceAll(":", "-")}.html`}>
            Export rollout
          </a>
        )}
      </div>
      <dl class="facts">
        <Fact name="Reward">{fixed(rollout.reward)}</Fact>
        {Object.entries(rollout.reward_info)
          .slice(0, 6)
          .map(([key, value]) => (
            <Fact key={key} name={key}>
              {typeof value === "number" ? fixed(value) : String(value)}
            </Fact>
          ))}
        <Fact name="Response">{number(rollout.length)} tokens</Fact>
        <Fact name="Prompt">{number(rollout.prompt_length)} tokens</Fact>
        <Fact name="Ended by">{rollout.ended_by ?? rollout.stop_reason}</Fact>
        {rollout.turns > 1 ? <Fact name="Turns">{number(rollout.turns)}</Fact> : null}
        {rollout.tool_calls ? (
          <Fact name="Tool calls">
            {number(rollout.tool_calls)}
            {rollout.failures ? ` (${rollout.failures} failed)` : ""}
          </Fact>
        ) : null}
        <Fact name="Versions">{rollout.policy_versions.join(", ") || "–"}</Fact>
        <Fact name="Ground truth">
          <code>{rollout.ground_truth}</code>
        </Fact>
      </dl>
      <div class="views">
        <nav class="tabs small" aria-label="Views of the rollout">
          <a href={href(["run", name, "rollout"], { id: rollout.id, colour: place.query.get("colour") })} aria-current={isConversation ? undefined : "page"}>
            Tokens
          </a>
          <a href={href(["run", name, "rollout"], { id: rollout.id, view: "conversation", colour: place.query.get("colour") })} aria-current={isConversation ? "page" : undefined}>
            Conversation
          </a>
        </nav>
        <div class="siblings" role="group" aria-label="Samples of the group">
          <span class="muted">Samples and their rewards</span>
          {rollout.siblings.map((each) => (
            <a key={each.id} href={href(["run", name, "rollout"], { id: each.id, colour: place.query.get("colour"), view: place.query.get("view") })} aria-current={each.id === rollout.id ? "page" : undefined} title={`Sample ${each.sample}, reward ${fixed(each.reward)}`}>
              <span class="muted">{each.sample}</span> <span class="num">{fixed(each.reward, 2)}</span>
            </a>
          ))}
        </div>
      </div>
      {isConversation ? <Conversation run={name} media={rollout.media} messages={rollout.messages} turnRewards={rollout.turn_rewards} /> : <TokenView name={name} rollout={rollout} place={place} />}
      {isConversation && Object.keys(rollout.info).length ? (
        <details class="panel">
          <summary>What the workflow noted</summary>
          <pre>{JSON.stringify(rollout.info, null, 2)}</pre>
        </details>
      ) : null}
    </>
  );
}

function TokenView({ name, rollout, place }: { name: string; rollout: Rollout; place: Place }) {
  const theme = useTheme();
  const usable = COLOURINGS.filter((each) => isThere(each, rollout));
  const wanted = place.query.get("colour") ?? ((rollout.gap ?? 0) > 0.1 ? "difference" : "logprobs");
  const colouring = usable.find((each) => each.id === wanted) ?? usable[0] ?? COLOURINGS[COLOURINGS.length - 1]!;
  const first = Math.min(rollout.prompt_length, Math.max(0, rollout.num_tokens - 1));
  const at = place.query.has("at") ? Math.min(Math.max(0, rollout.num_tokens - 1), Math.max(0, Number(place.query.get("at")) || 0)) : first;
  const offset = place.query.has("page") ? Number(place.query.get("page")) : Math.floor(at / PAGE) * PAGE;
  const numShown = Math.min(rollout.num_tokens, rollout.num_tokens_in_file ?? rollout.num_tokens);
  const [pointed, setPointed] = useState<number | null>(null);
  const [hasBorders, setBorders] = useState(true);
  const [asked, setAsked] = useState(false);
  const answer = useAnswer<Tokens>(["runs", name, "tokens"], { id: rollout.id, offset: offset || null });
  const mismatches = useAnswer<Mismatches>(rollout.columns.includes("learner_logprobs") || asked ? ["runs", name, "mismatches"] : null, { id: rollout.id });
  const rank = useRef(-1);
  const found = (mismatches.data?.tokens ?? []).filter((each) => each.place < numShown);
  const choose = (to: number) => setQuery({ at: to, page: null });
  const jump = (by: number) => {
    setAsked(true);
    if (found.length === 0) return;
    rank.current = (rank.current + by + found.length) % found.length;
    choose(found[rank.current]?.place ?? at);
    document.querySelector<HTMLElement>(".token-field")?.focus({ preventScroll: true });
  };
  useShortcuts({
    c: () => setQuery({ colour: usable[(usable.indexOf(colouring) + 1) % usable.length]?.id }),
    m: () => jump(1),
    M: () => jump(-1),
  });
  useEffect(() => setPointed(null), [answer.data]);
  const hasLearner = rollout.columns.includes("learner_logprobs");
  return (
    <div class="token-view">
      <div>
        <div class="bar">
          <Choice label="Colour by" value={colouring.id} options={COLOURINGS.map((each) => [each.id, isThere(each, rollout) ? each.name : `${each.name} (not in this file)`])} onChange={(colour) => setQuery({ colour })} />
          <label class="check">
            <input type="checkbox" checked={hasBorders} onChange={() => setBorders(!hasBorders)} /> Borders
          </label>
          <button type="button" disabled={!hasLearner || found.length === 0} onClick={() => jump(1)} title={hasLearner ? "Next largest mismatch (m)" : "The file has no log-probs of the learner"}>
            Largest mismatch
          </button>
          {numShown > PAGE ? <Pager offset={offset} limit={PAGE} total={numShown} onMove={(page) => setQuery({ page, at: page })} /> : null}
        </div>
        <Legend colouring={colouring} rollout={rollout} />
        <ul class="token-marks" aria-label="Marks of tokens">
          <li><span class="tok is-prompt">prompt</span></li>
          <li><span class="tok is-trained">trained</span></li>
          <li><span class="tok is-masked">sampled, not trained</span></li>
          <li><span class="tok is-inserted">inserted</span></li>
          <li><span class="tok is-retokenised">earlier reply</span></li>
        </ul>
        {answer.error ? <Failed error={answer.error} retry={answer.reload} /> : null}
        {!answer.error && !answer.data ? <Loading what="the tokens" /> : null}
        <Problems of={answer.data} />
        {answer.data ? <TokenField run={name} rollout={rollout} tokens={answer.data} colouring={colouring} theme={theme} hasBorders={hasBorders} at={at} choose={choose} point={setPointed} /> : null}
        {rollout.exact_bytes || !answer.data?.bytes.some(Boolean) ? null : <p class="muted">The run's tokenizer joins tokens in its own way, so the bytes are those of each token alone. The text of the response can differ from them, for example in spaces.</p>}
        {hasLearner ? null : (
          <p class="muted">
            The file has no log-probs of the learner. Runs with <code>trainer.save_learner_logprobs=true</code> write them.
          </p>
        )}
      </div>
      <aside class="token-side">
        {answer.data ? <TokenFacts run={name} rollout={rollout} tokens={answer.data} place={pointed ?? at} /> : null}
        {found.length ? (
          <section class="panel">
            <h3>Largest mismatches</h3>
            <ol class="mismatches">
              {found.slice(0, 10).map((each) => (
                <li key={each.place}>
                  <button type="button" class="quiet" onClick={() => choose(each.place)}>
                    <span class="num muted">{number(each.place + 1)}</span> <code>{shownText(each.text)}</code> <span class="num">{signed(each.difference, 4)}</span>
                  </button>
                </li>
              ))}
            </ol>
          </section>
        ) : null}
      </aside>
    </div>
  );
}
