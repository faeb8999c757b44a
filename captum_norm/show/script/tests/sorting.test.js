import assert from "node:assert/strict";
import test from "node:test";

import { numberOf, sortedRows, tabSeparated, textOrder } from "../src/layouts/sorting.js";

test("numbers are compared as numbers, descending and ascending, and equal rows keep their order", () => {
  const rows = [[10], [9], [-1.5], [9], [0]];
  assert.deepEqual(sortedRows(rows, 0, false, false), [2, 4, 1, 3, 0]);
  assert.deepEqual(sortedRows(rows, 0, false, true), [0, 1, 3, 4, 2]);
});

test("empty cells come last in both directions", () => {
  const rows = [[null], [1], [NaN], [2]];
  assert.deepEqual(sortedRows(rows, 0, false, false), [1, 3, 0, 2]);
  assert.deepEqual(sortedRows(rows, 0, false, true), [3, 1, 0, 2]);
  assert.deepEqual(sortedRows([[""], ["b"], [null], ["a"]], 0, true, true), [1, 3, 0, 2]);
});

test("words with numbers are in the order of the numbers", () => {
  assert.deepEqual(sortedRows([["layer 10"], ["layer 9"], ["Layer 1"]], 0, true, false), [2, 1, 0]);
});

test("a cell's number is the one that it begins with", () => {
  assert.deepEqual(["−1.5", "29.1 ± 0.3", "0.003 *", "1,234", ".5", "–", "", "a 1", "1e-3"].map(numberOf), [
    -1.5,
    29.1,
    0.003,
    1234,
    0.5,
    null,
    null,
    null,
    0.001,
  ]);
  assert.equal(numberOf(null), null);
  assert.equal(numberOf(-2), -2);
});

test("tabs and line breaks in a cell do not break the table", () => {
  assert.equal(
    tabSeparated(
      ["a", "b\tc"],
      [
        ["x\r\ny", 1.5],
        [null, "\u2028z"],
      ],
    ),
    "a\tb c\nx y\t1.5\n\t z",
  );
});

test("texts are searched, and sorted by score from the largest, by surprise from the least probable", () => {
  const texts = [
    { title: "One fine day", value: 0.5, probability: 0.9 },
    { title: "two", value: null, probability: null },
    { title: "A fine one", value: 0.75, probability: 0.1 },
  ];
  assert.deepEqual(textOrder(texts, "order", ""), [0, 1, 2]);
  assert.deepEqual(textOrder(texts, "score", ""), [2, 0, 1]);
  assert.deepEqual(textOrder(texts, "surprise", ""), [2, 0, 1]);
  assert.deepEqual(textOrder(texts, "order", " FINE"), [0, 2]);
});
