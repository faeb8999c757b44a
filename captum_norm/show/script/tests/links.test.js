import assert from "node:assert/strict";
import test from "node:test";

import { classified, counts, curve, mapLines, overlaid, pickedTokens } from "../src/layouts/links.js";

const MAP = [0.5, 0, -1, 0.25, 0.2, 0.75]; // 2 outputs, 3 inputs

test("lines have the input of the column and the output of the row, strongest last", () => {
  const { lines, above, top } = mapLines(MAP, 3, 4);
  assert.deepEqual(
    lines.map(({ input, output, value }) => [input, output, value]),
    [
      [0, 1, 0.25],
      [0, 0, 0.5],
      [2, 1, 0.75],
      [2, 0, -1],
    ],
  );
  assert.equal(above, 5); // an entry of 0 is no line
  assert.equal(top, 1);
  assert.equal(lines[3].share, -1);
});

test("shares are relative to the largest absolute entry, also of a map of small numbers", () => {
  const { lines } = mapLines([1e-6, 4e-6], 2, 10);
  assert.deepEqual(
    lines.map(({ share }) => share),
    [0.25, 1],
  );
});

test("the strongest of many are those of a sorted list", () => {
  let seed = 7;
  const values = Array.from({ length: 60 * 50 }, () => (seed = (seed * 16807) % 2147483647) / 2147483647 - 0.5);
  const sizes = values.map(Math.abs).sort((one, other) => other - one);
  for (const most of [0, 1, 40, 3000, 5000]) {
    const { lines, above } = mapLines(values, 50, most);
    assert.deepEqual(lines.map(({ value }) => Math.abs(value)).reverse(), sizes.slice(0, most));
    assert.equal(above, 3000);
  }
});

test("a token's lines keep the scale of the whole map", () => {
  const { lines } = mapLines(MAP, 3, 10, { wanted: (input) => input === 0 });
  assert.deepEqual(
    lines.map(({ share }) => share),
    [0.25, 0.5],
  );
});

test("lines of several maps are relative to the largest entry of each, the strongest of all", () => {
  const maps = [MAP, [0, 20, 0, 0, -12, 0]].map((values) => mapLines(values, 3, 3));
  const { lines, above, tops } = overlaid(maps, 3);
  assert.deepEqual(
    lines.map(({ map, input, output, share }) => [map, input, output, share]),
    [
      [0, 2, 1, 0.75],
      [0, 2, 0, -1],
      [1, 1, 0, 1],
    ],
  );
  assert.deepEqual([above, tops], [7, [1, 20]]);
  assert.deepEqual(overlaid(maps, 0).lines, []);
});

test("tokens are picked by the words that stand in them", () => {
  const texts = ["The", "cat", "catches", "ΣΊΣΥΦΟΣ", "."];
  assert.deepEqual(pickedTokens(texts, " CAT  the "), [true, true, true, false, false]);
  assert.deepEqual(pickedTokens(texts, "σί"), [false, false, false, true, false]);
  assert.deepEqual(pickedTokens(texts, " "), Array(5).fill(true));
});

test("where both sides are the same tokens, what a token gives to itself hides nothing", () => {
  const { lines, top } = mapLines([9, 1, 2, 9], 2, 10, { own: false });
  assert.equal(top, 2);
  assert.deepEqual(
    lines.map(({ input, output, share }) => [input, output, share]),
    [
      [1, 0, 0.5],
      [0, 1, 1],
    ],
  );
  const cached = mapLines([1, 9, 2, 1, 3, 9], 3, 10, { own: false }); // 2 rows, one key before them
  assert.deepEqual(new Set(cached.lines.map(({ value }) => value)), new Set([1, 2, 3]));
});

test("maps of zeros and of NaN have no lines", () => {
  assert.deepEqual(mapLines([0, 0], 2, 5), { lines: [], above: 0, top: 0 });
  assert.deepEqual(mapLines([NaN, 1], 2, 5).lines.length, 1);
});

test("links agree with sure gold links, with possible ones, or are wrong; missing sure ones are added", () => {
  const found = classified(
    [
      [2, 0],
      [0, 0],
      [1, 1, 0.5],
    ],
    [
      [0, 0],
      [3, 3],
    ],
    [
      [0, 0],
      [1, 1],
      [4, 4],
    ],
  );
  assert.deepEqual(
    found.map(({ input, output, kind, probability }) => [input, output, kind, probability]),
    [
      [0, 0, "sure", null],
      [1, 1, "possible", 0.5],
      [2, 0, "wrong", null],
      [3, 3, "missed", null],
    ],
  );
  assert.deepEqual(counts(found), { sure: 1, possible: 1, wrong: 1, missed: 1 });
});

test("without gold links nothing is wrong; with empty ones everything is", () => {
  assert.equal(classified([[0, 0]], null, null)[0].kind, "link");
  assert.equal(classified([[0, 0]], undefined, undefined)[0].kind, "link");
  assert.equal(classified([[0, 0]], [], [])[0].kind, "wrong");
});

test("numbers of links are compared as numbers, not as the texts 1 12 and 11 2", () => {
  assert.equal(classified([[11, 2]], [[1, 12]], [[1, 12]])[1].kind, "wrong");
});

test("curves are horizontal at both ends", () => {
  assert.equal(curve(0, 10, 100, 30.04), "M0 10C50 10 50 30 100 30");
});
