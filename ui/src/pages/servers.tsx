// Running servers that were named with --server.
import { useEffect } from "preact/hooks";
import type { Servers } from "../api";
import { useAnswer } from "../client";
import { Empty, Shown } from "../parts/states";
import { Now, ServerTable } from "./engine";

export function ServersPage() {
  const answer = useAnswer<Servers>(["servers"]);
  const { reload } = answer;
  useEffect(() => {
    const timer = setInterval(reload, 2000);
    return () => clearInterval(timer);
  }, [reload]);
  return (
    <>
      <header class="title">
        <h1>Servers</h1>
      </header>
      <Shown answer={answer} what="the servers">
        {(data) => (
          <>
            {data.servers.length === 0 ? (
              <Empty>
                <p>
                  No server was named. Start the dashboard with <code>headwater ui --server http://127.0.0.1:8000</code>.
                </p>
              </Empty>
            ) : null}
            {data.servers.map((server) => (
              <section key={server.url} class="panel">
                <header>
                  <h2>{server.url}</h2>
                  <span class={`badge ${server.is_alive ? "state-running" : "state-failed"}`}>
                    <span aria-hidden="true">{server.is_alive ? "●" : "✕"}</span> {server.is_alive ? "alive" : "no answer"}
                  </span>
                  <span class="muted">{server.model}</span>
                </header>
                {server.error ? <p class="error">{server.error}</p> : null}
                {server.is_alive ? <Now engine={server} version={server.version} /> : null}
                {server.members?.length ? <ServerTable servers={server.members} /> : null}
              </section>
            ))}
          </>
        )}
      </Shown>
    </>
  );
}
