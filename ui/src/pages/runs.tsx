// All runs of a folder, newest activity first.
import { useEffect, useState } from "preact/hooks";
import type { Info, RunRow, Runs } from "../api";
import { useAnswer } from "../client";
import { ago, clock, fixed, number, short } from "../format";
import { Meter, SearchField, Sparkline, State } from "../parts/small";
import { Empty, Shown } from "../parts/states";
import { href, readPlace, setQuery } from "../router";

const SHOWN = 200;

export function RunsPage({ info }: { info: Info }) {
  const answer = useAnswer<Runs>(["runs"], {}, ["*"]);
  const [, setTick] = useState(0);
  useEffect(() => {
    // "3 s ago" grows also when nothing happens.
    const timer = setInterval(() => setTick((before) => before + 1), 5000);
    return () => clearInterval(timer);
  }, []);
  return (
    <>
      <h1 class="visually-hidden">Runs</h1>
      <Shown answer={answer} what="the runs">
        {(data) =>
          data.runs.length === 0 ? (
            <Empty>
              <h2>No runs yet</h2>
              <p>
                <code>{info.runs_dir}</code> has no run directory. Start a run, and it appears here by itself:
              </p>
              <pre>headwater train quickstart</pre>
            </Empty>
          ) : (
            <RunTable runs={data.runs} folder={info.runs_dir} />
          )
        }
      </Shown>
    </>
  );
}

function matches(run: RunRow, text: string): boolean {
  const all = `${run.name} ${run.state} ${run.model} ${run.data} ${run.message}`.toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

function RunTable({ runs, folder }: { runs: RunRow[]; folder: string }) {
  const { query } = readPlace();
  const text = query.get("search") ?? "";
  const chosen = (query.get("chosen") ?? "").split(",").filter(Boolean);
  const [most, setMost] = useState(SHOWN);
  const found = runs.filter((run) => matches(run, text));
  const toggle = (name: string) => setQuery({ chosen: (chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]).join(",") });
  return (
    <>
      <div class="bar">
        <SearchField id="search-runs" label="Search runs" value={text} onChange={(search) => setQuery({ search })} />
        <span class="muted">
          {found.length === runs.length ? `${runs.length} ${runs.length === 1 ? "run" : "runs"}` : `${found.length} of ${runs.length} runs`} in <code>{folder}</code>
        </span>
        <span class="spacer" />
        {chosen.length > 0 ? (
          <button type="button" class="quiet" onClick={() => setQuery({ chosen: null })}>
            Clear
          </button>
        ) : (
          <span class="muted">Choose two or more to compare</span>
        )}
        <a class={chosen.length >= 2 ? "button primary" : "button is-off"} href={chosen.length >= 2 ? href(["compare"], { runs: chosen.join(",") }) : undefined} aria-disabled={chosen.length < 2}>
          Compare{chosen.length ? ` ${chosen.length}` : ""}
        </a>
      </div>
      {found.length === 0 ? (
        <Empty>
          <p>No run matches “{text}”.</p>
        </Empty>
      ) : (
        <div class="table-box" tabIndex={0} role="region" aria-label="Table of runs">
          <table class="runs">
            <thead>
              <tr>
                <th scope="col">
                  <span class="visually-hidden">Compare</span>
                </th>
                <th scope="col">Run</th>
                <th scope="col">State</th>
                <th scope="col" class="num">Step</th>
                <th scope="col">Reward</th>
                <th scope="col" class="num">Last</th>
                <th scope="col" class="num" title="Reward of held-out prompts at the last evaluation">Held out</th>
                <th scope="col" class="num">Tokens/s</th>
                <th scope="col" class="num" title="Mean age of trained tokens, in policy versions">Staleness</th>
                <th scope="col">Last message</th>
                <th scope="col" class="num">Updated</th>
              </tr>
            </thead>
            <tbody>
              {found.slice(0, most).map((run) => (
                <RunLine key={run.name} run={run} isChosen={chosen.includes(run.name)} toggle={toggle} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {found.length > most ? (
        <p>
          <button type="button" onClick={() => setMost(most + SHOWN)}>
            Show {Math.min(SHOWN, found.length - most)} more of {found.length}
          </button>
        </p>
      ) : null}
    </>
  );
}

function RunLine({ run, isChosen, toggle }: { run: RunRow; isChosen: boolean; toggle: (name: string) => void }) {
  const share = run.total_steps ? run.step / run.total_steps : null;
  return (
    <tr class={isChosen ? "is-chosen" : undefined}>
      <td>
        <input type="checkbox" checked={isChosen} aria-label={`Compare ${run.name}`} onChange={() => toggle(run.name)} />
      </td>
      <th scope="row">
        <a class="row-link" data-row href={href(["run", run.name])}>
          {run.name}
        </a>
        <span class="sub">{[run.model, run.data].filter(Boolean).join(" · ")}</span>
      </th>
      <td>
        <State state={run.state} text={run.state_text} />
      </td>
      <td class="num">
        {number(run.step)}
        {run.total_steps ? <span class="muted"> / {number(run.total_steps)}</span> : null}
        {share !== null ? <Meter share={share} label={`${Math.round(share * 100)}% of the steps`} /> : null}
      </td>
      <td>
        <Sparkline values={run.reward_history} label={`Reward over steps, now ${fixed(run.reward)}`} />
      </td>
      <td class="num strong">{fixed(run.reward)}</td>
      <td class="num">{fixed(run.eval_reward)}</td>
      <td class="num">{short(run.tokens_per_s)}</td>
      <td class="num">{fixed(run.staleness, 2)}</td>
      <td class="message" title={run.message}>
        {run.message}
      </td>
      <td class="num muted" title={clock(run.updated)}>
        {ago(run.updated)}
      </td>
    </tr>
  );
}
