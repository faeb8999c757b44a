import assert from "node:assert/strict";
import test from "node:test";

import { largestEntries } from "../src/drawing/entries.js";
import { cellSize, labelsShown, revealing, shortened, shrunk, WHOLE, within, zoomed } from "../src/drawing/layout.js";

/** @param {number} a @param {number} b */
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} is not ${b}`);

test("cells are squares that fit, and not larger than a thumb", () => {
  assert.deepEqual(cellSize(5, 5, 1000, 720), { width: 34, height: 34 });
  assert.deepEqual(cellSize(64, 64, 640, 720), { width: 10, height: 10 });
  assert.deepEqual(cellSize(64, 64, 1280, 640), { width: 10, height: 10 });
});

test("few rows are higher than their columns are wide, and few columns wider", () => {
  assert.deepEqual(cellSize(3, 500, 500, 720), { width: 1, height: 24 });
  assert.deepEqual(cellSize(360, 3, 500, 720), { width: 24, height: 2 });
});

test("a map without entries has cells of some size", () => {
  const { width, height } = cellSize(0, 0, 500, 720);
  assert.ok(width > 0 && height > 0);
});

test("labels never overlap, and those that must be shown are", () => {
  for (const size of [0.7, 1, 3.3, 7, 12.9, 13, 34]) {
    for (const forced of [[], [250], [0, 499], [7, 8]]) {
      const shown = labelsShown(0, 500, 500, size, forced);
      for (const index of forced) assert.ok(shown.includes(index));
      for (let at = 1; at < shown.length; at++) {
        const neighbours = forced.includes(shown[at]) && forced.includes(shown[at - 1]);
        assert.ok(neighbours || (shown[at] - shown[at - 1]) * size >= 12.9, `${size} ${shown[at - 1]} ${shown[at]}`);
      }
    }
  }
});

test("all labels in sight are shown where each has room, and none out of sight", () => {
  assert.deepEqual(labelsShown(2.5, 3, 10, 20, [0, 4]), [2, 3, 4, 5]);
  assert.deepEqual(labelsShown(0, 3, 3, 20, []), [0, 1, 2]);
});

test("what is under the pointer stays there when zoomed", () => {
  const [rows, columns, at] = [64, 32, { x: 0.25, y: 0.5 }];
  const before = zoomed(WHOLE, 2, { x: 0.5, y: 0.5 }, rows, columns);
  const after = zoomed(before, 1.5, at, rows, columns);
  close(before.row + (at.y * rows) / before.zoom, after.row + (at.y * rows) / after.zoom);
  close(before.column + (at.x * columns) / before.zoom, after.column + (at.x * columns) / after.zoom);
});

test("zooming ends at the whole map and at four cells", () => {
  assert.deepEqual(zoomed({ row: 3, column: 9, zoom: 1.2 }, 0.1, { x: 0, y: 0 }, 64, 64), WHOLE);
  assert.equal(zoomed(WHOLE, 1e6, { x: 0, y: 0 }, 64, 64).zoom, 16);
  assert.equal(zoomed(WHOLE, 10, { x: 0, y: 0 }, 2, 2).zoom, 1);
});

test("frames stay inside of the map", () => {
  assert.deepEqual(within({ row: -5, column: 99, zoom: 2 }, 10, 20), { row: 0, column: 10, zoom: 2 });
});

test("a cell out of sight is brought into sight, one in sight moves nothing", () => {
  const frame = { row: 10, column: 10, zoom: 4 };
  assert.deepEqual(revealing(frame, { row: 12, column: 14 }, 40, 40), frame);
  assert.deepEqual(revealing(frame, { row: 5, column: 30 }, 40, 40), { row: 5, column: 21, zoom: 4 });
});

test("thumbnails keep the entry furthest from zero of each block", () => {
  const values = Float32Array.from([0, 1, 0, 0, 0, 0, -3, 2, 0]);
  const small = shrunk({ values, rows: 3, columns: 3 }, 2);
  assert.deepEqual([...small.values, small.rows, small.columns], [1, 0, -3, 0, 2, 2]);
  const same = { values, rows: 3, columns: 3 };
  assert.deepEqual(shrunk(same, 3), same);
});

test("texts are shortened by characters, not by halves of one", () => {
  assert.equal(shortened("abcdef", 4), "abc…");
  assert.equal(shortened("abcd", 4), "abcd");
  assert.equal(shortened("😀😀😀", 2), "😀…");
});

test("the largest entries come in order, and zeros not at all", () => {
  const values = Float32Array.from([0, 2, -7, 0, 1, 3]);
  assert.deepEqual(largestEntries(values, 3, 3), [
    { row: 0, column: 2, value: -7 },
    { row: 1, column: 2, value: 3 },
    { row: 0, column: 1, value: 2 },
  ]);
  assert.equal(largestEntries(values, 3, 12).length, 4);
});
