// Groups of one step: all samples of a prompt in one row.
import type { Groups, Maybe } from "../api";
import { isExport, useAnswer } from "../client";
import { sequential } from "../colours";
import { fixed, number, visible } from "../format";
import { Choice, Pager } from "../parts/small";
import { Empty, Shown } from "../parts/states";
import { href, type Place, setQuery } from "../router";
import { useTheme } from "../theme";

const SORTS: [string, string][] = [
  ["place", "Place in the file"],
  ["reward", "Mean reward"],
  ["spread", "Spread of rewards"],
  ["length", "Mean length"],
];

export function GroupList({ name, source, step, place }: { name: string; source: string; step: number; place: Place }) {
  const get = (key: string) => place.query.get(key) ?? "";
  const sort = SORTS.some(([each]) => each === get("sort")) ? get("sort") : "place";
  const answer = useAnswer<Groups>(["runs", name, "groups"], {
    source: source === "train" ? null : source,
    step,
    ...(isExport ? {} : { sort: sort === "place" ? null : sort, order: get("order"), text: get("text"), offset: get("offset") === "0" ? null : get("offset") }),
  });
  return (
    <>
      {isExport ? null : (
        <div class="bar filters">
          <Choice label="Sort by" value={sort} options={SORTS} onChange={(value) => setQuery({ sort: value === "place" ? null : value, order: null, offset: null })} />
          {sort !== "place" ? (
            <button type="button" onClick={() => setQuery({ order: get("order") === "asc" ? null : "asc", offset: null })}>
              {get("order") === "asc" ? "Least first" : "Most first"}
            </button>
          ) : null}
        </div>
      )}
      <Shown answer={answer} what="the groups">
        {(data) =>
          data.groups.length === 0 ? (
            <Empty>
              <p>No group matches.</p>
            </Empty>
          ) : (
            <>
              <div class="table-box" tabIndex={0} role="region" aria-label="Table of groups">
                <table class="rollouts">
                  <thead>
                    <tr>
                      <th scope="col">Prompt</th>
                      <th scope="col">Rewards of the samples</th>
                      <th scope="col" class="num">Mean</th>
                      <th scope="col" class="num">Least</th>
                      <th scope="col" class="num">Most</th>
                      <th scope="col" class="num">Mean length</th>
                      <th scope="col">Source</th>
                    </tr>
                  </thead>
                  <tbody>
                    {data.groups.map((group) => (
                      <tr key={group.uid}>
                        <th scope="row" class="text-cell">
                          <a class="row-link" data-row href={href(["run", name, "group"], { step: group.step, uid: group.uid, source: source === "train" ? null : source })}>
                            {visible(group.prompt) || "(empty)"}
                          </a>
                          <span class="sub">{group.uid}</span>
                        </th>
                        <td>
                          <RewardStrip rewards={group.rewards} />
                        </td>
                        <td class="num strong">{fixed(group.reward_mean)}</td>
                        <td class="num">{fixed(group.reward_min)}</td>
                        <td class="num">{fixed(group.reward_max)}</td>
                        <td class="num">{number(group.length_mean)}</td>
                        <td>{group.data_source}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
              {isExport ? null : <Pager offset={data.offset} limit={data.limit} total={data.total} onMove={(offset) => setQuery({ offset })} />}
            </>
          )
        }
      </Shown>
    </>
  );
}

/** One square per sample; the more reward, the more colour. */
export function RewardStrip({ rewards }: { rewards: Maybe[] }) {
  const theme = useTheme();
  const known = rewards.filter((each): each is number => each !== null);
  const [low, high] = [Math.min(0, ...known), Math.max(1e-9, ...known)];
  return (
    <span class="strip" role="img" aria-label={`Rewards: ${rewards.slice(0, 32).map((each) => fixed(each, 2)).join(", ")}`}>
      {rewards.slice(0, 32).map((reward, at) => (
        <span key={at} title={fixed(reward)} style={reward === null ? {} : { background: sequential(theme, ((reward - low) / (high - low)) ** 2, 1) }} />
      ))}
    </span>
  );
}
