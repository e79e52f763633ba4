import assert from "node:assert/strict";
import { test } from "node:test";
import { count, error, times, value } from "../src/format.ts";
import { callOfRow, EVERYTHING, filterRows, matcher, sortKey, sortRows } from "../src/filter.ts";
import { consumersOf, MOST_NODES, neighbourhood } from "../src/graph.ts";
import { cellRange, differenceColour, unfold, valueColour } from "../src/heat.ts";
import { logScale, nearest } from "../src/scale.ts";
import { moduleTree, worstPath } from "../src/tree.ts";
import { missingWords, patternZh, say } from "../src/words.ts";
import { callsOf, words } from "./calls.ts";

const CALLS = callsOf([
  { name: "Functional.linear.0.forward", module: "layers.0.linear", rows: 2 },
  { name: "Functional.softmax.0.forward", module: "layers.0", status: 5, error: 0.05, limit: 1e-6, from: [0], rows: 2 },
  { name: "Tensor.add.0.forward", module: "layers.1", status: 3, error: 0.04, limit: 1, from: [1], rows: 1 },
  { name: "Functional.linear.1.forward", module: "layers.10", rank: 1, step: 1, status: 3, from: [2, 1], rows: 3 },
]);
const SLOTS = words("slot", ["input.0", "output.0", "input.0", "output.0", "output.0", "input.0", "input.1", "output.0"]);
const SIDE = words("side", ["input", "output", "input", "output", "output", "input", "input", "output"]);
const rows = (change: object): number[] | null => {
  const found = filterRows(CALLS, { ...EVERYTHING, ...change }, { texts: [SLOTS], side: SIDE });
  return found && [...found];
};

test("rows are filtered by text, in names, modules and slots, all words together", () => {
  assert.deepEqual(rows({}), [0, 1, 2, 3, 4, 5, 6, 7]);
  assert.deepEqual(rows({ text: "softmax" }), [2, 3]);
  assert.deepEqual(rows({ text: "LAYERS.0 output" }), [1, 3]);
  assert.deepEqual(rows({ text: "input.1" }), [6]);
  assert.deepEqual(rows({ text: "nothing" }), []);
});

test("a regular expression filters, and one that is not valid is refused", () => {
  assert.deepEqual(rows({ text: "linear\\.[01]\\.", regex: true }), [0, 1, 5, 6, 7]);
  assert.equal(rows({ text: "(", regex: true }), null);
  assert.equal(matcher({ text: "(", regex: false })!("f(x)"), true);
});

test("statuses, outputs, modules, ranks, steps and a range of calls filter", () => {
  assert.deepEqual(rows({ statuses: [5] }), [2, 3]);
  assert.deepEqual(rows({ statuses: [5, 3], outputs: true }), [3, 4, 7]);
  assert.deepEqual(rows({ module: "layers.1" }), [4]); // and not layers.10
  assert.deepEqual(rows({ rank: 1 }), [5, 6, 7]);
  assert.deepEqual(rows({ step: 0, range: [1, 3] }), [2, 3, 4]);
});

test("rows are sorted by numbers and by words; NaN comes last, equal ones keep their order", () => {
  const values = [3, NaN, 1, 3, -Infinity];
  const all = Int32Array.from([0, 1, 2, 3, 4]);
  assert.deepEqual([...sortRows(all, (row) => values[row], true)], [0, 3, 2, 4, 1]);
  assert.deepEqual([...sortRows(all, (row) => values[row], false)], [4, 2, 0, 3, 1]);
  const key = sortKey(words("x", ["b", "a", "c"]));
  assert.deepEqual([key(0), key(1), key(2)], [1, 0, 2]);
});

test("the call of a row is found", () => {
  assert.deepEqual([0, 1, 2, 3, 4, 5, 7].map((row) => callOfRow(CALLS.firstRow, row)), [0, 0, 1, 1, 2, 3, 3]);
});

test("modules form a tree with the worst of what is in them", () => {
  const tree = moduleTree(CALLS, new Uint8Array(4).fill(1));
  assert.deepEqual([tree.calls, tree.worst], [4, 5]);
  const layers = tree.children[0];
  assert.deepEqual(layers.children.map((child) => [child.path, child.calls, child.worst]), [["layers.0", 2, 5], ["layers.1", 1, 3], ["layers.10", 1, 3]]);
  assert.equal(Math.round(layers.ratio), 50000);
  assert.deepEqual([...worstPath(tree)], ["", "layers", "layers.0"]);
  const part = moduleTree(CALLS, Uint8Array.from([0, 0, 1, 0]));
  assert.deepEqual(part.children[0].children.map((child) => child.name), ["1"]);
});

test("the calls around one are in layers, from those that made its inputs to those that used its results", () => {
  const graph = neighbourhood(CALLS, consumersOf(CALLS), 1, 2, MOST_NODES);
  const layer = new Map(graph.nodes.map((node) => [node.call, node.layer]));
  assert.deepEqual([layer.get(0), layer.get(1), layer.get(2), layer.get(3)], [-1, 0, 1, 1]);
  assert.equal(graph.edges.length, 4);
  assert.equal(graph.cut, false);
  const x = new Map(graph.nodes.map((node) => [node.call, node.x]));
  assert.ok(x.get(0)! < x.get(1)! && x.get(1)! < x.get(2)!);
});

test("a graph never has more calls than allowed, and keeps the worst", () => {
  const fan = callsOf([{ name: "a.0.forward" }, ...Array.from({ length: 400 }, (_, at) => ({ name: `b.${at}.forward`, status: at === 399 ? 5 : 0, from: [0] }))]);
  const graph = neighbourhood(fan, consumersOf(fan), 0, 3, MOST_NODES);
  assert.equal(graph.nodes.length, MOST_NODES);
  assert.equal(graph.cut, true);
  assert.ok(graph.nodes.some((node) => node.call === 400));
});

test("a logarithmic axis has a place for zero and for what is beyond", () => {
  const scale = logScale([Float64Array.from([1e-8, 1e-2, 0, Infinity, NaN])], true, true);
  assert.deepEqual([scale.y(0), scale.y(Infinity), scale.y(NaN)], [0, 1, NaN]);
  assert.ok(scale.y(1e-8) > 0 && scale.y(1e-8) < scale.y(1e-5) && scale.y(1e-2) < 1);
  assert.equal(logScale([Float64Array.from([1, 1e9])], false, true, 100).y(1e9), 1);
  assert.deepEqual(logScale([new Float64Array(0)], false, false).ticks.length > 0, true);
});

test("the nearest of sorted numbers is found", () => {
  assert.deepEqual([-5, 1, 4, 7, 99].map((wanted) => nearest([0, 3, 8], wanted)), [0, 0, 1, 2, 2]);
});

test("numbers are written as Python writes them", () => {
  assert.deepEqual([error(0.078433), error(0), error(NaN), error(Infinity), error(-1e-17), error(1e120)], ["7.84e-02", "0", "–", "inf", "-1.00e-17", "1.00e+120"]);
  assert.deepEqual([value(0.25), value(1e-9), value(NaN), value(-Infinity), value(123456789)], ["0.25", "1e-9", "NaN", "-inf", "1.235e+8"]);
  assert.deepEqual([count(1234567), times(20420), times(2.345), times(Infinity)], ["1,234,567", "20,000×", "2.3×", ""]);
});

test("colours show the sign and what is not finite", () => {
  const [red] = differenceColour(1, 1, false), [blue, , third] = differenceColour(-1, 1, false);
  assert.ok(red > 150 && third > blue);
  assert.notDeepEqual(differenceColour(1e-6, 1, false), differenceColour(0, 1, false));
  assert.deepEqual(valueColour(NaN, 0, 1), differenceColour(Infinity, 1, true));
});

test("a cell knows the elements it stands for", () => {
  assert.deepEqual(cellRange(3, 4, 14), [12, 13]);
  assert.deepEqual(unfold(7, [2, 4]), [1, 3]);
});

test("every label has a Chinese word, and an unknown one is shown as it is", () => {
  assert.deepEqual(missingWords(), []);
  assert.equal(say("zh")("introduced"), "引入误差");
  assert.equal(say("en")("col.some_new_figure"), "some new figure");
  const axes = [{ axis: 1, name: "columns", size: 32, extent: "tail", first: 28, last: 31, count: 4, period: 0, listed: [] }];
  const pattern = { count: 8, axes, elements: [], others: 0, effect: "zero", value: 0, axis: -1, axis_name: "", by: [] };
  assert.equal(patternZh(pattern), "仅最后 4 列（28-31）：待测为 0");
});
