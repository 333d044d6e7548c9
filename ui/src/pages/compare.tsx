// Several runs over one another, and what their recipes have different.
import { useState } from "preact/hooks";
import type { Diff, Keys, Maybe, Metrics, Runs, WithProblems } from "../api";
import { askMetrics, useAnswer } from "../client";
import { setting } from "../format";
import { Chart, PLAIN, type View } from "../parts/chart";
import { Choice } from "../parts/small";
import { Empty, Problems, Shown } from "../parts/states";
import { ViewControls } from "../parts/view";
import { spliced, useZoomed } from "../parts/zoom";
import { href, type Place, setQuery } from "../router";

const USUAL = ["reward/mean", "eval:reward/mean", "response_length/mean", "actor/entropy", "kl/reference", "rollout_gap/logprob_abs_mean", "throughput/tokens_per_s", "time/step_s"];

export function ComparePage({ place }: { place: Place }) {
  const runs = (place.query.get("runs") ?? "").split(",").filter(Boolean);
  const [view, setView] = useState<View>(PLAIN);
  const first = runs[0] ?? null;
  const all = useAnswer<Runs>(["runs"], {}, ["gone"]);
  const keys = useAnswer<Keys>(first ? ["runs", first, "keys"] : null);
  if (runs.length < 2) {
    return (
      <Empty>
        <h1>Compare runs</h1>
        <p>
          Choose two or more runs in the <a href={href([])}>list</a>.
        </p>
      </Empty>
    );
  }
  const extra = (place.query.get("keys") ?? "").split(",").filter(Boolean);
  const known = keys.data?.groups.flatMap((group) => group.keys) ?? [];
  const names = new Map(known.map((each) => [each.kind === "train" ? each.key : `${each.kind}:${each.key}`, each.text]));
  const shown = [...extra, ...USUAL.filter((key) => names.has(key) && !extra.includes(key))];
  return (
    <>
      <header class="title">
        <h1>Compare {runs.length} runs</h1>
        <ViewControls view={view} setView={setView} hasTime={false} />
      </header>
      <ul class="chips">
        {runs.map((run) => (
          <li key={run}>
            <a href={href(["run", run])}>{run}</a>
            <button type="button" class="quiet" aria-label={`Leave out ${run}`} onClick={() => setQuery({ runs: runs.filter((each) => each !== run).join(",") })}>
              ✕
            </button>
          </li>
        ))}
      </ul>
      <div class="bar">
        <Choice
          label="Add a metric"
          value=""
          options={[["", "choose"], ...[...names.keys()].filter((key) => !shown.includes(key)).map((key): [string, string] => [key, key])]}
          onChange={(key) => key && setQuery({ keys: [key, ...extra].join(",") })}
        />
      </div>
      <Problems of={{ problems: all.data ? runs.filter((run) => !all.data?.runs.some((each) => each.name === run)).map((run) => `There is no run ${run}.`) : [] }} />
      <div class="charts">
        {shown.map((key) => (
          <Overlay key={key} name={key} text={names.get(key) ?? ""} runs={runs} view={view} />
        ))}
      </div>
      <RecipeDiff runs={runs} />
    </>
  );
}

/** The union of the steps of all runs, with a column per run. */
export function joined(all: (Metrics | null)[], key: string): { steps: number[]; columns: Maybe[][] } {
  const steps = [...new Set(all.flatMap((each) => each?.steps ?? []))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const columns = all.map((metrics) => {
    const column: Maybe[] = steps.map(() => null);
    metrics?.steps.forEach((step, index) => (column[at.get(step) ?? 0] = metrics.series[key]?.mean[index] ?? null));
    return column;
  });
  return { steps, columns };
}

function Overlay({ name, text, runs, view }: { name: string; text: string; runs: string[]; view: View }) {
  const [kind, key] = name.includes(":") ? (name.split(":", 2) as [string, string]) : ["train", name];
  const { answer, zoom } = useZoomed(
    JSON.stringify([name, runs]),
    async (signal, range): Promise<WithProblems & { all: (Metrics | null)[] }> => ({ all: await Promise.all(runs.map((run) => askMetrics(run, [key], kind, signal, range).catch(() => null))) }),
    ({ all }) => all.some((each) => each?.is_sampled),
    (whole, detail, range) => ({ all: whole.all.map((each, at) => (each && detail.all[at] ? spliced(each, detail.all[at], range) : each)) }),
  );
  return (
    <Shown answer={answer} what={name}>
      {({ all }) => {
        const { steps, columns } = joined(all, key);
        return <Chart title={kind === "eval" ? `held out: ${key}` : key} text={text} steps={steps} view={view} onZoom={zoom} curves={runs.map((run, at) => ({ label: run, values: columns[at] ?? [] }))} />;
      }}
    </Shown>
  );
}

function RecipeDiff({ runs }: { runs: string[] }) {
  const [pair, setPair] = useState<[string, string]>([runs[0] ?? "", runs[1] ?? ""]);
  const [left, right] = [runs.includes(pair[0]) ? pair[0] : (runs[0] ?? ""), runs.includes(pair[1]) ? pair[1] : (runs[1] ?? "")];
  const answer = useAnswer<Diff>(["diff"], { left, right });
  const options = runs.map((run): [string, string] => [run, run]);
  return (
    <section class="panel">
      <header>
        <h2>Recipes</h2>
        <Choice label="Left" value={left} options={options} onChange={(value) => setPair([value, right])} />
        <Choice label="Right" value={right} options={options} onChange={(value) => setPair([left, value])} />
      </header>
      <Shown answer={answer} what="the recipes">
        {(diff) =>
          diff.differences.length === 0 ? (
            <p class="muted">All {diff.num_equal} settings are equal.</p>
          ) : (
            <div class="table-box" tabIndex={0} role="region" aria-label="Differences of the recipes">
              <table class="diff">
                <thead>
                  <tr>
                    <th scope="col">Setting</th>
                    <th scope="col">{left}</th>
                    <th scope="col">{right}</th>
                  </tr>
                </thead>
                <tbody>
                  {diff.differences.map((each) => (
                    <tr key={each.key}>
                      <th scope="row">
                        <code>{each.key}</code>
                        <span class="sub">{each.text}</span>
                      </th>
                      <td class="left">
                        <code>{setting(each.left)}</code>
                      </td>
                      <td class="right">
                        <code>{setting(each.right)}</code>
                      </td>
                    </tr>
                  ))}
                </tbody>
              </table>
              <p class="muted">{diff.num_equal} other settings are equal.</p>
            </div>
          )
        }
      </Shown>
    </section>
  );
}
