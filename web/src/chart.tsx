// The error of each call of a rank, in execution order.
import { useMemo, useRef, useState } from "preact/hooks";
import { Canvas, type Size } from "./canvas.tsx";
import { wordAt, type Calls } from "./data.ts";
import { count, error } from "./format.ts";
import { logScale, nearest, type LogScale } from "./scale.ts";
import { colour, statusColour, useShared } from "./state.tsx";

const HEIGHT = 260;
const MARGIN = { left: 58, right: 12, top: 22, bottom: 30 };
const GREATEST = 100; // a relative error beyond this is as good as infinite
const REACH = 26; // pixels around the pointer in which a call is found

interface Plot { own: Int32Array; error: Float64Array; limit: Float64Array; scale: LogScale; zeros: boolean; infinities: boolean }

function plotOf(calls: Calls, rank: number, relative: boolean): Plot {
  const numbers = Array.from({ length: calls.count }, (_, call) => call).filter((call) => calls.rank[call] === rank);
  const own = Int32Array.from(numbers);
  const errors = Float64Array.from(own, (call) => calls.error[call]);
  const limit = Float64Array.from(own, (call) => calls.limit[call]);
  const most = relative ? GREATEST : Infinity;
  const zeros = errors.includes(0), infinities = errors.some((each) => each === Infinity || each > most);
  return { own, error: errors, limit, scale: logScale([errors, limit], zeros, infinities, most), zeros, infinities };
}

export function ranksOf(calls: Calls): number[] {
  return [...new Set(calls.rank)].sort((a, b) => a - b);
}

export function Chart() {
  const { page, calls, t, dark, language, rank, setRank, query, setQuery, selected, select } = useShared();
  const plot = useMemo(() => plotOf(calls!, rank, page.measure === "relative_l2"), [calls, rank]);
  const ranks = useMemo(() => page.matrix?.ranks ?? ranksOf(calls!), [calls]);
  const [hover, setHover] = useState<{ call: number; x: number; y: number } | null>(null);
  const [drag, setDrag] = useState<[number, number] | null>(null); // what is drawn
  const start = useRef<number | null>(null); // where the drag began: at hand before the next frame
  const size = useRef<Size>({ width: 0, height: HEIGHT });
  if (!plot.own.length) return null;

  const inner = (): { width: number; height: number } => ({ width: size.current.width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom });
  const xOf = (at: number): number => MARGIN.left + ((at + 0.5) / plot.own.length) * inner().width;
  const yOf = (value: number): number => MARGIN.top + (1 - plot.scale.y(value)) * inner().height;
  const atX = (x: number): number => Math.min(plot.own.length - 1, Math.max(0, Math.floor(((x - MARGIN.left) / inner().width) * plot.own.length)));
  const point = (event: PointerEvent): [number, number] => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const callNear = (x: number, y: number): number => {
    const [first, last] = [atX(x - REACH), atX(x + REACH)];
    let best = -1, distance = REACH * REACH;
    for (let at = first; at <= last; at++) {
      const value = plot.error[at];
      if (Number.isNaN(value)) continue;
      const away = (xOf(at) - x) ** 2 + (yOf(value) - y) ** 2 - calls!.status[plot.own[at]]; // a worse one wins where they overlap
      if (away < distance) [best, distance] = [at, away];
    }
    return best;
  };
  const move = (event: PointerEvent): void => {
    const [x, y] = point(event);
    if (start.current !== null) setDrag([start.current, x]);
    const at = callNear(x, y);
    setHover(at < 0 ? null : { call: plot.own[at], x: xOf(at), y: yOf(plot.error[at]) });
  };
  const down = (event: PointerEvent): void => {
    (event.currentTarget as Element).setPointerCapture(event.pointerId);
    [start.current] = point(event);
  };
  const up = (event: PointerEvent): void => {
    const [x, y] = point(event);
    const began = start.current ?? x;
    start.current = null;
    setDrag(null);
    if (Math.abs(x - began) > 6) {
      const [first, last] = [atX(Math.min(x, began)), atX(Math.max(x, began))];
      setQuery({ range: [plot.own[first], plot.own[last]], rank: ranks.length > 1 ? rank : -1 });
      return;
    }
    const at = callNear(x, y);
    if (at >= 0) select(plot.own[at]);
    else if (query.range) setQuery({ range: null });
  };
  const key = (event: KeyboardEvent): void => {
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") setQuery({ range: null });
    if (!(event.key in steps)) return;
    event.preventDefault();
    const here = selected >= 0 ? nearest(plot.own, selected) : 0;
    select(plot.own[Math.min(plot.own.length - 1, Math.max(0, here + steps[event.key]))]);
  };
  const chosen = query.range && [nearest(plot.own, query.range[0]), nearest(plot.own, query.range[1])];
  const marks = plot.own.length ? [...new Set(Array.from(plot.own, (call) => calls!.status[call]))].sort((a, b) => b - a) : [];
  return (
    <section aria-labelledby="execution">
      <header class="row">
        <h2 id="execution">{t(page.kind === "run" ? "execution_run" : "execution")}</h2>
        {ranks.length > 1 && (
          <label>{t("all_ranks")} <select value={rank} onChange={(event) => setRank(Number(event.currentTarget.value))}>
            {ranks.map((each) => <option value={each}>{each}</option>)}
          </select></label>
        )}
        <span class="legend">
          {marks.map((status) => <span><i class="dot" style={{ background: statusColour(page.statuses[status]) }} />{t(page.statuses[status])}</span>)}
          {page.kind === "compare" && <span><i class="band" />{t("band")}</span>}
          <span><i class="shade" />{t("backward")}</span>
        </span>
        {query.range && <button type="button" class="ghost" onClick={() => setQuery({ range: null })}>{count(chosen![1] - chosen![0] + 1)} {t("calls")} · {t("clear")}</button>}
      </header>
      <div class="chart">
        <Canvas height={HEIGHT} class="base" aria-hidden="true" deps={[plot, dark, language, chosen?.join()]}
          draw={(context, held) => { size.current = held; drawPlot(context, held, plot, calls!, page.statuses, chosen, page.measure, t); }} />
        <Canvas height={HEIGHT} class="top" tabIndex={0} role="application" aria-label={`${t("chart_label")}. ${t("chart_help")}`}
          aria-describedby="chart-call" deps={[hover, drag, selected, plot, dark]}
          onPointerMove={move} onPointerDown={down} onPointerUp={up} onPointerLeave={() => setHover(null)} onKeyDown={key}
          onDblClick={() => setQuery({ range: null })}
          draw={(context, held) => {
            context.clearRect(0, 0, held.width, held.height);
            if (drag && Math.abs(drag[1] - drag[0]) > 6) {
              context.fillStyle = colour("brush");
              context.fillRect(Math.min(...drag), MARGIN.top, Math.abs(drag[1] - drag[0]), HEIGHT - MARGIN.top - MARGIN.bottom);
            }
            const ring = (x: number, y: number, size: number, ink: string): void => {
              context.strokeStyle = ink;
              context.lineWidth = 2;
              context.beginPath();
              context.arc(x, y, size, 0, 2 * Math.PI);
              context.stroke();
            };
            const at = selected >= 0 ? nearest(plot.own, selected) : -1;
            if (at >= 0 && plot.own[at] === selected) {
              const x = xOf(at), y = Number.isNaN(plot.error[at]) ? HEIGHT - MARGIN.bottom : yOf(plot.error[at]);
              context.strokeStyle = colour("ink");
              context.globalAlpha = 0.35;
              context.beginPath();
              context.moveTo(x, MARGIN.top);
              context.lineTo(x, HEIGHT - MARGIN.bottom);
              context.stroke();
              context.globalAlpha = 1;
              ring(x, y, 7, colour("ink"));
            }
            if (hover) ring(hover.x, hover.y, 6, colour("accent"));
          }} />
        {hover && <Tip call={hover.call} x={hover.x} y={hover.y} width={size.current.width} />}
      </div>
      <p id="chart-call" class="muted small" aria-live="polite">
        {selected >= 0 && calls!.rank[selected] === rank ? `${wordAt(calls!.name, selected)} · ${t(page.statuses[calls!.status[selected]])} · ${error(calls!.error[selected])}` : t("chart_help")}
      </p>
    </section>
  );
}

function Tip({ call, x, y, width }: { call: number; x: number; y: number; width: number }) {
  const { page, calls, t } = useShared();
  const held = calls!;
  const left = x > width / 2;
  return (
    <div class="tip" style={{ top: `${Math.max(0, y - 10)}px`, ...(left ? { right: `${width - x + 14}px` } : { left: `${x + 14}px` }) }}>
      <b class="name">{wordAt(held.name, call)}</b>
      <div class="muted name">{wordAt(held.module, call)}</div>
      <div><i class="dot" style={{ background: statusColour(page.statuses[held.status[call]]) }} />{t(page.statuses[held.status[call]])} · {t("step")} {held.step[call]}</div>
      <div>{t(`col.${page.measure}`)} {error(held.error[call])}{held.limit[call] >= 0 && ` · ${t("allowed")} ${error(held.limit[call])}`}</div>
    </div>
  );
}

function drawPlot(
  context: CanvasRenderingContext2D, { width, height }: Size, plot: Plot, calls: Calls, statuses: string[], chosen: number[] | null, measure: string, t: (key: string) => string,
): void {
  const { own, scale } = plot;
  const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, height - MARGIN.bottom];
  const slot = (right - left) / own.length;
  const x = (at: number): number => left + (at + 0.5) * slot;
  const y = (value: number): number => top + (1 - scale.y(value)) * (bottom - top);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  const backward = calls.direction.words.indexOf("backward");
  context.fillStyle = colour("shade");
  for (let at = 0, start = -1; at <= own.length; at++) {
    const inside = at < own.length && calls.direction.values[own[at]] === backward;
    if (inside && start < 0) start = at;
    if (!inside && start >= 0) {
      context.fillRect(left + start * slot, top, (at - start) * slot, bottom - top);
      start = -1;
    }
  }
  context.strokeStyle = colour("line");
  context.fillStyle = colour("muted");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const level = (label: string, at: number): void => {
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(right, at);
    context.stroke();
    context.fillText(label, left - 8, at);
  };
  for (const exponent of scale.ticks.filter((each) => !plot.infinities || each < scale.top)) level(exponent === 0 ? "1" : `1e${exponent}`, y(10 ** exponent));
  if (plot.zeros) level(measure === "relative_l2" ? t("zero") : "0", bottom);
  if (plot.infinities) level(scale.top <= 2 ? ">100" : t("infinite"), top);
  context.textAlign = "left";
  context.fillText(t(`col.${measure}`), left, top - 11);
  drawSteps(context, plot, calls, { left, slot, top, bottom });
  drawBand(context, plot, left, slot, y, bottom);
  const order = statuses.map((_, status) => status);
  const many = own.length > 3000;
  for (const status of order) {
    context.fillStyle = colour(`s-${statuses[status]}`) || colour("s-unmeasured");
    const strong = status >= order.length - 2;
    const size = strong ? 4.5 : many ? 1.6 : 2.4;
    context.globalAlpha = strong ? 1 : 0.75;
    for (let at = 0; at < own.length; at++) {
      if (calls.status[own[at]] !== status || Number.isNaN(plot.error[at])) continue;
      const [px, py] = [x(at), y(plot.error[at])];
      if (strong) diamond(context, px, py, size);
      else context.fillRect(px - size, py - size, 2 * size, 2 * size);
    }
  }
  context.globalAlpha = 1;
  if (chosen) {
    context.fillStyle = colour("veil");
    context.fillRect(left, top, chosen[0] * slot, bottom - top);
    context.fillRect(left + (chosen[1] + 1) * slot, top, right - left - (chosen[1] + 1) * slot, bottom - top);
  }
}

function diamond(context: CanvasRenderingContext2D, x: number, y: number, size: number): void {
  context.beginPath();
  context.moveTo(x, y - size * 1.3);
  context.lineTo(x + size * 1.3, y);
  context.lineTo(x, y + size * 1.3);
  context.lineTo(x - size * 1.3, y);
  context.fill();
}

function drawSteps(
  context: CanvasRenderingContext2D, { own }: Plot, calls: Calls, { left, slot, top, bottom }: { left: number; slot: number; top: number; bottom: number },
): void {
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  let free = -Infinity;
  for (let at = 0; at < own.length; at++) {
    if (at && calls.step[own[at]] === calls.step[own[at - 1]]) continue;
    const x = left + at * slot;
    context.strokeStyle = colour("muted");
    context.globalAlpha = 0.5;
    context.beginPath();
    context.moveTo(x, top - 6);
    context.lineTo(x, bottom);
    context.stroke();
    context.globalAlpha = 1;
    const label = `step ${calls.step[own[at]]}`;
    if (x > free) {
      context.fillStyle = colour("muted");
      context.fillText(label, x + 4, bottom + 16);
      free = x + context.measureText(label).width + 12;
    }
  }
}

/** The area below what is allowed, call by call. */
function drawBand(context: CanvasRenderingContext2D, { limit }: Plot, left: number, slot: number, y: (value: number) => number, bottom: number): void {
  context.fillStyle = colour("band");
  context.beginPath();
  for (let at = 0; at < limit.length; at++) {
    if (!(limit[at] > 0)) continue;
    const top = y(limit[at]);
    context.rect(left + at * slot, top, slot + 0.3, bottom - top);
  }
  context.fill();
}
