// The calls around one call: who made its inputs, who used its outputs. Layers are steps away from it.
import type { Calls } from "./data.ts";

export const MOST_NODES = 150;

export interface Node { call: number; layer: number; x: number; y: number }
export interface Edge { from: number; to: number }
export interface Graph { nodes: Node[]; edges: Edge[]; width: number; height: number; cut: boolean }

export const BOX = { width: 176, height: 30, gapX: 44, gapY: 10 };

/** For each call those that use its results, as starts and a flat list. */
export function consumersOf(calls: Calls): { first: Int32Array; list: Int32Array } {
  const first = new Int32Array(calls.count + 1);
  for (let at = 0; at < calls.producers.length; at++) first[calls.producers[at] + 1]++;
  for (let call = 0; call < calls.count; call++) first[call + 1] += first[call];
  const next = first.slice();
  const list = new Int32Array(calls.producers.length);
  for (let call = 0; call < calls.count; call++)
    for (let at = calls.firstProducer[call]; at < calls.firstProducer[call + 1]; at++) list[next[calls.producers[at]]++] = call;
  return { first, list };
}

/** At most `most` calls around `center`, up to `depth` steps away; those with the worst status come first. */
export function neighbourhood(
  calls: Calls, consumers: { first: Int32Array; list: Int32Array }, center: number, depth: number, most: number,
): Graph {
  const layers = new Map<number, number>([[center, 0]]);
  let cut = false;
  const grow = (direction: -1 | 1, reach: (call: number) => ArrayLike<number>): void => {
    let edge = [center];
    for (let away = 1; away <= depth && edge.length; away++) {
      const found = new Set<number>();
      for (const call of edge) for (const other of Array.from(reach(call))) if (!layers.has(other)) found.add(other);
      const ordered = [...found].sort((a, b) => calls.status[b] - calls.status[a] || a - b);
      edge = ordered.slice(0, Math.max(0, most - layers.size));
      cut ||= edge.length < ordered.length;
      for (const call of edge) layers.set(call, direction * away);
    }
  };
  grow(-1, (call) => calls.producers.slice(calls.firstProducer[call], calls.firstProducer[call + 1]));
  grow(1, (call) => consumers.list.slice(consumers.first[call], consumers.first[call + 1]));
  const edges: Edge[] = [];
  for (const call of layers.keys())
    for (let at = calls.firstProducer[call]; at < calls.firstProducer[call + 1]; at++)
      if (layers.has(calls.producers[at])) edges.push({ from: calls.producers[at], to: call });
  return { ...place(layers, edges), edges, cut };
}

/** Put the calls of each layer under each other, near the calls that they are connected with. */
function place(layers: Map<number, number>, edges: Edge[]): { nodes: Node[]; width: number; height: number } {
  const columns = new Map<number, number[]>();
  for (const [call, layer] of layers) columns.set(layer, [...(columns.get(layer) ?? []), call]);
  const order = [...columns.keys()].sort((a, b) => a - b);
  const row = new Map<number, number>();
  for (const layer of order) columns.get(layer)!.sort((a, b) => a - b).forEach((call, at) => row.set(call, at));
  for (let pass = 0; pass < 4; pass++)
    for (const layer of pass % 2 ? [...order].reverse() : order) {
      const middle = new Map<number, number>();
      for (const call of columns.get(layer)!) {
        const near = edges.filter((edge) => edge.from === call || edge.to === call).map((edge) => row.get(edge.from === call ? edge.to : edge.from)!);
        middle.set(call, near.length ? near.reduce((sum, at) => sum + at, 0) / near.length : row.get(call)!);
      }
      columns.get(layer)!.sort((a, b) => middle.get(a)! - middle.get(b)! || a - b).forEach((call, at) => row.set(call, at));
    }
  const tallest = Math.max(...[...columns.values()].map((held) => held.length));
  const nodes = order.flatMap((layer, column) => {
    const held = columns.get(layer)!;
    const top = ((tallest - held.length) * (BOX.height + BOX.gapY)) / 2;
    return held.map((call, at) => ({ call, layer, x: column * (BOX.width + BOX.gapX), y: top + at * (BOX.height + BOX.gapY) }));
  });
  return {
    nodes,
    width: order.length * (BOX.width + BOX.gapX) - BOX.gapX,
    height: tallest * (BOX.height + BOX.gapY) - BOX.gapY,
  };
}
