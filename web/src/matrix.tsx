// Ranks and steps: where each rank first went wrong. A thousand ranks fit: neighbours share a cell, which shows the worst.
import { useEffect, useState } from "preact/hooks";
import { Canvas } from "./canvas.tsx";
import { unpack } from "./data.ts";
import { colour, useShared } from "./state.tsx";

const MOST_HEIGHT = 320;
const LABELS = 56;

export function Matrix() {
  const { page, t, dark, query, setQuery, setRank } = useShared();
  const matrix = page.matrix;
  const [cells, setCells] = useState<ArrayLike<number> | null>(null);
  const [hover, setHover] = useState<[number, number] | null>(null);
  useEffect(() => {
    if (matrix) void unpack(matrix.cells).then((column) => setCells(column.values));
  }, [matrix]);
  if (!matrix || !cells || (matrix.ranks.length < 2 && matrix.steps.length < 9)) return null;
  const { ranks, steps } = matrix;
  const cell = Math.max(1, Math.min(22, Math.floor(MOST_HEIGHT / ranks.length)));
  const height = Math.min(MOST_HEIGHT, cell * ranks.length) + 22;
  const grid = (width: number): { rows: number; columns: number; w: number; h: number; down: number; across: number } => {
    const down = Math.ceil(ranks.length / Math.min(ranks.length, height - 22));
    const room = width - LABELS;
    const across = Math.ceil(steps.length / Math.max(1, Math.min(steps.length, room)));
    const [rows, columns] = [Math.ceil(ranks.length / down), Math.ceil(steps.length / across)];
    return { rows, columns, down, across, h: (height - 22) / rows, w: Math.min(40, room / columns) };
  };
  const worst = (row: number, column: number, { down, across }: { down: number; across: number }): number => {
    let found = -1;
    for (let rank = row * down; rank < Math.min((row + 1) * down, ranks.length); rank++)
      for (let step = column * across; step < Math.min((column + 1) * across, steps.length); step++)
        found = Math.max(found, cells[rank * steps.length + step]);
    return found;
  };
  const at = (event: PointerEvent | MouseEvent): [number, number] | null => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const held = grid(box.width);
    const [column, row] = [Math.floor((event.clientX - box.left - LABELS) / held.w), Math.floor((event.clientY - box.top) / held.h)];
    if (column < 0 || column >= held.columns || row < 0 || row >= held.rows) return null;
    return [Math.min(row * held.down, ranks.length - 1), Math.min(column * held.across, steps.length - 1)];
  };
  const click = (event: MouseEvent): void => {
    const found = at(event);
    if (!found) return;
    const [rank, step] = [ranks[found[0]], steps[found[1]]];
    setRank(rank);
    setQuery(query.rank === rank && query.step === step ? { rank: -1, step: -1 } : { rank, step, range: null });
  };
  const bad = ranks.filter((_, row) => steps.some((_, column) => page.tones[cells[row * steps.length + column]] === "bad"));
  const label = `${ranks.length} × ${steps.length}. ${bad.length ? `${t("introduced")}: ${t("rank")} ${bad.slice(0, 12).join(", ")}${bad.length > 12 ? " …" : ""}` : t("agrees")}`;
  return (
    <section aria-labelledby="matrix">
      <header class="row">
        <h2 id="matrix">{t("matrix")}</h2>
        <span class="muted small">{hover ? `${t("rank")} ${ranks[hover[0]]}, ${t("step")} ${steps[hover[1]]}: ${t(page.statuses[cells[hover[0] * steps.length + hover[1]]] ?? "unmeasured")}` : t("matrix_help")}</span>
        {(query.rank >= 0 || query.step >= 0) && <button type="button" class="ghost" onClick={() => setQuery({ rank: -1, step: -1 })}>{t("rank")} {query.rank}, {t("step")} {query.step} · {t("clear")}</button>}
      </header>
      <div class="matrix">
        <Canvas height={height} role="img" aria-label={label} deps={[cells, dark, query.rank, query.step]}
          onPointerMove={(event: PointerEvent) => setHover(at(event))} onPointerLeave={() => setHover(null)} onClick={click}
          draw={(context, { width }) => {
            const held = grid(width);
            context.clearRect(0, 0, width, height);
            context.font = "11px system-ui, sans-serif";
            context.textBaseline = "middle";
            const gap = held.h > 6 && held.w > 6 ? 1 : 0;
            for (let row = 0; row < held.rows; row++)
              for (let column = 0; column < held.columns; column++) {
                const status = worst(row, column, held);
                if (status < 0) continue;
                context.fillStyle = colour(`s-${page.statuses[status]}`) || colour("s-unmeasured");
                context.globalAlpha = page.tones[status] === "good" ? 0.45 : 1;
                context.fillRect(LABELS + column * held.w, row * held.h, Math.max(1, held.w - gap), Math.max(1, held.h - gap));
              }
            context.globalAlpha = 1;
            context.fillStyle = colour("muted");
            context.textAlign = "right";
            const every = Math.max(1, Math.ceil(12 / held.h));
            for (let row = 0; row < held.rows; row += every) context.fillText(`${t("rank")} ${ranks[row * held.down]}`, LABELS - 6, row * held.h + Math.max(6, held.h / 2));
            context.textAlign = "left";
            const skip = Math.max(1, Math.ceil(34 / held.w));
            for (let column = 0; column < held.columns; column += skip) context.fillText(String(steps[column * held.across]), LABELS + column * held.w, height - 8);
          }} />
      </div>
    </section>
  );
}
