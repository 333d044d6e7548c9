// Rollouts of a step or of all steps: sorted, filtered, as single responses or as groups.
import { useEffect } from "preact/hooks";
import type { Index, Rollouts, Row, Steps } from "../api";
import { type Answer, isExport, type Params, useAnswer } from "../client";
import { fixed, number, signed, visible } from "../format";
import { Choice, NumberField, Pager, SearchField } from "../parts/small";
import { Empty, Shown } from "../parts/states";
import { href, type Place, type Query, setQuery } from "../router";
import { GroupList } from "./groups";

const LIMIT = 50;

export const SORTS: [string, string][] = [
  ["place", "Place in the file"],
  ["reward", "Reward"],
  ["length", "Length"],
  ["turns", "Turns"],
  ["tool_calls", "Tool calls"],
  ["failures", "Failed calls"],
  ["gap", "Largest mismatch"],
];

export function RolloutsPage({ name, place }: { name: string; place: Place }) {
  const get = (key: string) => place.query.get(key) ?? "";
  const source = get("source") || "train";
  const steps = useAnswer<Steps>(["runs", name, "steps"], { source: source === "train" ? null : source }, [source === "train" ? "rollouts" : "eval"]);
  return (
    <>
      <h2 class="visually-hidden">Rollouts</h2>
      <Shown answer={steps} what="the steps with rollouts">
        {(data) => {
          const last = data.steps[data.steps.length - 1]?.step ?? null;
          const isGroups = get("show") === "groups";
          // Groups are those of one step.
          const step = get("step") === "all" ? (isGroups ? last : null) : get("step") !== "" ? Number(get("step")) : last;
          return (
            <>
              <div class="bar">
                <Choice label="From" value={source} options={[["train", "training"], ["eval", "evaluations"]]} onChange={(value) => setQuery({ source: value === "train" ? null : value, step: null, offset: null })} />
                <StepChoice steps={data} step={step} isGroups={isGroups} />
                <Choice label="Show" value={get("show") || "rollouts"} options={[["rollouts", "rollouts"], ["groups", "groups"]]} onChange={(value) => setQuery({ show: value === "rollouts" ? null : value, offset: null, cursor: null, ...(value === "groups" && step === null ? { step: null } : {}) })} />
                {isExport ? null : <SearchField id="search-rollouts" label="Search prompts and responses" value={get("text")} onChange={(text) => setQuery({ text, offset: null, cursor: null })} />}
              </div>
              {last === null ? (
                <Empty>
                  <p>
                    {source === "train" ? "The run has written no rollouts. They are written every trainer.save_rollouts_every_steps steps; 0 turns them off." : "The run has written no responses of evaluations."}
                  </p>
                </Empty>
              ) : isGroups && step !== null ? (
                <GroupList name={name} source={source} step={step} place={place} />
              ) : (
                <RolloutList name={name} source={source} step={step} place={place} />
              )}
            </>
          );
        }}
      </Shown>
    </>
  );
}

function StepChoice({ steps, step, isGroups }: { steps: Steps; step: number | null; isGroups: boolean }) {
  const known = steps.steps.map((each) => each.step);
  const at = step === null ? -1 : known.indexOf(step);
  const choose = (value: number | undefined) => value !== undefined && setQuery({ step: value, offset: null, cursor: null });
  const nearest = (value: number) => known.reduce((best, each) => (Math.abs(each - value) < Math.abs(best - value) ? each : best), known[0] ?? value);
  if (known.length === 0) return null;
  return (
    <span class="step-choice">
      <button type="button" aria-label="Earlier step" disabled={at <= 0} onClick={() => choose(known[at - 1])}>
        ‹
      </button>
      <label class="choice">
        <span>Step</span>
        <input type="number" value={step ?? ""} min={known[0]} max={known[known.length - 1]} disabled={step === null} onChange={(event) => choose(nearest(Number(event.currentTarget.value)))} />
      </label>
      <button type="button" aria-label="Later step" disabled={step === null || at >= known.length - 1} onClick={() => choose(known[at + 1])}>
        ›
      </button>
      {isExport ? null : (
        <label class="check" title={isGroups ? "Groups are shown for one step. For one prompt in all steps, open its group." : undefined}>
          <input type="checkbox" checked={step === null} disabled={isGroups} onChange={() => setQuery({ step: step === null ? null : "all", offset: null, cursor: null })} /> All {number(known.length)} steps
        </label>
      )}
    </span>
  );
}

const FILTERS = ["min_reward", "max_reward", "min_length", "max_length", "stop_reason", "ended_by", "data_source", "tools", "uid"];

function RolloutList({ name, source, step, place }: { name: string; source: string; step: number | null; place: Place }) {
  const get = (key: string) => place.query.get(key) ?? "";
  const params: Params = { source: source === "train" ? null : source, step };
  if (!isExport) {
    const sort = get("sort") || "place";
    Object.assign(params, Object.fromEntries(FILTERS.map((key) => [key, get(key)])), {
      text: get("text"),
      cursor: get("cursor"),
      sort: sort === "place" ? null : sort,
      order: get("order"),
      offset: get("offset") === "0" ? null : get("offset"),
      limit: LIMIT === 50 ? null : LIMIT,
    });
  }
  const answer = useAnswer<Rollouts>(["runs", name, "rollouts"], params, step === null ? ["rollouts"] : []);
  usePolling(answer, answer.data?.index);
  const change = (changes: Query) => setQuery({ offset: null, cursor: null, ...changes });
  return (
    <>
      {isExport ? null : <Filters data={answer.data} get={get} change={change} />}
      <Shown answer={answer} what="the rollouts">
        {(data) => (
          <>
            <IndexState index={data.index} isNeeded={step === null} />
            {data.rollouts.length === 0 ? (
              <Empty>
                <p>{data.is_complete ? "No rollout matches the filters." : `Nothing found in ${number(data.searched)} rollouts yet.`}</p>
                {FILTERS.some((key) => get(key)) || get("text") ? (
                  <button type="button" onClick={() => change({ ...Object.fromEntries(FILTERS.map((key) => [key, null])), text: null })}>
                    Remove the filters
                  </button>
                ) : null}
              </Empty>
            ) : (
              <RolloutTable name={name} rows={data.rollouts} hasSteps={step === null} />
            )}
            {data.next_cursor ? (
              <p>
                The search stopped after {number(data.searched)} rollouts, newest steps first.{get("sort") ? " What it found in them is sorted." : ""}{" "}
                <button type="button" onClick={() => setQuery({ cursor: data.next_cursor, offset: null })}>
                  Search on
                </button>
              </p>
            ) : null}
            {isExport ? (
              <p class="muted">
                {data.rollouts.length} of {number(data.total)} rollouts are in this file.
              </p>
            ) : (
              <Pager offset={data.offset} limit={data.limit} total={data.total} isComplete={data.is_complete} onMove={(offset) => setQuery({ offset })} />
            )}
          </>
        )}
      </Shown>
    </>
  );
}

/** Ask again while the server reads the files. */
export function usePolling(answer: Answer<unknown>, index: Index | undefined): void {
  const { reload } = answer;
  const isBuilding = index?.state === "building";
  const done = index?.done;
  useEffect(() => {
    if (!isBuilding || isExport) return;
    const timer = setTimeout(reload, 700);
    return () => clearTimeout(timer);
  }, [isBuilding, done, reload, answer.data]);
}

export function IndexState({ index, isNeeded }: { index: Index; isNeeded: boolean }) {
  if (!isNeeded || index.state !== "building") return null;
  return (
    <p class="muted" role="status">
      Reading {number(index.done)} of {number(index.total)} files. The list grows meanwhile.
    </p>
  );
}

function Filters({ data, get, change }: { data: Rollouts | null; get: (key: string) => string; change: (changes: Query) => void }) {
  const any = (values: string[] | undefined): [string, string][] => [["", "any"], ...(values ?? []).map((each): [string, string] => [each, each])];
  return (
    <div class="bar filters" role="group" aria-label="Sort and filter">
      <Choice label="Sort by" value={get("sort") || "place"} options={SORTS} onChange={(sort) => change({ sort: sort === "place" ? null : sort, order: null })} />
      {get("sort") ? (
        <button type="button" onClick={() => change({ order: get("order") === "asc" ? null : "asc" })}>
          {get("order") === "asc" ? "Least first" : "Most first"}
        </button>
      ) : null}
      <NumberField label="Reward from" value={get("min_reward")} onChange={(value) => change({ min_reward: value })} />
      <NumberField label="to" value={get("max_reward")} onChange={(value) => change({ max_reward: value })} />
      <NumberField label="Length from" step="1" value={get("min_length")} onChange={(value) => change({ min_length: value })} />
      <NumberField label="to" step="1" value={get("max_length")} onChange={(value) => change({ max_length: value })} />
      {(data?.stop_reasons.length ?? 0) > 1 || get("stop_reason") ? <Choice label="Stopped by" value={get("stop_reason")} options={any(data?.stop_reasons)} onChange={(value) => change({ stop_reason: value })} /> : null}
      {(data?.ended_by.length ?? 0) > 0 || get("ended_by") ? <Choice label="Ended by" value={get("ended_by")} options={any(data?.ended_by)} onChange={(value) => change({ ended_by: value })} /> : null}
      {(data?.data_sources.length ?? 0) > 1 || get("data_source") ? <Choice label="Source" value={get("data_source")} options={any(data?.data_sources)} onChange={(value) => change({ data_source: value })} /> : null}
      <Choice label="Tools" value={get("tools")} options={[["", "any"], ["any", "called"], ["none", "not called"], ["failed", "failed"]]} onChange={(value) => change({ tools: value })} />
    </div>
  );
}

export function RolloutTable({ name, rows, hasSteps }: { name: string; rows: Row[]; hasSteps: boolean }) {
  const hasTools = rows.some((row) => row.tool_calls > 0);
  const hasTurns = rows.some((row) => row.turns > 1);
  const hasGap = rows.some((row) => row.gap !== null);
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Table of rollouts">
      <table class="rollouts">
        <thead>
          <tr>
            {hasSteps ? <th scope="col" class="num">Step</th> : null}
            <th scope="col">Prompt</th>
            <th scope="col">Response</th>
            <th scope="col" class="num">Sample</th>
            <th scope="col" class="num">Reward</th>
            <th scope="col" class="num">Advantage</th>
            <th scope="col" class="num">Tokens</th>
            {hasTurns ? <th scope="col" class="num">Turns</th> : null}
            {hasTools ? <th scope="col" class="num">Calls</th> : null}
            {hasGap ? <th scope="col" class="num" title="Largest difference between the log-probs of learner and engine">Mismatch</th> : null}
            <th scope="col">Stopped by</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.id}>
              {hasSteps ? <td class="num">{number(row.step)}</td> : null}
              <th scope="row" class="text-cell">
                <a class="row-link" data-row href={href(["run", name, "rollout"], { id: row.id })}>
                  {visible(row.prompt) || "(empty)"}
                </a>
                <span class="sub">{row.uid}</span>
              </th>
              <td class="text-cell">
                <span class="clip">{visible(row.response) || "(empty)"}</span>
              </td>
              <td class="num">{row.sample}</td>
              <td class="num strong">{fixed(row.reward)}</td>
              <td class="num">{signed(row.advantage)}</td>
              <td class="num">{number(row.length)}</td>
              {hasTurns ? <td class="num">{row.turns}</td> : null}
              {hasTools ? (
                <td class="num">
                  {row.tool_calls}
                  {row.failures ? <span class="bad"> ({row.failures} failed)</span> : null}
                </td>
              ) : null}
              {hasGap ? <td class="num">{fixed(row.gap, 4)}</td> : null}
              <td>{row.ended_by ?? row.stop_reason}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
