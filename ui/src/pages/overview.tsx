// A run at a glance: findings, the usual curves, and where every group went.
import { useState } from "preact/hooks";
import type { Doctor, Keys, Ledger, Maybe, RunDetail, Stages, Staleness } from "../api";
import { askMetrics, useAnswer } from "../client";
import { clock, duration, fixed, number, percent, short } from "../format";
import { Chart, type Curve, PLAIN, type View } from "../parts/chart";
import { LedgerFlow } from "../parts/ledger";
import { Empty, Shown } from "../parts/states";
import { ViewControls } from "../parts/view";
import { spliced, useZoomed } from "../parts/zoom";
import { href } from "../router";

interface Group {
  title: string;
  unit?: string;
  kind: "train" | "eval";
  /** Keys, or patterns or choices of keys, in the order in which they are drawn. */
  keys: (string | RegExp | ((keys: string[]) => string[]))[];
  format?: (value: Maybe | undefined) => string;
  minimum?: number;
}

const REWARDS: Group[] = [
  { title: "Reward", kind: "train", keys: ["reward/mean", "shaped_reward/mean"] },
  { title: "Held-out reward", kind: "eval", keys: ["reward/mean", (keys) => ofRewards(keys).sources] },
  { title: "Held out: other numbers of the scorer", kind: "eval", keys: [(keys) => ofRewards(keys).numbers] },
  { title: "Response length", unit: "tokens", kind: "train", keys: ["response_length/mean", "response_length/max", "response_length/min"], minimum: 0 },
  { title: "Entropy", unit: "nats", kind: "train", keys: ["actor/entropy"], minimum: 0 },
  { title: "KL", kind: "train", keys: ["kl/reference", "actor/reference_kl", "actor/approx_kl"] },
  { title: "Engine against learner", unit: "difference of log-probs", kind: "train", keys: ["rollout_gap/logprob_abs_mean", "rollout_gap/logprob_abs_max", "rollout_gap/k3_kl"], minimum: 0 },
];

const SYSTEM: Group[] = [
  { title: "Throughput", unit: "tokens per second", kind: "train", keys: ["throughput/tokens_per_s", "throughput/generated_tokens_per_s"], format: short, minimum: 0 },
  { title: "Memory", unit: "GiB", kind: "train", keys: ["memory/gpu_peak_gib", "memory/gpu_gib", "memory/host_peak_gib", "memory/machine_used_gib"], minimum: 0 },
  { title: "Loss and gradient", kind: "train", keys: ["actor/loss", "actor/grad_norm"] },
  { title: "Groups that teach", unit: "share", kind: "train", keys: ["groups/informative_fraction", "actor/clip_fraction"], minimum: 0 },
  { title: "How responses end", unit: "share", kind: "train", keys: ["stopped_fraction", "response_length/clip_ratio"], minimum: 0 },
  { title: "Tools", unit: "per episode", kind: "train", keys: [/^tools\/(calls|failed_fraction)$/], minimum: 0 },
];

export function OverviewPage({ name, run }: { name: string; run: RunDetail }) {
  const [view, setView] = useState<View>(PLAIN);
  const keys = useAnswer<Keys>(["runs", name, "keys"], {}, ["metrics"]);
  return (
    <>
      <Findings name={name} />
      <div class="bar">
        <h2>Curves</h2>
        <a href={href(["run", name, "metrics"])}>All metrics</a>
        <span class="spacer" />
        <ViewControls view={view} setView={setView} />
      </div>
      <Shown answer={keys} what="the names of the metrics">
        {(data) =>
          data.num_train + data.num_eval === 0 ? (
            <Empty>
              <p>The run has no metrics yet. They appear here after its first step.</p>
              {run.message ? <p class="muted">{run.message}</p> : null}
            </Empty>
          ) : (
            <Curves name={name} keys={data} view={view} />
          )
        }
      </Shown>
      <div class="two">
        <section class="panel">
          <header>
            <h2>Ledger</h2>
            <span class="muted">groups of rollouts since the run began</span>
          </header>
          <LedgerPart name={name} />
        </section>
        <LogPart run={run} />
      </div>
    </>
  );
}

/**
 * Rewards of data sources, and other numbers that the scorer returned. Both are named `reward/NAME/mean`; but a number N
 * also exists for each data source D, as `reward/D/N/mean`. With one data source, its curve would be the mean drawn twice.
 */
function ofRewards(keys: string[]): { sources: string[]; numbers: string[] } {
  const names = new Set(keys.flatMap((key) => /^reward\/([^@]+)\/mean$/.exec(key)?.[1] ?? []));
  const pairs = [...names].flatMap((source) => [...names].filter((number_) => names.has(`${source}/${number_}`)).map((number_) => [`${source}/${number_}`, number_]));
  const [both, numbers] = [new Set(pairs.map(([pair]) => pair)), new Set(pairs.map(([, number_]) => number_))];
  const sources = [...names].filter((name) => !both.has(name) && !numbers.has(name));
  const key = (name: string | undefined) => `reward/${name}/mean`;
  return { sources: sources.length > 1 ? sources.map(key) : [], numbers: [...numbers].map(key) };
}

const MOST_CURVES = 8;

/** The curves of a group, and how many there are besides. */
function chosen(group: Group, keys: Keys): { found: { key: string; text: string }[]; numMore: number } {
  const known = keys.groups.flatMap((each) => each.keys).filter((each) => each.kind === group.kind);
  const names = known.map((each) => each.key);
  const wanted = group.keys.flatMap((each) => (typeof each === "string" ? [each] : each instanceof RegExp ? names.filter((name) => each.test(name)) : each(names)));
  const found = [...new Set(wanted)].flatMap((name) => known.find((each) => each.key === name) ?? []);
  return { found: found.slice(0, MOST_CURVES), numMore: Math.max(0, found.length - MOST_CURVES) };
}

/** Without the folder that all of them share. */
function labels(keys: string[]): string[] {
  const folder = keys[0]?.split("/")[0] ?? "";
  return keys.length > 1 && keys.every((key) => key.startsWith(`${folder}/`)) ? keys.map((key) => key.slice(folder.length + 1)) : keys;
}

function Curves({ name, keys, view }: { name: string; keys: Keys; view: View }) {
  const draw = (group: Group) => {
    const { found, numMore } = chosen(group, keys);
    return found.length ? <GroupChart key={group.title} name={name} group={group} found={found} numMore={numMore} view={view} /> : null;
  };
  return (
    <div class="charts">
      {REWARDS.map(draw)}
      <StagesChart name={name} />
      <StalenessChart name={name} />
      {SYSTEM.map(draw)}
    </div>
  );
}

function GroupChart({ name, group, found, numMore, view }: { name: string; group: Group; found: { key: string; text: string }[]; numMore: number; view: View }) {
  const names = found.map((each) => each.key);
  const short_ = labels(names);
  const { answer, zoom } = useZoomed(JSON.stringify([name, group.kind, names]), (signal, range) => askMetrics(name, names, group.kind, signal, range), (whole) => whole.is_sampled, spliced);
  return (
    <Shown answer={answer} what={group.title}>
      {(data) => {
        const curves: Curve[] = found.flatMap(({ key, text }, at) => {
          const series = data.series[key];
          return series ? [{ label: short_[at] ?? key, values: series.mean, low: series.min, high: series.max, text: `${key}: ${text}` }] : [];
        });
        return <Chart title={group.title} unit={group.unit} steps={data.steps} times={data.times} curves={curves} view={view} onZoom={zoom} note={numMore ? `${numMore} more are under Metrics.` : undefined} format={group.format} minimum={group.minimum} />;
      }}
    </Shown>
  );
}

function StalenessChart({ name }: { name: string }) {
  const answer = useAnswer<Staleness>(["runs", name, "staleness"], {}, ["metrics"]);
  return (
    <Shown answer={answer} what="staleness">
      {(data) =>
        data.steps.length === 0 ? null : (
          <Chart
            title="Staleness"
            unit="share of tokens, by versions behind"
            steps={data.steps}
            isStacked
            isOrdered
            minimum={0}
            format={percent}
            curves={data.lags.map((lag, at) => ({ label: lag === 0 ? "current" : `${lag} behind`, values: data.shares[at] ?? [], text: `Share of tokens that were sampled ${lag} versions before the update; mean age now ${fixed(data.mean[data.mean.length - 1], 2)}` }))}
          />
        )
      }
    </Shown>
  );
}

function StagesChart({ name }: { name: string }) {
  const answer = useAnswer<Stages>(["runs", name, "stages"], {}, ["metrics"]);
  return (
    <Shown answer={answer} what="the time of stages">
      {(data) =>
        data.steps.length === 0 ? null : (
          <Chart
            title="Time by stage"
            unit="seconds per step"
            steps={data.steps}
            isStacked
            minimum={0}
            format={(value) => (value === null || value === undefined ? "–" : `${number(value, 3)}`)}
            curves={data.stages.map((stage) => ({ label: stage.name, values: stage.seconds, text: stage.text }))}
          />
        )
      }
    </Shown>
  );
}

function LedgerPart({ name }: { name: string }) {
  const answer = useAnswer<Ledger>(["runs", name, "ledger"], {}, ["ledger", "status"]);
  return (
    <Shown answer={answer} what="the ledger">
      {(ledger) => (ledger.source === "none" ? <p class="muted">The run has dispatched nothing yet.</p> : <LedgerFlow ledger={ledger} />)}
    </Shown>
  );
}

function Findings({ name }: { name: string }) {
  const answer = useAnswer<Doctor>(["runs", name, "doctor"], {}, ["status", "metrics"]);
  return (
    <Shown answer={answer} what="the diagnosis">
      {(doctor) => (
        <section class="findings" aria-label="Findings of the doctor">
          {doctor.life?.text ? <p class="muted life">{doctor.life.text}</p> : null}
          {doctor.findings.length === 0 ? <p class="healthy">✓ The doctor found nothing wrong.</p> : null}
          <ul>
            {doctor.findings.map((finding) => (
              <li key={finding.kind + finding.what} class={`finding ${finding.severity}`}>
                <span class="severity">{finding.severity}</span>
                <div>
                  <p>{finding.what}</p>
                  {finding.remedy ? <p class="muted">{finding.remedy}</p> : null}
                </div>
              </li>
            ))}
          </ul>
        </section>
      )}
    </Shown>
  );
}

function LogPart({ run }: { run: RunDetail }) {
  return (
    <section class="panel">
      <header>
        <h2>Now</h2>
        {run.stage ? (
          <span class="muted num">
            {run.stage.name} {number(run.stage.done)} / {number(run.stage.total)}
          </span>
        ) : null}
      </header>
      {run.error ? <pre class="error">{run.error}</pre> : null}
      {run.oldest_groups.length ? (
        <>
          <h3>Oldest groups</h3>
          <ul class="plain">
            {run.oldest_groups.slice(0, 5).map((group) => (
              <li key={group.uid}>
                <code>{group.uid}</code> <span class="num">{duration(group.seconds)}</span> <span class="muted">{group.doing}</span>
              </li>
            ))}
          </ul>
        </>
      ) : null}
      {run.log.length ? (
        <ul class="log">
          {run.log.slice(-30).map((line, at) => (
            <li key={at}>
              <span class="muted num">{clock(line.time).slice(11)}</span> <span class={`level-${line.level.toLowerCase()}`}>{line.message}</span>
            </li>
          ))}
        </ul>
      ) : (
        <p class="muted">The log has no warnings.</p>
      )}
      <h3>Files</h3>
      <p class="path">
        <code>{run.path}</code>
      </p>
      {run.checkpoints.length ? <p class="muted">Checkpoints at steps {run.checkpoints.slice(-8).join(", ")}.</p> : <p class="muted">No checkpoint yet.</p>}
      {run.resume ? (
        <p>
          Continue it with <code>{run.resume}</code>
        </p>
      ) : null}
    </section>
  );
}
