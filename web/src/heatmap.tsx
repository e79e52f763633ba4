// One heat map: the values of a side, or the difference.
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Picture } from "./data.ts";
import { error, value } from "./format.ts";
import { differenceColour, most, range, valueColour } from "./heat.ts";
import { useShared } from "./state.tsx";

export function HeatMap({ name, picture, planes, plane, cursor, setCursor }: {
  name: string; picture: Picture; planes: Float64Array[]; plane: number; cursor: [number, number] | null; setCursor?: (at: [number, number]) => void;
}) {
  const { t, dark } = useShared();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [low, high] = useMemo(() => range(planes.slice(0, 2)), [planes]);
  const top = useMemo(() => most(planes[2]), [planes]);
  const { rows, columns } = picture;
  useEffect(() => {
    const held = canvas.current!;
    held.width = columns;
    held.height = rows;
    const context = held.getContext("2d")!;
    const image = context.createImageData(columns, rows);
    planes[plane].forEach((each, at) => {
      const [red, green, blue] = plane === 2 ? differenceColour(each, top, dark) : valueColour(each, low, high);
      image.data.set([red, green, blue, 255], at * 4);
    });
    context.putImageData(image, 0, 0);
  }, [planes, dark]);
  const at = (event: PointerEvent): [number, number] => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const clip = (share: number, size: number): number => Math.min(size - 1, Math.max(0, Math.floor(share * size)));
    return [clip((event.clientY - box.top) / box.height, rows), clip((event.clientX - box.left) / box.width, columns)];
  };
  const key = (event: KeyboardEvent): void => {
    const moves: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [row, column] = cursor ?? [0, 0], [down, right] = moves[event.key];
    setCursor?.([Math.min(rows - 1, Math.max(0, row + down)), Math.min(columns - 1, Math.max(0, column + right))]);
  };
  const ratio = Math.min(3, Math.max(0.4, columns / rows));
  return (
    <figure class="map">
      <figcaption>{t(name)} <span class="muted">{plane === 2 ? `±${error(top)}` : `${value(low)} … ${value(high)}`}</span></figcaption>
      <div class="frame" style={{ aspectRatio: String(ratio) }}>
        <canvas ref={canvas} role="img" tabIndex={setCursor ? 0 : -1} aria-label={`${t(name)} ${rows} × ${columns}`} onPointerMove={(event) => setCursor?.(at(event))} onPointerDown={(event) => setCursor?.(at(event))} onKeyDown={key} />
        {cursor && <i class="cross" style={{ left: `${(cursor[1] / columns) * 100}%`, top: `${(cursor[0] / rows) * 100}%`, width: `${100 / columns}%`, height: `${100 / rows}%` }} />}
      </div>
    </figure>
  );
}
