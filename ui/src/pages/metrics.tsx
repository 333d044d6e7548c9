// Any metric of a run, with what it means.
import { useState } from "preact/hooks";
import type { Keys, MetricKey } from "../api";
import { askMetrics, useAnswer } from "../client";
import { number } from "../format";
import { Chart, PLAIN, type View } from "../parts/chart";
import { SearchField } from "../parts/small";
import { Empty, Shown } from "../parts/states";
import { ViewControls } from "../parts/view";
import { VirtualRows } from "../parts/virtual";
import { spliced, useZoomed } from "../parts/zoom";
import { type Place, setQuery } from "../router";

const id = (each: MetricKey) => (each.kind === "train" ? each.key : `${each.kind}:${each.key}`);

export function MetricsPage({ name, place }: { name: string; place: Place }) {
  const keys = useAnswer<Keys>(["runs", name, "keys"], {}, ["metrics"]);
  const [view, setView] = useState<View>(PLAIN);
  const text = place.query.get("search") ?? "";
  const wanted = place.query.get("keys");
  return (
    <>
      <div class="bar">
        <SearchField id="search-metrics" label="Search metrics and explanations" value={text} onChange={(search) => setQuery({ search })} />
        <span class="spacer" />
        <ViewControls view={view} setView={setView} />
      </div>
      <Shown answer={keys} what="the metrics">
        {(data) => {
          const all = data.groups.flatMap((group) => group.keys.map((key) => ({ ...key, group: group.name })));
          const words = text.toLowerCase().split(/\s+/).filter(Boolean);
          const found = all.filter((each) => words.every((word) => `${id(each)} ${each.text} ${each.group}`.toLowerCase().includes(word)));
          const chosen = wanted === null ? ["reward/mean"] : wanted.split(",").filter(Boolean);
          const toggle = (key: string) => setQuery({ keys: (chosen.includes(key) ? chosen.filter((each) => each !== key) : [...chosen, key]).join(",") || "," });
          if (all.length === 0) {
            return (
              <Empty>
                <p>The run has no metrics yet. They appear here after its first step.</p>
              </Empty>
            );
          }
          return (
            <div class="metrics">
              <section class="panel" aria-label="Metrics">
                {found.length === 0 ? <p class="muted">No metric matches “{text}”.</p> : null}
                <VirtualRows
                  rows={found}
                  height={52}
                  most={640}
                  label="List of metrics"
                  render={(each) => (
                    <label key={id(each)} class="metric" title={each.text}>
                      <input type="checkbox" data-row checked={chosen.includes(id(each))} onChange={() => toggle(id(each))} />
                      <span class="metric-name">
                        <code>{id(each)}</code>
                        <span class="sub">{each.text}</span>
                      </span>
                      <span class="num">{number(each.last)}</span>
                    </label>
                  )}
                />
              </section>
              <div class="charts single">
                {chosen.map((key) => {
                  const about = all.find((each) => id(each) === key);
                  return about ? <One key={key} name={name} about={about} view={view} /> : null;
                })}
                {chosen.length === 0 ? (
                  <Empty>
                    <p>Choose a metric in the list.</p>
                  </Empty>
                ) : null}
              </div>
            </div>
          );
        }}
      </Shown>
    </>
  );
}

function One({ name, about, view }: { name: string; about: MetricKey; view: View }) {
  const { answer, part, zoom } = useZoomed(JSON.stringify([name, about.kind, about.key]), (signal, range) => askMetrics(name, [about.key], about.kind, signal, range), (whole) => whole.is_sampled, spliced);
  return (
    <Shown answer={answer} what={about.key}>
      {(data) => {
        const series = data.series[about.key];
        if (!series) return <p class="muted">{about.key} has no values.</p>;
        return (
          <div>
            <Chart title={id(about)} steps={data.steps} times={data.times} view={view} onZoom={zoom} height={220} curves={[{ label: about.key, values: series.mean, low: series.min, high: series.max, text: about.text }]} />
            <p class="explanation">
              {about.text}
              {series.num_not_finite ? ` ${series.num_not_finite} values are not finite numbers.` : ""}
              {part && !part.data.is_sampled
                ? ` Steps ${number(part.range[0])} to ${number(part.range[1])} are drawn one by one.`
                : data.is_sampled
                  ? ` ${number((part?.data ?? data).num)} steps are drawn as ${number((part?.data ?? data).steps.length)} means; the band is from the least to the most. Drag over a part to see more of it.`
                  : ""}
            </p>
          </div>
        );
      }}
    </Shown>
  );
}
