// Where the rows of the table come from: the file itself, or the server that `tensorprobe view` started.
import { Table, wordAt, type Calls, type Column, type PackedColumn, type PackedTable } from "./data.ts";
import { callOfRow, filterRows, sortKey, sortRows, type Query } from "./filter.ts";

export interface ColumnKind { id: string; kind: "number" | "integer" | "word"; form: string }
export interface Row {
  key: number; // its number in the table
  place: [step: number, rank: number, index: number];
  status: number;
  cells: Record<string, string | number>;
}
export interface Found {
  count: number;
  page: (from: number, to: number, columns: string[]) => Promise<Row[]>;
  /** The same at once; null where it has to be waited for. */
  now: (from: number, to: number, columns: string[]) => Row[] | null;
  positionOf: (place: Row["place"], slot: string) => Promise<number>; // of a tensor of a call, or of its first; -1 if it is not among these
}
export interface RowSource {
  total: number;
  columns: ColumnKind[];
  /** The rows that fit; null when the expression is not valid. */
  find: (query: Query) => Promise<Found | null>;
}

const OF_CALLS: ColumnKind[] = [
  { id: "call", kind: "word", form: "" }, { id: "candidate", kind: "word", form: "" }, { id: "module", kind: "word", form: "" },
  { id: "step", kind: "integer", form: "" }, { id: "rank", kind: "integer", form: "" }, { id: "index", kind: "integer", form: "" },
  { id: "status", kind: "word", form: "" }, { id: "direction", kind: "word", form: "" }, { id: "level", kind: "word", form: "" },
];
const RATIO: ColumnKind = { id: "ratio", kind: "number", form: "ratio2" };
const TEXTS = ["slot", "dtype", "shape", "judged_by", "message"];

function kinds(columns: Pick<PackedColumn, "id" | "kind" | "form">[]): ColumnKind[] {
  const own = columns.map(({ id, kind, form }) => ({ id, kind, form }));
  const has = (id: string): boolean => own.some((column) => column.id === id);
  return [...OF_CALLS, ...own, ...(has("measured") && has("allowed") ? [RATIO] : [])];
}

/** Rows that are in the page. */
export function localRows(packed: PackedTable, calls: Calls, statuses: string[]): RowSource {
  const table = new Table(packed);
  const ofCall: Record<string, (call: number) => string | number> = {
    call: (call) => wordAt(calls.name, call), candidate: (call) => wordAt(calls.candidate, call), module: (call) => wordAt(calls.module, call),
    step: (call) => calls.step[call], rank: (call) => calls.rank[call], index: (call) => calls.index[call],
    status: (call) => statuses[calls.status[call]], direction: (call) => wordAt(calls.direction, call), level: (call) => wordAt(calls.level, call),
  };
  const callColumns: Record<string, { kind: string; values: Column["values"]; words: string[] }> = {
    call: calls.name, candidate: calls.candidate, module: calls.module, direction: calls.direction, level: calls.level,
    step: { kind: "integer", values: calls.step, words: [] }, rank: { kind: "integer", values: calls.rank, words: [] },
    index: { kind: "integer", values: calls.index, words: [] }, status: { kind: "integer", values: calls.status, words: [] },
  };
  async function keyOf(id: string): Promise<(row: number) => number> {
    if (id in callColumns) {
      const key = sortKey(callColumns[id]);
      const owner = new Int32Array(table.count);
      for (let call = 0; call < calls.count; call++) owner.fill(call, calls.firstRow[call], calls.firstRow[call + 1]);
      return (row) => key(owner[row]);
    }
    if (id === "ratio") {
      const [measured, allowed] = await Promise.all([table.get("measured"), table.get("allowed")]);
      return (row) => measured.values[row] / allowed.values[row];
    }
    return sortKey(await table.get(id));
  }
  const needed = (ids: string[]): string[] => [...new Set(["slot", "verdict", ...ids, ...(ids.includes("ratio") ? ["measured", "allowed"] : [])])].filter((id) => table.has(id));
  function read(numbers: Int32Array, columns: Column[], ids: string[]): Row[] {
    const mine = ids.filter((id) => id in ofCall);
    return Array.from(numbers, (row) => {
      const call = callOfRow(calls.firstRow, row);
      const cells: Row["cells"] = {};
      for (const id of mine) cells[id] = ofCall[id](call);
      for (const column of columns) cells[column.id] = column.kind === "word" ? wordAt(column, row) : column.values[row];
      if ("measured" in cells && "allowed" in cells) cells.ratio = Number(cells.measured) / Number(cells.allowed);
      return { key: row, place: [calls.step[call], calls.rank[call], calls.index[call]], status: calls.status[call], cells };
    });
  }
  return {
    total: packed.total,
    columns: kinds(packed.columns),
    async find(query) {
      const texts = await Promise.all(TEXTS.filter((id) => query.text && table.has(id)).map((id) => table.get(id)));
      const side = table.has("side") ? await table.get("side") : undefined;
      const nonfinite = query.nonfinite && table.has("nonfinite_different") ? await table.get("nonfinite_different") : undefined;
      let found = filterRows(calls, query, { texts, side, nonfinite });
      if (found === null) return null;
      if (query.sort) found = sortRows(found, await keyOf(query.sort), query.descending);
      const rows = found;
      return {
        count: rows.length,
        page: async (from, to, ids) => read(rows.slice(from, to), await Promise.all(needed(ids).map((id) => table.get(id))), ids),
        now(from, to, ids) {
          const columns = needed(ids).map((id) => table.held(id));
          return columns.every((column) => column !== undefined) ? read(rows.slice(from, to), columns, ids) : null;
        },
        async positionOf([step, rank, index], slot) {
          const call = findCall(calls, step, rank, index);
          if (call < 0) return -1;
          const slots = await table.get("slot");
          const [first, last] = [calls.firstRow[call], calls.firstRow[call + 1]];
          let wanted = first;
          for (let row = last - 1; row >= first; row--) if (wordAt(slots, row) === (slot || "output.0")) wanted = row;
          const at = rows.indexOf(wanted);
          return at >= 0 ? at : rows.findIndex((row) => row >= first && row < last);
        },
      };
    },
  };
}

/** Rows that the server reads from the table of the result. */
export function remoteRows(total: number, columns: ColumnKind[], calls: () => Calls | null): RowSource {
  return {
    total,
    columns,
    async find(query) {
      const held = calls();
      const place = (call: number): [number, number] => [held!.step[call], held!.index[call]];
      const asked = JSON.stringify({ ...query, range: query.range && held ? query.range.map(place) : null });
      const answer = await ask<{ count: number; valid: boolean }>("rows", { query: asked, from: 0, to: 0 });
      if (!answer.valid) return null;
      return {
        count: answer.count,
        page: async (from, to, ids) => (await ask<{ rows: Row[] }>("rows", { query: asked, from, to, columns: ids.join() })).rows,
        now: () => null,
        positionOf: async (place, slot) => (await ask<{ position: number }>("position", { query: asked, place: place.join(), slot })).position,
      };
    },
  };
}

export function findCall(calls: Calls, step: number, rank: number, index: number): number {
  for (let call = 0; call < calls.count; call++) if (calls.index[call] === index && calls.step[call] === step && calls.rank[call] === rank) return call;
  return -1;
}

export async function ask<T>(what: string, given: Record<string, string | number>): Promise<T> {
  const words = new URLSearchParams(Object.entries(given).map(([key, value]) => [key, String(value)]));
  const answer = await fetch(`api/${what}?${words}`);
  if (!answer.ok) throw new Error(await answer.text());
  // Python writes NaN and infinities as strings; cells of numbers are turned back where they are shown.
  return (await answer.json()) as T;
}
