// How curves are drawn: smoothing, scale and axis.
import { useShortcuts } from "../shortcuts";
import type { View } from "./chart";

export function ViewControls({ view, setView, hasTime = true }: { view: View; setView: (view: View) => void; hasTime?: boolean }) {
  useShortcuts({
    l: () => setView({ ...view, isLog: !view.isLog }),
    ...(hasTime ? { x: () => setView({ ...view, byTime: !view.byTime }) } : {}),
  });
  return (
    <div class="view" role="group" aria-label="How curves are drawn">
      <label class="choice">
        <span>Smoothing</span>
        <input type="range" min="0" max="0.98" step="0.02" value={view.smoothing} onInput={(event) => setView({ ...view, smoothing: Number(event.currentTarget.value) })} />
        <span class="num">{view.smoothing.toFixed(2)}</span>
      </label>
      <label class="check">
        <input type="checkbox" checked={view.isLog} onChange={() => setView({ ...view, isLog: !view.isLog })} /> Log scale
      </label>
      {hasTime ? (
        <label class="check">
          <input type="checkbox" checked={view.byTime} onChange={() => setView({ ...view, byTime: !view.byTime })} /> By time
        </label>
      ) : null}
    </div>
  );
}
