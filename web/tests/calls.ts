// Calls made by hand for the tests.
import type { Calls, Column } from "../src/data.ts";

export function words(id: string, texts: string[]): Column {
  const known = [...new Set(texts)];
  return { id, kind: "word", form: "", values: Int32Array.from(texts, (text) => known.indexOf(text)), words: known };
}

export function callsOf(given: { name: string; module?: string; status?: number; rank?: number; step?: number; error?: number; limit?: number; from?: number[]; rows?: number }[]): Calls {
  const column = (of: (call: (typeof given)[number], at: number) => number): Int32Array => Int32Array.from(given, of);
  const starts = (counts: number[]): Int32Array => Int32Array.from([0, ...counts].map(((sum) => (each) => (sum += each))(0)));
  return {
    count: given.length,
    step: column((call) => call.step ?? 0), rank: column((call) => call.rank ?? 0), index: column((_, at) => at), status: column((call) => call.status ?? 0),
    error: Float64Array.from(given, (call) => call.error ?? 0), limit: Float64Array.from(given, (call) => call.limit ?? NaN),
    name: words("name", given.map((call) => call.name)), candidate: words("candidate", given.map((call) => call.name)),
    module: words("module", given.map((call) => call.module ?? "")), direction: words("direction", given.map(() => "forward")), level: words("level", given.map(() => "api")),
    firstRow: starts(given.map((call) => call.rows ?? 1)),
    firstProducer: starts(given.map((call) => call.from?.length ?? 0)),
    producers: Int32Array.from(given.flatMap((call) => call.from ?? [])),
  };
}
