// One run: its head and its tabs.
import { useEffect } from "preact/hooks";
import type { RunDetail } from "../api";
import { isExport, useAnswer } from "../client";
import { ago, clock, duration, fixed, number, short } from "../format";
import { Fact, Meter, State } from "../parts/small";
import { Failed, Loading, Problems } from "../parts/states";
import { go, href, type Place } from "../router";
import { useShortcuts } from "../shortcuts";
import { ConfigPage } from "./config";
import { EnginePage } from "./engine";
import { GroupPage } from "./group";
import { MetricsPage } from "./metrics";
import { OverviewPage } from "./overview";
import { PromptPage } from "./prompt";
import { RolloutPage } from "./rollout";
import { RolloutsPage } from "./rollouts";
import { TimelinePage } from "./timeline";

const TABS: [string, string][] = [
  ["", "Overview"],
  ["metrics", "Metrics"],
  ["rollouts", "Rollouts"],
  ["timeline", "Timeline"],
  ["engine", "Engine"],
  ["config", "Config"],
];

export function RunPage({ name, place }: { name: string; place: Place }) {
  const tab = place.path[2] ?? "";
  const answer = useAnswer<RunDetail>(["runs", name], {}, ["*"]);
  useShortcuts(Object.fromEntries(TABS.map(([id], at) => [String(at + 1), () => go(href(id ? ["run", name, id] : ["run", name]))])));
  const run = answer.data;
  const group = ["group", "prompt", "rollout"].includes(tab) ? "rollouts" : tab;
  useEffect(() => {
    const now = TABS.find(([id]) => id === group)?.[1];
    document.title = `${name}${now && group ? ` · ${now}` : ""} · Headwater`;
  }, [name, group]);
  if (answer.error && answer.error.code !== "not_in_export") return <Failed error={answer.error} retry={answer.reload} />;
  if (!run && !answer.error) return <Loading what={`the run ${name}`} />;
  return (
    <>
      <header class="title">
        <h1>{name}</h1>
        {run ? <State state={run.state} text={run.state_text} /> : null}
        {run ? (
          <span class="muted steps num">
            step {number(run.step)}
            {run.total_steps ? ` of ${number(run.total_steps)}` : ""}
            {run.total_steps ? <Meter share={run.step / run.total_steps} label={`${Math.round((100 * run.step) / run.total_steps)}% of the steps`} /> : null}
          </span>
        ) : null}
        <span class="spacer" />
        {isExport ? null : (
          <a class="button" href={`/api/runs/${encodeURIComponent(name)}/export`} download={`${name}.html`} title="One HTML file that needs no server">
            Export
          </a>
        )}
      </header>
      <nav class="tabs" aria-label="Parts of the run">
        {TABS.map(([id, text], at) => (
          <a key={id} href={href(id ? ["run", name, id] : ["run", name])} aria-current={group === id ? "page" : undefined} title={`${at + 1}`}>
            {text}
          </a>
        ))}
      </nav>
      <Problems of={run} />
      {tab === "" && run ? <Facts run={run} /> : null}
      <Tab tab={tab} name={name} place={place} run={run} />
    </>
  );
}

function Tab({ tab, name, place, run }: { tab: string; name: string; place: Place; run: RunDetail | null }) {
  if (tab === "metrics") return <MetricsPage name={name} place={place} />;
  if (tab === "rollouts") return <RolloutsPage name={name} place={place} />;
  if (tab === "group") return <GroupPage name={name} place={place} />;
  if (tab === "prompt") return <PromptPage name={name} place={place} />;
  if (tab === "rollout") return <RolloutPage name={name} place={place} />;
  if (tab === "timeline") return <TimelinePage name={name} />;
  if (tab === "engine") return <EnginePage name={name} />;
  if (tab === "config") return <ConfigPage name={name} place={place} />;
  if (tab === "" && run) return <OverviewPage name={name} run={run} />;
  if (tab === "") return <Failed error={{ code: "not_in_export", message: "The exported file has one rollout of this run, not the run." }} />;
  return <Failed error={{ code: "not_found", message: "A run has no page of this name." }} />;
}

function Facts({ run }: { run: RunDetail }) {
  return (
    <dl class="facts">
      <Fact name="Reward">{fixed(run.reward)}</Fact>
      <Fact name="Held out" title="Reward of held-out prompts at the last evaluation">
        {fixed(run.eval_reward)}
      </Fact>
      <Fact name="Tokens/s">{short(run.tokens_per_s)}</Fact>
      <Fact name="Step time">{duration(run.step_s)}</Fact>
      <Fact name="Staleness" title="Mean age of trained tokens, in policy versions">
        {fixed(run.staleness, 2)}
      </Fact>
      <Fact name="Policy version">{number(run.version)}</Fact>
      <Fact name="Started" title={clock(run.started)}>
        {ago(run.started)}
      </Fact>
      <Fact name="Model">{run.model || "–"}</Fact>
      <Fact name="Data">{run.data || "–"}</Fact>
    </dl>
  );
}
