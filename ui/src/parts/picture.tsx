// Images of a rollout, and frames of its videos.
import { useState } from "preact/hooks";
import type { MediaItem, Rollout } from "../api";
import { pictureUrl } from "../client";
import { number } from "../format";

const MOST_FRAMES = 8;

/** What is said instead of an image or video: its kind and its place among those of its kind. */
export function nameOf(rollout: Rollout, item: MediaItem): string {
  const alike = rollout.media.filter((each) => each.kind === item.kind);
  return alike.length > 1 ? `${item.kind} ${alike.indexOf(item) + 1}` : item.kind;
}

/** The item that a token stands for, with the tokens that stand for the same part of it. */
export function itemAt(rollout: Rollout, place: number): { item: MediaItem; from: number; to: number } | null {
  for (const item of rollout.media) {
    for (const [from, length] of item.blocks) {
      if (from <= place && place < from + length) return { item, from, to: from + length };
    }
  }
  return null;
}

/** One image or frame. A click makes it large and small again. */
export function Picture({ run, digest, frame = null, name }: { run: string; digest: string | null; frame?: number | null; name: string }) {
  const [isLarge, setLarge] = useState(false);
  const [isMissing, setMissing] = useState(false);
  const url = digest === null ? null : pictureUrl(run, digest, frame);
  if (url === null || isMissing) return <span class="picture is-missing">{name} (not available)</span>;
  return (
    <button type="button" class={isLarge ? "picture is-large" : "picture"} aria-pressed={isLarge} title={isLarge ? "Make it small" : "Make it large"} onClick={(event) => {
      event.stopPropagation();
      setLarge(!isLarge);
    }}>
      <img src={url} alt={name} loading="lazy" onError={() => setMissing(true)} />
    </button>
  );
}

/** An image, or the frames of a video. */
export function Pictures({ run, item, digest, name, most = MOST_FRAMES }: { run: string; item: MediaItem | null; digest: string | null; name: string; most?: number }) {
  if (!item || item.kind === "image") return <Picture run={run} digest={digest} name={name} />;
  const shown = Math.min(item.num_frames, most);
  return (
    <span class="frames">
      {Array.from({ length: shown }, (_, frame) => (
        <Picture key={frame} run={run} digest={digest} frame={frame} name={`${name}, frame ${frame + 1}`} />
      ))}
      {shown < item.num_frames ? <span class="muted">and {number(item.num_frames - shown)} more frames</span> : null}
    </span>
  );
}
