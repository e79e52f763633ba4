// Which rows are shown, and in which order. Works on numbers; texts are looked at once for each distinct word.
import type { Calls, Column } from "./data.ts";
import type { Numbers } from "./packing.ts";

export interface Query {
  text: string;
  regex: boolean;
  statuses: number[]; // empty: all
  nonfinite: boolean;
  outputs: boolean;
  module: string; // a module and what is in it; empty: all
  rank: number; // -1: all
  step: number;
  range: [number, number] | null; // calls, both included
  sort: string; // a column; empty: execution order
  descending: boolean;
}

export const EVERYTHING: Query = {
  text: "", regex: false, statuses: [], nonfinite: false, outputs: false, module: "", rank: -1, step: -1, range: null, sort: "", descending: true,
};

/** A test for a text: what is typed, in any case, or a regular expression. Null when that is not valid. */
export function matcher(query: Pick<Query, "text" | "regex">): ((text: string) => boolean) | null {
  if (!query.text) return () => true;
  if (!query.regex) {
    const parts = query.text.toLowerCase().split(/\s+/).filter(Boolean);
    return (text) => {
      const lower = text.toLowerCase();
      return parts.every((part) => lower.includes(part));
    };
  }
  try {
    const expression = new RegExp(query.text, "i");
    return (text) => expression.test(text);
  } catch {
    return null;
  }
}

export const isInside = (module: string, wanted: string): boolean =>
  wanted === "" || module === wanted || module.startsWith(`${wanted}.`);

/** The calls that fit everything but the text: one flag each. */
export function fittingCalls(calls: Calls, query: Query): Uint8Array {
  const fits = new Uint8Array(calls.count);
  const [first, last] = query.range ?? [0, calls.count - 1];
  const wanted = new Set(query.statuses);
  const inside = calls.module.words.map((word) => isInside(word, query.module));
  for (let call = Math.max(first, 0); call <= Math.min(last, calls.count - 1); call++)
    fits[call] =
      (wanted.size === 0 || wanted.has(calls.status[call])) &&
      inside[calls.module.values[call]] &&
      (query.rank < 0 || calls.rank[call] === query.rank) &&
      (query.step < 0 || calls.step[call] === query.step)
        ? 1
        : 0;
  return fits;
}

/** The rows that fit, in execution order. `texts` are the columns of rows that the text is looked for in. */
export function filterRows(
  calls: Calls, query: Query, columns: { texts: Column[]; side?: Column; nonfinite?: Column },
): Int32Array | null {
  const test = matcher(query);
  if (test === null) return null;
  const fits = fittingCalls(calls, query);
  const parts = query.regex || !query.text ? [query.text] : query.text.split(/\s+/).filter(Boolean);
  const tests = parts.map((text) => matcher({ text, regex: query.regex })!);
  const ofCalls = [calls.name, calls.module];
  const hits = tests.map((each) => ({
    calls: ofCalls.map((column) => column.words.map(each)),
    rows: columns.texts.map((column) => column.words.map(each)),
  }));
  const outputs = columns.side?.words.map((word) => word !== "input");
  const total = calls.firstRow[calls.count];
  const found = new Int32Array(total);
  let count = 0;
  for (let call = 0; call < calls.count; call++) {
    if (!fits[call]) continue;
    const left = query.text ? hits.filter((hit) => !hit.calls.some((words, at) => words[ofCalls[at].values[call]])) : [];
    for (let row = calls.firstRow[call]; row < calls.firstRow[call + 1]; row++) {
      if (query.outputs && outputs && columns.side && !outputs[columns.side.values[row]]) continue;
      if (query.nonfinite && columns.nonfinite && !(columns.nonfinite.values[row] > 0)) continue;
      if (left.length && !left.every((hit) => hit.rows.some((words, at) => words[columns.texts[at].values[row]]))) continue;
      found[count++] = row;
    }
  }
  return found.subarray(0, count);
}

/** Sort rows by a value of each; NaN comes last, equal ones keep their order. */
export function sortRows(rows: Int32Array, valueOf: (row: number) => number, descending: boolean): Int32Array {
  const keys = new Float64Array(rows.length);
  for (let at = 0; at < rows.length; at++) {
    const value = valueOf(rows[at]);
    keys[at] = Number.isNaN(value) ? Infinity : descending ? -value : value;
    if (Number.isNaN(value)) keys[at] = NaN;
  }
  const order = Int32Array.from(rows.keys());
  order.sort((a, b) => {
    const one = keys[a], other = keys[b];
    if (one === other || (Number.isNaN(one) && Number.isNaN(other))) return a - b;
    if (Number.isNaN(one)) return 1;
    if (Number.isNaN(other)) return -1;
    return one - other;
  });
  return order.map((at) => rows[at]);
}

/** What a column is sorted by: its numbers, or the alphabetical place of its words. */
export function sortKey(column: { kind: string; values: Numbers; words: string[] }): (row: number) => number {
  if (column.kind !== "word") return (row) => column.values[row];
  const places = new Int32Array(column.words.length);
  [...column.words.keys()]
    .sort((a, b) => (column.words[a] < column.words[b] ? -1 : column.words[a] > column.words[b] ? 1 : 0))
    .forEach((word, place) => (places[word] = place));
  return (row) => places[column.values[row]];
}

/** The call of a row: the last one that starts at or before it. */
export function callOfRow(firstRow: Int32Array, row: number): number {
  let low = 0, high = firstRow.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (firstRow[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}
