// A canvas that fills its element, sharp on any display, and is drawn again when its size or the theme changes.
import { useEffect, useRef, useState } from "preact/hooks";
import type { CanvasHTMLAttributes } from "preact";

export interface Size { width: number; height: number }

export function Canvas({ height, draw, deps, ...rest }: {
  height: number; draw: (context: CanvasRenderingContext2D, size: Size) => void; deps: unknown[];
} & Omit<CanvasHTMLAttributes<HTMLCanvasElement>, "height">) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const parent = canvas.current!.parentElement!;
    const observer = new ResizeObserver(() => setWidth(parent.clientWidth));
    observer.observe(parent);
    setWidth(parent.clientWidth);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const held = canvas.current!;
    const ratio = window.devicePixelRatio || 1;
    held.width = Math.round(width * ratio);
    held.height = Math.round(height * ratio);
    held.style.width = `${width}px`;
    held.style.height = `${height}px`;
    const context = held.getContext("2d");
    if (context === null || width === 0) return;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(context, { width, height });
  }, [width, height, ...deps]);
  return <canvas ref={canvas} {...rest} />;
}
