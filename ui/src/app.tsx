// The frame of all pages: title, theme, shortcuts, and the page that the address names.
import type { ComponentChildren } from "preact";
import { useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";
import type { Info } from "./api";
import { isExport, useAnswer } from "./client";
import { follow, useConnection } from "./live";
import { ComparePage } from "./pages/compare";
import { RunPage } from "./pages/run";
import { RunsPage } from "./pages/runs";
import { ServersPage } from "./pages/servers";
import { Failed, Loading } from "./parts/states";
import { clock } from "./format";
import { go, href, type Place, usePlace } from "./router";
import { focusSearch, HELP, moveRow, useShortcuts } from "./shortcuts";
import { ThemeContext, useThemeChoice } from "./theme";

const LIVE_TEXT = { off: "", connecting: "connecting", live: "live", paused: "paused", lost: "reconnecting", gone: "run deleted" };

export function App() {
  const { theme, choice, next } = useThemeChoice();
  const place = usePlace();
  const info = useAnswer<Info>(["info"]);
  const [isHelpOpen, setHelpOpen] = useState(false);
  const home = info.data?.single_run ?? (isExport ? info.data?.exported?.run : null) ?? null;
  useShortcuts({
    "?": () => setHelpOpen(true),
    "/": focusSearch,
    j: () => moveRow(1),
    k: () => moveRow(-1),
    d: next,
    h: () => go(href([])),
    Escape: () => setHelpOpen(false),
  });
  useEffect(() => {
    if (home === null || place.path.length > 0) return;
    const rollout = info.data?.exported?.rollout;
    go(rollout ? href(["run", home, "rollout"], { id: rollout }) : href(["run", home]));
  }, [home, place.path.length]);
  const run = place.path[0] === "run" ? (place.path[1] ?? null) : null;
  useEffect(() => {
    if (!isExport) follow(run);
    document.title = run ? `${run} · Headwater` : "Headwater";
  }, [run]);
  useEffect(() => {
    // After a change of page, the keyboard and a screen reader begin at its top.
    scrollTo(0, 0);
  }, [place.path.join("/")]);
  return (
    <ThemeContext.Provider value={theme}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={href([])}>
          <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
            <path d="M8 1.2C5.6 4.6 3.4 7 3.4 9.9a4.6 4.6 0 0 0 9.2 0C12.6 7 10.4 4.6 8 1.2z" />
          </svg>
          Headwater
        </a>
        <nav aria-label="Pages">
          {isExport ? null : (
            <a href={href([])} aria-current={place.path.length === 0 ? "page" : undefined}>
              Runs
            </a>
          )}
          {info.data && info.data.servers.length > 0 ? (
            <a href={href(["servers"])} aria-current={place.path[0] === "servers" ? "page" : undefined}>
              Servers
            </a>
          ) : null}
        </nav>
        <span class="spacer" />
        {isExport ? <span class="muted">exported {clock(info.data?.exported?.time)}</span> : <Live />}
        <button type="button" class="quiet" onClick={next} title="Light, dark, or as the system (d)">
          {choice === "system" ? "Auto" : choice === "dark" ? "Dark" : "Light"}
          <span class="visually-hidden"> theme; change it</span>
        </button>
        <button type="button" class="quiet" onClick={() => setHelpOpen(true)} aria-label="Keyboard shortcuts" title="Keyboard shortcuts (?)">
          ?
        </button>
      </header>
      <main id="main" class="page" tabIndex={-1}>
        <Contents of={info.data?.exported?.contents} />
        {info.error ? (
          <Failed error={info.error} retry={info.reload} />
        ) : info.data === null ? (
          <Loading what="the dashboard" />
        ) : (
          <Guard key={place.path.join("/")}>
            <Page place={place} info={info.data} />
          </Guard>
        )}
      </main>
      {isHelpOpen ? <Help close={() => setHelpOpen(false)} /> : null}
    </ThemeContext.Provider>
  );
}

/** An error in one page is a sentence there, and the frame stays. */
function Guard({ children }: { children: ComponentChildren }) {
  const [error, reset] = useErrorBoundary();
  if (error) return <Failed error={{ code: "page", message: `The page could not be drawn: ${String((error as Error).message ?? error)}. Please report this.` }} retry={reset} />;
  return <>{children}</>;
}

function Page({ place, info }: { place: Place; info: Info }) {
  const [first, second] = place.path;
  if (first === undefined) return isExport ? <Loading what="the exported run" /> : <RunsPage info={info} />;
  if (first === "run" && second !== undefined) return <RunPage name={second} place={place} />;
  if (first === "compare") return <ComparePage place={place} />;
  if (first === "servers") return <ServersPage />;
  return <Failed error={{ code: "not_found", message: "There is no page at this address." }} />;
}

/** What an exported file has of a run, and what it has not. */
function Contents({ of }: { of?: string[] }) {
  if (!of?.length) return null;
  return (
    <div class="contents" role="note" aria-label="What is in this file">
      {of.map((each) => (
        <p key={each}>{each}</p>
      ))}
    </div>
  );
}

function Live() {
  const connection = useConnection();
  return (
    <span class={`live live-${connection}`} role="status">
      {LIVE_TEXT[connection]}
    </span>
  );
}

function Help({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onClose={close} onCancel={close} aria-labelledby="help-title">
      <header>
        <h2 id="help-title">Keyboard shortcuts</h2>
        <button type="button" class="quiet" onClick={close}>
          Close
        </button>
      </header>
      <div class="help">
        {HELP.map(([title, keys]) => (
          <section key={title}>
            <h3>{title}</h3>
            <dl>
              {keys.map(([key, text]) => (
                <div key={key}>
                  <dt>
                    <kbd>{key}</kbd>
                  </dt>
                  <dd>{text}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </dialog>
  );
}
