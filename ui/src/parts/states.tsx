// What a part of the page shows while it has no data: never nothing.
import type { ComponentChildren } from "preact";
import type { WithProblems } from "../api";
import type { Answer } from "../client";
import { href } from "../router";

export function Loading({ what }: { what: string }) {
  return (
    <p class="state loading" role="status">
      <span class="pulse" aria-hidden="true" /> Loading {what}.
    </p>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <div class="state empty">{children}</div>;
}

const TITLES: Record<string, string> = {
  unknown_run: "This run is not there",
  not_found: "Not found",
  offline: "No connection",
  unreadable: "A file cannot be read",
  not_in_export: "Not in this file",
};

export function Failed({ error, retry }: { error: { code: string; message: string }; retry?: () => void }) {
  return (
    <div class="state failed" role="alert">
      <h2>{TITLES[error.code] ?? "This could not be loaded"}</h2>
      <p>{error.message}</p>
      <p>
        {retry && error.code !== "not_in_export" ? (
          <button type="button" onClick={retry}>
            Try again
          </button>
        ) : null}{" "}
        <a href={href([])}>All runs</a>
      </p>
    </div>
  );
}

export function Problems({ of }: { of: WithProblems | null }) {
  const problems = of?.problems ?? [];
  if (problems.length === 0) return null;
  return (
    <div class="problems" role="status">
      <ul>
        {problems.slice(0, 20).map((each) => (
          <li key={each}>{each}</li>
        ))}
        {problems.length > 20 ? <li>And {problems.length - 20} more.</li> : null}
      </ul>
    </div>
  );
}

/** The data once they are there; before, or if they cannot be had, a sentence. */
export function Shown<T extends WithProblems>({ answer, what, children }: { answer: Answer<T>; what: string; children: (data: T) => ComponentChildren }) {
  if (answer.error) return <Failed error={answer.error} retry={answer.reload} />;
  if (answer.data === null) return <Loading what={what} />;
  return (
    <>
      <Problems of={answer.data} />
      <div class={answer.isLoading ? "shown is-old" : "shown"} aria-busy={answer.isLoading}>
        {children(answer.data)}
      </div>
    </>
  );
}
