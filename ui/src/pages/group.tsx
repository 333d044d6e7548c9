// All samples of one prompt in one step, side by side.
import type { Group } from "../api";
import { useAnswer } from "../client";
import { fixed, number, signed } from "../format";
import { Conversation } from "../parts/conversation";
import { Pictures } from "../parts/picture";
import { Choice } from "../parts/small";
import { Shown } from "../parts/states";
import { href, type Place, setQuery } from "../router";

const ORDERS: [string, string][] = [["sample", "Sample"], ["reward", "Reward"], ["length", "Length"]];

export function GroupPage({ name, place }: { name: string; place: Place }) {
  const [step, uid, source] = [place.query.get("step") ?? "", place.query.get("uid") ?? "", place.query.get("source")];
  const order = place.query.get("by") ?? "sample";
  const answer = useAnswer<Group>(["runs", name, "group"], { step, uid, source });
  return (
    <Shown answer={answer} what="the group">
      {(group) => {
        const mean = group.rollouts.reduce((sum, each) => sum + (each.reward ?? 0), 0) / (group.rollouts.length || 1);
        const isSingleTurn = group.rollouts.every((each) => each.turns <= 1 && each.tool_calls === 0);
        const rollouts = [...group.rollouts].sort((a, b) => (order === "reward" ? (b.reward ?? 0) - (a.reward ?? 0) : order === "length" ? b.length - a.length : a.sample - b.sample));
        return (
          <>
            <div class="bar">
              <h2>
                Group <code>{group.uid}</code>
              </h2>
              <span class="muted num">
                step {number(group.step)} · {group.rollouts.length} samples · mean reward {fixed(mean)}
              </span>
              <span class="spacer" />
              <Choice label="Order" value={order} options={ORDERS} onChange={(by) => setQuery({ by: by === "sample" ? null : by })} />
              <a href={href(["run", name, "prompt"], { uid, source })}>This prompt over steps</a>
            </div>
            <section class="panel prompt">
              <h3>Prompt</h3>
              {group.media.map((item, at) => (
                <Pictures key={at} run={name} item={item} digest={item.digest} name={item.kind} />
              ))}
              <pre>{group.prompt}</pre>
              {group.ground_truth && group.ground_truth !== "null" ? (
                <p>
                  <span class="muted">Ground truth</span> <code>{group.ground_truth}</code>
                </p>
              ) : null}
            </section>
            <ul class="side-by-side">
              {rollouts.map((each) => (
                <li key={each.id} class="panel">
                  <header>
                    <a data-row href={href(["run", name, "rollout"], { id: each.id })}>
                      Sample {each.sample}
                    </a>
                    <span class="num strong" title="Reward">
                      {fixed(each.reward)}
                    </span>
                    <span class="num muted" title="Advantage">
                      {signed(each.advantage)}
                    </span>
                  </header>
                  <p class="muted small num">
                    {number(each.length)} tokens · {each.ended_by ?? each.stop_reason}
                    {each.tool_calls ? ` · ${each.tool_calls} calls` : ""}
                    {each.failures ? ` · ${each.failures} failed` : ""}
                  </p>
                  {isSingleTurn ? <pre class="content">{each.response || "(empty)"}</pre> : <Conversation run={name} media={each.media} messages={each.messages} />}
                  {each.is_cut ? <p class="muted">Cut here; the tokens show the rest.</p> : null}
                </li>
              ))}
            </ul>
          </>
        );
      }}
    </Shown>
  );
}
