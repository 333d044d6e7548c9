// The tokens of a rollout as text. Thousands of them: pointing at one does not draw the others again.
import { memo } from "./memo";
import { useEffect, useRef } from "preact/hooks";
import type { Rollout, Tokens } from "../api";
import type { Theme } from "../colours";
import { visible } from "../format";
import { type Colouring, colourOf } from "./colourings";

const CLASSES = ["is-prompt", "is-trained", "is-masked", "is-inserted"];
const BLOCK = 128;

interface Props {
  rollout: Rollout;
  tokens: Tokens;
  colouring: Colouring;
  theme: Theme;
  hasBorders: boolean;
}

/** A line break is visible and breaks the line. */
export function tokenText(text: string): string {
  return text === "" ? "∅" : text.replaceAll("\n", "↵\n");
}

/** Blocks end at a line break, so that the browser can leave out those that are not in view. */
function blocks(texts: string[]): [number, number][] {
  const found: [number, number][] = [];
  let from = 0;
  texts.forEach((text, at) => {
    if (at + 1 === texts.length || (at + 1 - from >= BLOCK && text.endsWith("\n"))) {
      found.push([from, at + 1]);
      from = at + 1;
    }
  });
  return found;
}

export const TokenText = memo(function TokenText({ rollout, tokens, colouring, theme, hasBorders }: Props) {
  const retokenised = new Set(tokens.retokenised);
  const split = new Set(tokens.is_split);
  return (
    <div class={hasBorders ? "tokens has-borders" : "tokens"}>
      {blocks(tokens.texts).map(([from, to]) => (
        <div key={from} class="token-block">
          {tokens.texts.slice(from, to).map((text, index) => {
            const at = from + index;
            const names = ["tok", CLASSES[tokens.kinds[at] ?? 0]];
            if (retokenised.has(at)) names.push("is-retokenised");
            if (split.has(at)) names.push("is-split");
            return (
              <span key={at} id={`token-${tokens.offset + at}`} data-at={tokens.offset + at} class={names.join(" ")} style={{ background: colourOf(colouring, rollout, tokens, at, theme) ?? "" }}>
                {tokenText(text)}
              </span>
            );
          })}
        </div>
      ))}
    </div>
  );
});

/** Keyboard and pointer over the tokens: `at` is the chosen one, `point` shows another for a moment. */
export function TokenField({ at, choose, point, ...props }: Props & { at: number; choose: (at: number) => void; point: (at: number | null) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const seen = useRef<number | null>(location.hash.includes("at=") ? null : at);
  const { offset, texts } = props.tokens;
  useEffect(() => {
    const chosen = box.current?.querySelector(`[data-at="${at}"]`);
    chosen?.classList.add("is-chosen");
    // A page that was just opened stays at its top, unless its address names a token.
    const area = seen.current === at ? undefined : chosen?.getBoundingClientRect();
    if (chosen) seen.current = at;
    if (area && (area.top < 60 || area.bottom > innerHeight - 20)) chosen?.scrollIntoView({ block: "center" });
    return () => chosen?.classList.remove("is-chosen");
  });
  const placeOf = (event: Event) => {
    const element = (event.target as HTMLElement).closest<HTMLElement>("[data-at]");
    return element ? Number(element.dataset["at"]) : null;
  };
  const move = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    const to = event.key === "Home" ? offset : event.key === "End" ? offset + texts.length - 1 : by === undefined ? null : at + by;
    if (to === null) return;
    event.preventDefault();
    choose(Math.min(offset + texts.length - 1, Math.max(offset, to)));
  };
  return (
    <div
      class="token-field"
      ref={box}
      tabIndex={0}
      role="group"
      aria-label="Tokens of the rollout. Arrow keys choose a token."
      aria-activedescendant={`token-${at}`}
      onKeyDown={move}
      onPointerOver={(event) => point(placeOf(event))}
      onPointerLeave={() => point(null)}
      onClick={(event) => {
        const place = placeOf(event);
        if (place !== null) choose(place);
      }}
    >
      <TokenText {...props} />
    </div>
  );
}

export function shownText(text: string): string {
  return text === "" ? "nothing yet" : visible(text).replaceAll(" ", "␣");
}
