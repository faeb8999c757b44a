import assert from "node:assert/strict";
import test from "node:test";

import { asWords, groupingOf, movedPlaces } from "../src/words.js";

const TOKENS = { texts: ["[CLS]", "eff", "##ably", "so"], words: [-1, 0, 0, 1], word_texts: ["effably", "so"] };

/** @param {number[]} shape @param {number[]} values */
const array = (shape, values) => ({ shape, values: Float32Array.from(values) });

/** @returns {import("../src/types.js").Example} */
const example = () => ({
  title: "t",
  inputs: TOKENS,
  outputs: null,
  scores: [{ method: "m", unit: "u", signed: true, values: array([4], [1, 2, -5, 4]) }],
  maps: [
    {
      method: "m",
      unit: "u",
      signed: false,
      stack: "encoder",
      layers: [0, 1],
      values: array([2, 4, 4], [...Array(32).keys()]),
    },
  ],
  links: [
    {
      method: "",
      links: [
        [1, 1, 0.5],
        [2, 2, 0.75],
        [3, 0, null],
      ],
      sure: [
        [1, 2],
        [2, 1],
      ],
      possible: [],
    },
  ],
  graph: null,
  counted: [false, false, true, false],
  dependent: [true, true, false, false],
  pictures: [],
  row: 2,
  facts: {},
});

test("tokens outside of words are groups of their own, also next to each other", () => {
  assert.deepEqual(groupingOf({ texts: ["a", "b", "c"], words: [-1, -1, 0], word_texts: null }), {
    of: [0, 1, 2],
    count: 3,
  });
  assert.deepEqual(groupingOf({ texts: ["a", "b", "c"], words: [0, 1, 0], word_texts: null }), {
    of: [0, 1, 0],
    count: 2,
  });
  assert.deepEqual(groupingOf({ texts: ["a", "b"], words: null, word_texts: null }), { of: [0, 1], count: 2 });
});

test("columns of a word add up, rows are averaged", () => {
  const words = asWords(example());
  assert.deepEqual(words.inputs.texts, ["[CLS]", "effably", "so"]);
  assert.deepEqual([...words.scores[0].values.values], [1, -3, 4]);
  assert.deepEqual(words.maps[0].values.shape, [2, 3, 3]);
  // Rows 0..3 of the first map: 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15.
  assert.deepEqual([...words.maps[0].values.values.slice(0, 9)], [0, 3, 3, 6, 15, 9, 12, 27, 15]);
  assert.equal(words.row, 1);
});

test("links of a word's tokens become one; without gold links there are none", () => {
  const words = asWords(example());
  assert.deepEqual(words.links[0].links, [
    [1, 1, 0.75],
    [2, 0, null],
  ]);
  assert.deepEqual(words.links[0].sure, [[1, 1]]);
  const bare = { ...example(), links: [{ method: "", links: [], sure: null, possible: null }] };
  assert.deepEqual(asWords(bare).links[0], bare.links[0]);
});

test("a word counts if one of its tokens does, and knows its tokens", () => {
  const given = example();
  assert.deepEqual(asWords(given).counted, [false, true, false]);
  assert.deepEqual(asWords(given).dependent, [true, true, false]);
  assert.equal(asWords(given).pieces, given);
});

test("without texts of words, those of their tokens are joined, and what was likely there", () => {
  const likely = ["key 0.9, dog 0.1", "s 0.7", ". 0.8"];
  const inputs = { texts: ["key", "s", "."], words: [0, 0, 1], word_texts: null, likely };
  const bare = { ...example(), inputs, scores: [], maps: [], links: [], graph: null, row: null };
  assert.deepEqual(asWords(bare).inputs.texts, ["keys", "."]);
  assert.deepEqual(asWords(bare).inputs.likely, ["key 0.9, dog 0.1; then s 0.7", ". 0.8"]);
});

test("an example of whole words keeps its arrays, and shows the words' texts", () => {
  const given = {
    ...example(),
    inputs: { texts: ["Ġa", "Ġb", "c", "d"], words: [0, 1, 2, 3], word_texts: ["a", "b", "c", "d"] },
  };
  assert.equal(asWords(given).maps, given.maps);
  assert.deepEqual(asWords(given).inputs.texts, ["a", "b", "c", "d"]);
});

test("pins move to words and back to their first tokens", () => {
  /** @type {import("../src/types.js").Place[]} */
  const pins = [
    { side: "output", index: 1 },
    { side: "output", index: 2 },
    { side: "output", index: 3 },
  ];
  const words = movedPlaces(pins, example(), true);
  assert.deepEqual(
    words.map(({ index }) => index),
    [1, 2],
  );
  assert.deepEqual(
    movedPlaces(words, example(), false).map(({ index }) => index),
    [1, 3],
  );
});
