import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";
import { decodeIntegers, decodeNumbers, inflate, unpackWords } from "../src/packing.ts";

const python = process.env.TENSORPROBE_PYTHON;
const pack = (code: string): string =>
  execFileSync(python!, ["-c", `from tensorprobe.packing import *\nimport json\nprint(json.dumps(${code}))`], { encoding: "utf8" });

test("numbers keep three digits, and what is not finite", { skip: !python }, async () => {
  const given = [0, 1, -1, 0.078433, -3.14159e-17, 9.996, 1e22, 6.62e-34, 1.5e308, 5e-324, 123456, 0.1];
  const packed = JSON.parse(pack(`pack_numbers(${JSON.stringify(given)} + [float("nan"), float("inf"), -float("inf")])`));
  const found = [...decodeNumbers(await inflate(packed))];
  assert.deepEqual(found.slice(0, -3).map((each) => each.toExponential(2)), given.map((each) => each.toExponential(2)));
  assert.deepEqual(found.slice(-3), [NaN, Infinity, -Infinity]);
});

for (const given of [[0, 1, 2, 3], [5, 3, -100, 7], [70000, -70000], [2 ** 40, 0, -(2 ** 45)], [2 ** 31, 5], []])
  test(`integers come back: ${given}`, { skip: !python }, async () => {
    const { width, packed } = JSON.parse(pack(`pack_integers(${JSON.stringify(given)})`));
    assert.deepEqual([...decodeIntegers(await inflate(packed), width)], given);
  });

test("words come back, whatever they hold", { skip: !python }, async () => {
  const given = ["plain", "</script><b>", "名前", "a\"b\\", "\u202e", ""];
  assert.deepEqual(await unpackWords(JSON.parse(pack(`pack_words(${JSON.stringify(given)})`))), given);
});
