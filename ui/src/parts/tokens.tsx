// The tokens of a rollout as text. Thousands of them: pointing at one does not draw the others again.
import { memo } from "./memo";
import { useEffect, useRef, useState } from "preact/hooks";
import type { MediaItem, Rollout, Tokens } from "../api";
import type { Theme } from "../colours";
import { number, visible } from "../format";
import { type Colouring, colourOf } from "./colourings";
import { nameOf, Picture } from "./picture";

const CLASSES = ["is-prompt", "is-trained", "is-masked", "is-inserted"];
const BLOCK = 128;

interface Props {
  run: string;
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

interface Placed {
  item: MediaItem;
  /** The tokens that stand for it, within the page. */
  from: number;
  to: number;
}

/** By the first token on this page that stands for them: images and videos. */
function placedOn(rollout: Rollout, tokens: Tokens): Map<number, Placed> {
  const found = new Map<number, Placed>();
  for (const item of rollout.media) {
    for (const [start, length] of item.blocks) {
      const from = Math.max(0, start - tokens.offset);
      const to = Math.min(tokens.texts.length, start + length - tokens.offset);
      if (from < to) found.set(from, { item, from, to });
    }
  }
  return found;
}

export const TokenText = memo(function TokenText({ run, rollout, tokens, colouring, theme, hasBorders }: Props) {
  const [open, setOpen] = useState<ReadonlySet<number>>(new Set());
  const retokenised = new Set(tokens.retokenised);
  const split = new Set(tokens.is_split);
  const placed = placedOn(rollout, tokens);
  const hidden = new Set<number>();
  const standing = new Set<number>();
  for (const each of placed.values()) {
    const places = open.has(tokens.offset + each.from) ? standing : hidden;
    for (let at = each.from; at < each.to; at += 1) places.add(at);
  }
  const toggle = (place: number) => {
    const next = new Set(open);
    if (!next.delete(place)) next.add(place);
    setOpen(next);
  };
  return (
    <div class={hasBorders ? "tokens has-borders" : "tokens"}>
      {blocks(tokens.texts).map(([from, to]) => (
        <div key={from} class="token-block">
          {tokens.texts.slice(from, to).map((text, index) => {
            const at = from + index;
            const media = placed.get(at);
            const chip = media ? <Chip key={`media-${at}`} run={run} rollout={rollout} media={media} offset={tokens.offset} isOpen={!hidden.has(at)} toggle={toggle} /> : null;
            if (hidden.has(at)) return chip;
            const names = ["tok", CLASSES[tokens.kinds[at] ?? 0]];
            if (standing.has(at)) names.push("is-media");
            if (retokenised.has(at)) names.push("is-retokenised");
            if (split.has(at)) names.push("is-split");
            const shown = (
              <span key={at} id={`token-${tokens.offset + at}`} data-at={tokens.offset + at} class={names.join(" ")} style={{ background: colourOf(colouring, rollout, tokens, at, theme) ?? "" }}>
                {tokenText(text)}
              </span>
            );
            return chip ? [chip, shown] : shown;
          })}
        </div>
      ))}
    </div>
  );
});

/** An image in place of the tokens that stand for it. They are shown behind it on request. */
function Chip({ run, rollout, media, offset, isOpen, toggle }: { run: string; rollout: Rollout; media: Placed; offset: number; isOpen: boolean; toggle: (place: number) => void }) {
  const { item, from, to } = media;
  const name = nameOf(rollout, item);
  const place = isOpen ? {} : { id: `token-${offset + from}`, "data-at": offset + from, "data-to": offset + to };
  return (
    <span class="media-chip" {...place}>
      <Picture run={run} digest={item.digest} frame={item.kind === "video" ? 0 : null} name={name} />
      <button
        type="button"
        class="quiet"
        aria-expanded={isOpen}
        title={isOpen ? "Hide the tokens that stand for it" : "Show the tokens that stand for it"}
        onClick={(event) => {
          event.stopPropagation();
          toggle(offset + from);
        }}
      >
        {name} · {number(to - from)} {to - from === 1 ? "token" : "tokens"} {isOpen ? "▾" : "▸"}
      </button>
    </span>
  );
}

/** Keyboard and pointer over the tokens: `at` is the chosen one, `point` shows another for a moment. */
export function TokenField({ at, choose, point, ...props }: Props & { at: number; choose: (at: number) => void; point: (at: number | null) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const seen = useRef<number | null>(location.hash.includes("at=") ? null : at);
  const { offset, texts } = props.tokens;
  useEffect(() => {
    const chosen = elementOf(box.current, at);
    chosen?.classList.add("is-chosen");
    if (chosen) box.current?.setAttribute("aria-activedescendant", chosen.id);
    else box.current?.removeAttribute("aria-activedescendant");
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
    const within = Math.min(offset + texts.length - 1, Math.max(offset, to));
    // Tokens that are hidden behind an image are passed in one step.
    const chip = elementOf(box.current, within)?.closest<HTMLElement>(".media-chip[data-to]");
    const [first, end] = [Number(chip?.dataset["at"]), Number(chip?.dataset["to"])];
    if (!chip || at < first || at >= end) choose(chip ? first : within);
    else choose(to > at ? Math.min(offset + texts.length - 1, end) : Math.max(offset, first - 1));
  };
  return (
    <div
      class="token-field"
      ref={box}
      tabIndex={0}
      role="group"
      aria-label="Tokens of the rollout. Arrow keys choose a token."
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

/** What shows a token: the token itself, or the image that hides it. */
function elementOf(box: HTMLElement | null, place: number): HTMLElement | undefined {
  const own = box?.querySelector<HTMLElement>(`[data-at="${place}"]`);
  if (own) return own;
  const chips = [...(box?.querySelectorAll<HTMLElement>(".media-chip[data-to]") ?? [])];
  return chips.find((chip) => Number(chip.dataset["at"]) <= place && place < Number(chip.dataset["to"]));
}

export function shownText(text: string): string {
  return text === "" ? "nothing yet" : visible(text).replaceAll(" ", "␣");
}
