import assert from "node:assert/strict";
import { deflateSync } from "node:zlib";
import test from "node:test";

import { decode, decodeExample, half, opener } from "../src/data.js";

/** @param {number[]} bytes */
const text = (bytes) => deflateSync(Uint8Array.from(bytes)).toString("base64");

test("exact numbers are four planes of bytes", async () => {
  // 1.0 is 00 00 80 3f, -2.5 is 00 00 20 c0.
  const data = text([0, 0, 0, 0, 0x80, 0x20, 0x3f, 0xc0]);
  const decoded = await decode({ shape: [2], dtype: "f4", max: [], data });
  assert.deepEqual([...decoded.values], [1, -2.5]);
});

test("half precision is of the largest number", async () => {
  // 1.0 is 00 3c, -0.5 is 00 b8.
  const decoded = await decode({ shape: [1, 2], dtype: "f2", max: [8], data: text([0, 0, 0x3c, 0xb8]) });
  assert.deepEqual([...decoded.values], [8, -4]);
});

test("steps are of the largest number of each map, column by column", async () => {
  const data = text([127, 0, 0, 256 - 127, 0, 0, 127, 0, 0, 0, 0, 0]);
  const decoded = await decode({ shape: [2, 2, 3], dtype: "i1", max: [1, 10], data });
  assert.deepEqual([...decoded.values], [1, 0, 0, 0, -1, 0, 10, 0, 0, 0, 0, 0]);
});

test("an array without entries has none", async () => {
  const decoded = await decode({ shape: [1, 0, 0], dtype: "f4", max: [], data: text([]) });
  assert.equal(decoded.values.length, 0);
});

test("half precision has zeros, subnormal numbers and signs", () => {
  assert.deepEqual([0x0000, 0x0001, 0x03ff, 0x0400, 0x3555, 0xc000].map(half), [
    0,
    2 ** -24,
    1023 * 2 ** -24,
    2 ** -14,
    0.333251953125,
    -2,
  ]);
});

test("an example is decoded once while it is among the last", async () => {
  const empty = {
    title: "",
    inputs: { texts: [], words: null, word_texts: null },
    outputs: null,
    scores: [],
    maps: [],
  };
  const rest = { links: [], graph: null, components: [], pictures: [], row: null, facts: {} };
  const examples = Array.from({ length: 9 }, () => ({ ...empty, ...rest }));
  const open = opener({ title: "", facts: {}, examples, tables: [], figures: [], notes: [] });
  const first = await open(0, false);
  assert.equal(await open(0, false), first);
  for (let index = 1; index < 9; index++) await open(index, false);
  assert.notEqual(await open(0, false), first);
});

test("many maps of single heads wait until they are asked for, beside those of all heads", async () => {
  const heads = { shape: [1, 2, 800, 800], dtype: "i1", max: [0, 0], data: text(Array(2 * 800 * 800).fill(0)) };
  const together = { shape: [1, 800, 800], dtype: "i1", max: [0], data: text(Array(800 * 800).fill(0)) };
  const maps = [together, heads].map((values) => ({ method: "norm", stack: "encoder", layers: [0], values }));
  const shapes = (example) => example.maps.map(({ values }) => values.shape.length);
  const [late, now, alone] = await Promise.all([
    decodeExample({ scores: [], components: [], maps }, false),
    decodeExample({ scores: [], components: [], maps }),
    decodeExample({ scores: [], components: [], maps: maps.slice(1) }, false),
  ]);
  assert.deepEqual([shapes(late), late.later], [[3], 2]);
  assert.deepEqual([shapes(now), now.later], [[3, 4], 0]);
  assert.deepEqual([shapes(alone), alone.later], [[4], 0]);
});
