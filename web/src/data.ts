// The data of the page, as src/tensorprobe/report/page/data.py writes it. NaN and infinities are strings in JSON.
import { decodeIntegers, decodeNumbers, inflate, unpackWords, type Numbers } from "./packing.ts";

export type Tone = "bad" | "warn" | "good" | "quiet";
export type Real = number | string;
export type Frame = [file: string, line: number, func: string, code: string];

export interface AxisPart {
  axis: number; name: string; size: number; extent: string; first: number; last: number; count: number; period: number; listed: number[];
}
export interface Pattern {
  count: number; axes: AxisPart[]; elements: number[][]; others: Real; effect: string; value: Real; axis: number; axis_name: string; by: number[];
}
export interface Histogram { edges: Real[]; counts: Record<string, number[]>; sampled: number }
export interface Profile { axis: number; name: string; size: number; width: number; greatest: Real[]; different: number[] }
export interface Worst { index: number[]; baseline: Real; candidate: Real; difference: Real; ulp: Real }
export interface Picture {
  title: string; rows: number; columns: number; row_axes: number[]; row_block: number; column_block: number;
  height: number; width: number; planes: string[]; fixed: number[];
}
export interface TensorDiff {
  call: string; slot: string; dtypes: [string, string]; shapes: [number[], number[]];
  summaries: [Real[] | null, Real[] | null]; figures: Record<string, Real>; pattern: Pattern | null;
  profiles: Profile[]; worst: Worst[]; values: Histogram | null; differences: Histogram | null; ulps: Histogram | null;
  pictures: Picture[]; problem: string;
}
export interface Evidence {
  step: number; rank: number; index: number; call: string; candidate_call: string; module: string;
  source: { file: string; line: number; function: string; first: number; text: string[] } | null;
  stacks: [Frame[], Frame[]]; arguments: [string, string]; tensors: TensorDiff[];
}
export interface First {
  step: number; rank: number; index: number; call: string; candidate_call: string; module: string; status: string;
  slot: string; dtype: string; shape: string; place: string; figure: string; measured: Real; allowed: Real;
  max_abs: Real; relative_l2: Real; nonfinite: number; inputs: string; input_error: Real; proof: [Real, Real] | null; wrong: string[]; unproved: string;
  pattern: Pattern | null; pattern_words: string; message: string; source: Frame | null;
}
export interface PackedColumn { id: string; kind: "number" | "integer" | "word"; packed: string; width: number; words: string; form: string }
export interface PackedTable { count: number; total: number; columns: PackedColumn[] }
export interface Item {
  kind: string; call: string; module: string; step: number; rank: number; detail: string; suggestion: string; source: Frame | null;
}
export interface Page {
  kind: "compare" | "precheck" | "audit" | "online" | "overflow" | "run";
  tool: string; title: string; server: boolean;
  verdict: { tone: Tone; headline: string; sentence: string; lines: string[] };
  first: First | null; counts: Record<string, number>; total_calls: number; statuses: string[]; tones: Tone[];
  sides: { role: string; path: string; facts: string[]; coverage: string }[];
  commands: { key: string; text: string }[];
  notes: string[]; before: string[]; differing: string[]; structure: string[]; items: Item[]; items_total: number;
  evidence: Evidence[]; pattern_words: string[][];
  matrix: { ranks: number[]; steps: number[]; cells: PackedColumn } | null;
  measure: string; calls: PackedTable | null; producers: PackedColumn | null; rows: PackedTable | null;
  selected: number; left_out: string; source: boolean;
}

export const real = (value: Real): number => (typeof value === "number" ? value : Number(value));

export interface Column {
  id: string; kind: "number" | "integer" | "word"; form: string; values: Numbers; words: string[];
}

/** Unpack a column. Rows without a value would vanish from the page silently, so what is not whole is an error. */
export async function unpack(column: PackedColumn, count?: number): Promise<Column> {
  const bytes = await inflate(column.packed);
  const values = column.kind === "number" ? decodeNumbers(bytes) : decodeIntegers(bytes, column.width);
  const words = column.words ? await unpackWords(column.words) : [];
  if (count !== undefined && values.length !== count) throw new Error(`column ${column.id}: ${values.length} of ${count} values`);
  if (column.kind === "word" && !values.every((code) => code >= 0 && code < words.length)) throw new Error(`column ${column.id}: unknown words`);
  return { id: column.id, kind: column.kind, form: column.form, values, words };
}

/** A table whose columns are unpacked when they are first asked for. */
export class Table {
  readonly count: number;
  readonly total: number;
  readonly ids: string[];
  private readonly packed: Map<string, PackedColumn>;
  private readonly asked = new Map<string, Promise<Column>>();
  private readonly ready = new Map<string, Column>();

  constructor(table: PackedTable) {
    this.count = table.count;
    this.total = table.total;
    this.ids = table.columns.map((column) => column.id);
    this.packed = new Map(table.columns.map((column) => [column.id, column]));
  }

  has(id: string): boolean {
    return this.packed.has(id);
  }

  kind(id: string): PackedColumn {
    return this.packed.get(id)!;
  }

  get(id: string): Promise<Column> {
    let column = this.asked.get(id);
    if (column === undefined) {
      column = unpack(this.packed.get(id)!, this.count).then((read) => (this.ready.set(id, read), read));
      this.asked.set(id, column);
    }
    return column;
  }

  /** A column that is unpacked already. */
  held(id: string): Column | undefined {
    return this.ready.get(id);
  }
}

/** The calls, unpacked: a column each, all of one length. */
export interface Calls {
  count: number;
  step: Numbers; rank: Numbers; index: Numbers; status: Numbers; error: Float64Array; limit: Float64Array;
  name: Column; candidate: Column; module: Column; direction: Column; level: Column;
  firstRow: Int32Array; // where the rows of each call start, and one more for the end
  firstProducer: Int32Array;
  producers: Numbers;
}

function starts(counts: Numbers): Int32Array {
  const at = new Int32Array(counts.length + 1);
  for (let call = 0; call < counts.length; call++) at[call + 1] = at[call] + counts[call];
  return at;
}

export async function unpackCalls(packed: PackedTable, producers: PackedColumn | null): Promise<Calls> {
  const columns = new Map((await Promise.all(packed.columns.map((column) => unpack(column, packed.count)))).map((column) => [column.id, column]));
  const get = (id: string): Column => columns.get(id)!;
  return {
    count: packed.count,
    step: get("step").values, rank: get("rank").values, index: get("index").values, status: get("status").values,
    error: get("error").values as Float64Array, limit: get("limit").values as Float64Array,
    name: get("name"), candidate: get("candidate"), module: get("module"), direction: get("direction"), level: get("level"),
    firstRow: starts(get("rows").values),
    firstProducer: starts(get("producers").values),
    producers: producers ? (await unpack(producers)).values : new Int32Array(0),
  };
}

export const wordAt = (column: Column, at: number): string => column.words[column.values[at]] ?? "";
