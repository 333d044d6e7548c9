// Generation beside training, as bars over time.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Timeline } from "../api";
import { isExport, useAnswer } from "../client";
import { line } from "../colours";
import { duration, number } from "../format";
import { Empty, Failed, Loading, Problems } from "../parts/states";
import { useShortcuts } from "../shortcuts";
import { useTheme } from "../theme";

const [LEFT, ROW, TOP] = [96, 30, 26];

type Span = [number, number];

/** Generation in the first colour, the learner in the second, and the rest in grey. */
const KINDS: Record<string, number> = { generate: 0, reward: 0, experience: 1, train: 1, publish: 1 };

export function TimelinePage({ name }: { name: string }) {
  const [window_, setWindow] = useState<Span | null>(null);
  const [asked, setAsked] = useState<Span | null>(null);
  useEffect(() => {
    const timer = setTimeout(() => setAsked(window_), 150);
    return () => clearTimeout(timer);
  }, [window_]);
  const params = asked && !isExport ? { from: asked[0].toFixed(4), to: asked[1].toFixed(4) } : {};
  const answer = useAnswer<Timeline>(["runs", name, "timeline"], params, asked ? [] : ["trace", "metrics"]);
  const { data } = answer;
  if (answer.error) return <Failed error={answer.error} retry={answer.reload} />;
  if (!data) return <Loading what="the timeline" />;
  if (data.source === "none") {
    return (
      <Empty>
        <h2>No timeline yet</h2>
        <p>It appears with the first step. For single rollouts and weights in it, train with:</p>
        <pre>trainer.trace=true</pre>
      </Empty>
    );
  }
  const loose = data.rows.filter((row) => row.is_place_known === false).map((row) => row.name);
  return (
    <>
      <Problems of={data} />
      <Bars data={data} shown={window_ ?? data.window} setWindow={setWindow} />
      <p class="muted">
        {data.source === "trace"
          ? "From the run's trace. A bar is a time in which at least one span of its name was open; bars that are too narrow to see are joined."
          : "Drawn from the stages of each step, because the run has no trace. Train with trainer.trace=true to see when exactly things were done."}
        {loose.length ? ` Of ${loose.join(" and ")} only the length in each step is known, not when it was: these pale bars begin with their step.` : ""}
        {" Drag to move, Ctrl and the wheel to zoom."}
        {data.num_left_out ? ` ${number(data.num_left_out)} older bars were not kept.` : ""}
      </p>
      <Shares data={data} />
    </>
  );
}

function Bars({ data, shown, setWindow }: { data: Timeline; shown: Span; setWindow: (span: Span | null) => void }) {
  const theme = useTheme();
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(900);
  const [hover, setHover] = useState<{ x: number; y: number; text: string } | null>(null);
  const drag = useRef<{ x: number; span: Span } | null>(null);
  const height = TOP + data.rows.length * ROW + 6;
  const [from, to] = shown;
  const inside = Math.max(50, width - LEFT - 8);
  const x = (at: number) => LEFT + ((at - from) / (to - from || 1)) * inside;
  const clamp = ([a, b]: Span): Span => {
    const [first, end] = data.total;
    const size = Math.min(Math.max(b - a, 1e-3), Math.max(end - first, 1e-3));
    const start = Math.min(Math.max(a, first), end - size);
    return [start, start + size];
  };
  const zoom = (factor: number, at = (from + to) / 2) => setWindow(clamp([at - (at - from) * factor, at + (to - at) * factor]));
  const move = (share: number) => setWindow(clamp([from + (to - from) * share, to + (to - from) * share]));
  const whole = () => setWindow([...data.total]);
  useShortcuts({ "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), "0": whole });
  useEffect(() => {
    if (!box.current) return;
    const observer = new ResizeObserver((entries) => setWidth(entries[0]?.contentRect.width ?? 900));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context) return;
    const scale = devicePixelRatio || 1;
    element.width = width * scale;
    element.height = height * scale;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const step = niceStep((to - from) / Math.max(2, inside / 110));
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      context.fillStyle = colour("--grid");
      context.fillRect(x(tick), TOP - 4, 1, height);
      context.fillStyle = colour("--muted");
      context.fillText(duration(Math.abs(tick) < 1e-9 ? 0 : tick).replace("0 µs", "0 s"), x(tick) + 3, 9);
    }
    context.fillStyle = colour("--accent");
    let free = -Infinity;
    for (const mark of data.marks) {
      const at = x(mark.at);
      if (at < LEFT || at > width) continue;
      context.globalAlpha = 0.5;
      context.fillRect(at, TOP - 6, 1, height);
      context.globalAlpha = 1;
      if (at > free) {
        const label = `step ${mark.step}`;
        context.fillText(label, at + 3, 20);
        free = at + context.measureText(label).width + 12;
      }
    }
    data.rows.forEach((row, index) => {
      const y = TOP + index * ROW;
      context.fillStyle = colour(index % 2 ? "--surface" : "--sunken");
      context.globalAlpha = 0.6;
      context.fillRect(LEFT, y + 1, inside, ROW - 2);
      context.globalAlpha = 1;
      context.save();
      context.beginPath();
      context.rect(LEFT, y, inside, ROW);
      context.clip();
      for (const [begin, end, , label] of row.bars) {
        if (end < from || begin > to) continue;
        const [left, right] = [x(begin), x(end)];
        context.fillStyle = line(theme, KINDS[row.name] ?? 6);
        context.globalAlpha = row.is_place_known === false ? 0.45 : 1;
        context.fillRect(left, y + 5, Math.max(1, right - left), ROW - 10);
        context.globalAlpha = 1;
        if (label && right - left > 46) {
          context.fillStyle = colour(row.is_place_known === false ? "--text" : "--surface");
          context.fillText(label, Math.max(left, LEFT) + 5, y + ROW / 2, right - Math.max(left, LEFT) - 8);
        }
      }
      context.restore();
      context.fillStyle = colour("--text");
      context.fillText(row.name, 4, y + ROW / 2);
    });
  });
  const point = (event: PointerEvent) => {
    const area = canvas.current?.getBoundingClientRect();
    if (!area) return;
    const [px, py] = [event.clientX - area.left, event.clientY - area.top];
    if (drag.current) {
      const shift = ((drag.current.x - px) / inside) * (to - from);
      const [a, b] = drag.current.span;
      setWindow(clamp([a + shift, b + shift]));
      return;
    }
    const row = data.rows[Math.floor((py - TOP) / ROW)];
    const at = from + ((px - LEFT) / inside) * (to - from);
    const near = ((to - from) / inside) * 2;
    const bar = row?.bars.find(([begin, end]) => begin - near <= at && at <= end + near);
    setHover(row && bar ? { x: px, y: py, text: `${row.name}${bar[3] ? `: ${bar[3]}` : ""} · ${duration(bar[1] - bar[0])} from ${duration(bar[0])}${bar[2] > 1 ? ` · ${number(bar[2])} joined` : ""}` } : null);
  };
  const [first, end] = data.total;
  const whole_ = end - first || 1;
  return (
    <section class="panel timeline" aria-label="Timeline">
      <div class="bar">
        <span class="num">
          {duration(from)} – {duration(to)} <span class="muted">after the start of the run; recorded until {duration(end)}</span>
        </span>
        <span class="spacer" />
        <button type="button" onClick={() => move(-0.5)} aria-label="Earlier">◀</button>
        <button type="button" onClick={() => move(0.5)} aria-label="Later">▶</button>
        <button type="button" onClick={() => zoom(0.5)} aria-label="Zoom in">+</button>
        <button type="button" onClick={() => zoom(2)} aria-label="Zoom out">−</button>
        <button type="button" onClick={whole}>Whole run</button>
        <button type="button" onClick={() => setWindow(null)}>Newest</button>
      </div>
      <div
        ref={box}
        class="bars"
        tabIndex={0}
        role="application"
        aria-roledescription="timeline"
        aria-label={`Timeline from ${duration(from)} to ${duration(to)}. Plus and minus zoom, arrows move. Rows: ${data.rows.map((row) => row.name).join(", ")}.`}
        onWheel={(event) => {
          if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // plain scrolling moves the page
          event.preventDefault();
          const area = canvas.current?.getBoundingClientRect();
          zoom(event.deltaY > 0 ? 1.25 : 0.8, from + ((event.clientX - (area?.left ?? 0) - LEFT) / inside) * (to - from));
        }}
        onPointerDown={(event) => {
          const area = canvas.current?.getBoundingClientRect();
          drag.current = { x: event.clientX - (area?.left ?? 0), span: shown };
          event.currentTarget.setPointerCapture(event.pointerId);
        }}
        onPointerUp={() => (drag.current = null)}
        onPointerMove={point}
        onPointerLeave={() => setHover(null)}
      >
        <canvas ref={canvas} style={{ width: `${width}px`, height: `${height}px` }} />
        {hover ? (
          <div class="tip" style={{ left: `${Math.min(hover.x + 12, width - 240)}px`, top: `${hover.y + 14}px` }}>
            {hover.text}
          </div>
        ) : null}
      </div>
      <div class="range" aria-hidden="true">
        <span style={{ left: `${(100 * (from - first)) / whole_}%`, width: `${Math.max(0.5, (100 * (to - from)) / whole_)}%` }} />
      </div>
    </section>
  );
}

function niceStep(rough: number): number {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return power * ([1, 2, 5, 10].find((each) => each * power >= rough) ?? 10);
}

/** The same in numbers, also for those who cannot see the bars. */
function Shares({ data }: { data: Timeline }) {
  const [from, to] = data.window;
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Time of each row in the window">
      <table>
        <thead>
          <tr>
            <th scope="col">Row</th>
            <th scope="col" class="num">Busy in the window</th>
            <th scope="col" class="num">Share</th>
            <th scope="col">What it is</th>
          </tr>
        </thead>
        <tbody>
          {data.rows.map((row) => {
            const busy = row.bars.reduce((sum, [begin, end]) => sum + Math.max(0, Math.min(end, to) - Math.max(begin, from)), 0);
            return (
              <tr key={row.name}>
                <th scope="row">{row.name}</th>
                <td class="num">{duration(busy)}</td>
                <td class="num">{Math.round((100 * busy) / (to - from || 1))}%</td>
                <td class="muted">{row.text}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
