// All settings of a run, with their explanations.
import { useState } from "preact/hooks";
import type { Config } from "../api";
import { useAnswer } from "../client";
import { setting } from "../format";
import { SearchField } from "../parts/small";
import { Empty, Shown } from "../parts/states";
import { type Place, setQuery } from "../router";

export function ConfigPage({ name, place }: { name: string; place: Place }) {
  const answer = useAnswer<Config>(["runs", name, "config"], {}, ["config"]);
  const text = place.query.get("search") ?? "";
  const onlyChanged = place.query.get("changed") === "1";
  const [isYaml, setYaml] = useState(false);
  return (
    <>
      <div class="bar">
        <SearchField id="search-config" label="Search settings and explanations" value={text} onChange={(search) => setQuery({ search })} />
        <label class="check">
          <input type="checkbox" checked={onlyChanged} onChange={() => setQuery({ changed: onlyChanged ? null : 1 })} /> Only what differs from the defaults
        </label>
        <label class="check">
          <input type="checkbox" checked={isYaml} onChange={() => setYaml(!isYaml)} /> As a file
        </label>
      </div>
      <Shown answer={answer} what="the settings">
        {(config) => (isYaml ? <pre class="panel file" tabIndex={0}>{config.yaml}</pre> : <Settings config={config} text={text} onlyChanged={onlyChanged} />)}
      </Shown>
    </>
  );
}

function Settings({ config, text, onlyChanged }: { config: Config; text: string; onlyChanged: boolean }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const sections = config.sections
    .map((section) => ({
      ...section,
      settings: section.settings.filter((each) => {
        const all = `${each.key} ${each.text} ${setting(each.value)}`.toLowerCase();
        return (!onlyChanged || !each.is_default) && words.every((word) => all.includes(word));
      }),
    }))
    .filter((section) => section.settings.length > 0);
  if (sections.length === 0) {
    return (
      <Empty>
        <p>{config.sections.length === 0 ? "The run has no readable settings." : "No setting matches."}</p>
      </Empty>
    );
  }
  return (
    <div class="settings">
      {sections.map((section) => (
        <section key={section.name} class="panel">
          <h2>{section.name}</h2>
          <dl>
            {section.settings.map((each) => (
              <div key={each.key} class={each.is_default ? undefined : "is-changed"}>
                <dt>
                  <code>{each.key}</code>
                </dt>
                <dd>
                  <code class="value">{setting(each.value)}</code>
                  {each.is_default ? null : <span class="changed">changed</span>}
                  <p>{each.text}</p>
                </dd>
              </div>
            ))}
          </dl>
        </section>
      ))}
    </div>
  );
}
