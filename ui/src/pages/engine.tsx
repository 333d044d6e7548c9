// The engine that generates: now, and over the steps.
import type { Engine, EngineNow, Maybe, ServerRow } from "../api";
import { useAnswer } from "../client";
import { ago, number, percent, short } from "../format";
import { Chart } from "../parts/chart";
import { Fact, Meter } from "../parts/small";
import { Empty, Shown } from "../parts/states";

const FORMATS: Record<string, (value: Maybe | undefined) => string> = { number, percent, short };

export function EnginePage({ name }: { name: string }) {
  const answer = useAnswer<Engine>(["runs", name, "engine"], {}, ["status", "metrics"]);
  return (
    <Shown answer={answer} what="the engine">
      {(data) => (
        <>
          <p class="muted">{data.is_live ? `As the run wrote it ${ago(data.time)}.` : "The run is not running; this is what it wrote last."}</p>
          {data.engine ? <Now engine={data.engine} version={data.version} capacity={data.capacity} /> : null}
          {data.servers.length ? <ServerTable servers={data.servers} /> : null}
          {!data.engine && data.servers.length === 0 && data.history.steps.length === 0 ? (
            <Empty>
              <p>The run has written nothing about its engine yet.</p>
            </Empty>
          ) : null}
          <div class="charts">
            {(data.charts ?? []).map((chart) => {
              const curves = chart.keys.flatMap((key) => {
                const series = data.history.series[key];
                return series ? [{ label: key.slice(key.indexOf("/") + 1), values: series.mean, low: series.min, high: series.max }] : [];
              });
              return curves.length ? <Chart key={chart.title} title={chart.title} unit={chart.unit || undefined} steps={data.history.steps} curves={curves} format={FORMATS[chart.format]} minimum={0} /> : null;
            })}
          </div>
        </>
      )}
    </Shown>
  );
}

export function Now({ engine, version, capacity }: { engine: EngineNow; version: Maybe; capacity?: Maybe }) {
  return (
    <dl class="facts">
      <Fact name="Running">{number(engine.num_running)}</Fact>
      <Fact name="Waiting">{number(engine.num_waiting)}</Fact>
      <Fact name="KV cache">
        {percent(engine.kv_used)} <Meter share={engine.kv_used} label={`${percent(engine.kv_used)} of the KV cache is in use`} />
      </Fact>
      <Fact name="Cache hits" title="Share of prompt tokens that were found in the prefix cache">
        {percent(engine.cache_hits)}
      </Fact>
      <Fact name="Tokens/s">{short(engine.tokens_per_s)}</Fact>
      <Fact name="Version">{number(version)}</Fact>
      {capacity !== undefined ? (
        <Fact name="May start" title="Groups that may be dispatched now without becoming too stale">
          {number(capacity)}
        </Fact>
      ) : null}
      {engine.num_restarts ? <Fact name="Restarts">{number(engine.num_restarts)}</Fact> : null}
      {engine.is_paused ? <Fact name="State">paused</Fact> : null}
      {engine.is_asleep ? <Fact name="State">asleep</Fact> : null}
    </dl>
  );
}

export function ServerTable({ servers }: { servers: ServerRow[] }) {
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Servers">
      <table>
        <thead>
          <tr>
            <th scope="col">Server</th>
            <th scope="col">State</th>
            <th scope="col" class="num">Version</th>
            <th scope="col" class="num">Running</th>
            <th scope="col" class="num">Waiting</th>
            <th scope="col" class="num">Restarts</th>
          </tr>
        </thead>
        <tbody>
          {servers.map((server) => (
            <tr key={server.name + server.url}>
              <th scope="row">
                {server.name}
                <span class="sub">{server.url}</span>
              </th>
              <td>
                <span class={`badge ${server.is_alive ? "state-running" : "state-failed"}`}>
                  <span aria-hidden="true">{server.is_alive ? "●" : "✕"}</span> {server.state || (server.is_alive ? "alive" : "lost")}
                </span>
              </td>
              <td class="num">{number(server.version)}</td>
              <td class="num">{number(server.num_running)}</td>
              <td class="num">{number(server.num_waiting)}</td>
              <td class="num">{number(server.num_restarts)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
