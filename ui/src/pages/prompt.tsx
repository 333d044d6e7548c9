// The same prompt over steps: what was learned.
import type { PromptOverSteps, Row } from "../api";
import { useAnswer } from "../client";
import { fixed, number, visible } from "../format";
import { Chart } from "../parts/chart";
import { Empty, Shown } from "../parts/states";
import { href, type Place } from "../router";
import { RewardStrip } from "./groups";
import { IndexState, usePolling } from "./rollouts";

export function PromptPage({ name, place }: { name: string; place: Place }) {
  const [uid, source] = [place.query.get("uid") ?? "", place.query.get("source")];
  const answer = useAnswer<PromptOverSteps>(["runs", name, "prompt"], { uid, source }, ["rollouts"]);
  usePolling(answer, answer.data?.index);
  return (
    <Shown answer={answer} what="the prompt over steps">
      {(data) => (
        <>
          <div class="bar">
            <h2>
              Prompt <code>{data.uid}</code>
            </h2>
            <span class="muted">
              in {number(data.num_steps ?? data.steps.length)} {(data.num_steps ?? data.steps.length) === 1 ? "step" : "steps"}
            </span>
          </div>
          <IndexState index={data.index} isNeeded />
          <section class="panel prompt">
            <pre>{data.prompt}</pre>
          </section>
          {data.steps.length === 0 ? (
            <Empty>
              <p>No step with this prompt was found.</p>
            </Empty>
          ) : (
            <>
              {data.steps.length > 1 ? (
                <div class="charts">
                  <Chart title="Reward of this prompt" steps={data.steps.map((each) => each.step)} curves={[{ label: "mean", values: data.steps.map((each) => each.reward_mean) }, { label: "best", values: data.steps.map((each) => each.best.reward) }, { label: "worst", values: data.steps.map((each) => each.worst.reward) }]} />
                  <Chart title="Mean length" unit="tokens" steps={data.steps.map((each) => each.step)} minimum={0} curves={[{ label: "tokens", values: data.steps.map((each) => each.length_mean) }]} />
                </div>
              ) : null}
              <div class="table-box" tabIndex={0} role="region" aria-label="Steps with this prompt">
                <table class="rollouts">
                  <thead>
                    <tr>
                      <th scope="col" class="num">Step</th>
                      <th scope="col">Rewards</th>
                      <th scope="col" class="num">Mean</th>
                      <th scope="col">Best response</th>
                      <th scope="col">Worst response</th>
                    </tr>
                  </thead>
                  <tbody>
                    {data.steps.map((each) => (
                      <tr key={each.step}>
                        <th scope="row" class="num">
                          <a data-row href={href(["run", name, "group"], { step: each.step, uid, source })}>
                            {number(each.step)}
                          </a>
                        </th>
                        <td>
                          <RewardStrip rewards={each.rewards} />
                        </td>
                        <td class="num strong">{fixed(each.reward_mean)}</td>
                        <ResponseCell name={name} row={each.best} />
                        <ResponseCell name={name} row={each.worst} />
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            </>
          )}
        </>
      )}
    </Shown>
  );
}

function ResponseCell({ name, row }: { name: string; row: Row }) {
  return (
    <td class="text-cell">
      <span class="num strong">{fixed(row.reward, 2)}</span>{" "}
      <a class="clip" href={href(["run", name, "rollout"], { id: row.id })}>
        {visible(row.response) || "(empty)"}
      </a>
    </td>
  );
}
