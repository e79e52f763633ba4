// The calls around the selected one, as a small graph.
import { useMemo, useState } from "preact/hooks";
import { wordAt } from "./data.ts";
import { BOX, consumersOf, MOST_NODES, neighbourhood } from "./graph.ts";
import { statusColour, useShared } from "./state.tsx";

const FEW = 24;
const shorten = (name: string): string => {
  const short = name.replace(/^(Functional|Tensor|Torch|Aten|NPU|VF|Module|Distributed)\./, "").replace(/\.forward$/, "").replace(/\.backward$/, " ←");
  return short.length > 24 ? `${short.slice(0, 10)}…${short.slice(-12)}` : short;
};

export function Around() {
  const { page, calls, t, selected, select } = useShared();
  const [more, setMore] = useState(false);
  const consumers = useMemo(() => consumersOf(calls!), [calls]);
  const graph = useMemo(() => (selected < 0 ? null : neighbourhood(calls!, consumers, selected, more ? 6 : 2, more ? MOST_NODES : FEW)), [calls, consumers, selected, more]);
  if (!graph) return null;
  const places = new Map(graph.nodes.map((node) => [node.call, node]));
  if (graph.nodes.length < 2) return <div class="around"><h3>{t("neighbourhood")}</h3><p class="muted">{t("alone")}</p></div>;
  return (
    <div class="around">
      <header class="row">
        <h3>{t("neighbourhood")}</h3>
        <span class="muted small">{t("made_by")} → {t("used_by")}</span>
        <button type="button" class="ghost" aria-pressed={more} onClick={() => setMore(!more)}>{t("show_more")}</button>
      </header>
      <div class="graph">
        <svg width={graph.width + 4} height={graph.height + 4} role="group" aria-label={t("neighbourhood")}>
          <g transform="translate(2 2)">
            {graph.edges.map(({ from, to }) => {
              const [a, b] = [places.get(from)!, places.get(to)!];
              const [x1, y1, x2, y2] = [a.x + BOX.width, a.y + BOX.height / 2, b.x, b.y + BOX.height / 2];
              const bend = Math.max(20, Math.abs(x2 - x1) / 2);
              return <path key={`${from}-${to}`} class="edge" d={`M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`} />;
            })}
            {graph.nodes.map(({ call, x, y }) => {
              const name = wordAt(calls!.name, call), status = page.statuses[calls!.status[call]];
              return (
                <g key={call} class={`node ${call === selected ? "chosen" : ""}`} transform={`translate(${x} ${y})`} tabIndex={0} role="button" aria-label={`${name}: ${t(status)}`}
                  onClick={() => select(call)} onKeyDown={(event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), select(call))}>
                  <title>{`${name}\n${wordAt(calls!.module, call)}\n${t(status)}`}</title>
                  <rect width={BOX.width} height={BOX.height} rx="6" />
                  <rect class="mark" width="5" height={BOX.height} rx="2" style={{ fill: statusColour(status) }} />
                  <text x="13" y={BOX.height / 2 + 4}>{shorten(name)}</text>
                </g>
              );
            })}
          </g>
        </svg>
      </div>
      {graph.cut && <p class="small muted">{t("cut")}</p>}
    </div>
  );
}
