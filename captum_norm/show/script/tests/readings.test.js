import assert from "node:assert/strict";
import test from "node:test";

import { gridOf, mapsOf, nameOf, pairOf, scaleOf } from "../src/grids.js";
import { read, togglePin, topText } from "../src/readings.js";

/** @param {number[]} shape @param {number[]} values */
const array = (shape, values) => ({ shape, values: Float32Array.from(values) });

/** Two layers (4 and 7) with two heads of 2 × 2, and the maps of all heads. */
const HEADS = [
  [1, 2, 3, 4],
  [5, 6, 7, 8],
  [0, 0, 0, 40],
  [-1, 0, 0, 0],
];
const TOGETHER = [
  [10, 20, 30, 40],
  [50, 60, 70, 100],
];

/** @type {import("../src/types.js").Example} */
const EXAMPLE = {
  title: "t",
  inputs: { texts: ["a", "b"], words: null, word_texts: null },
  outputs: null,
  scores: [{ method: "norm", unit: "share", signed: true, values: array([2], [0.25, -0.75]) }],
  maps: [
    {
      method: "norm",
      unit: "norm",
      signed: false,
      stack: "encoder",
      layers: [4, 7],
      residual: false,
      values: array([2, 2, 2, 2], HEADS.flat()),
    },
    {
      method: "norm",
      unit: "norm",
      signed: false,
      stack: "encoder",
      layers: [4, 7],
      residual: false,
      values: array([2, 2, 2], TOGETHER.flat()),
    },
    {
      method: "weights",
      unit: "weight",
      signed: false,
      stack: "encoder",
      layers: [4, 7],
      residual: false,
      values: array([2, 2, 2, 2], HEADS.flat()),
    },
  ],
  links: [],
  graph: null,
  pictures: [],
  row: null,
  facts: {},
  counted: null,
};

/** @param {Partial<import("../src/types.js").Values>} [changes] */
const choice = (changes) => ({
  method: "norm",
  beside: "",
  stack: /** @type {const} */ ("encoder"),
  layer: /** @type {const} */ ("all"),
  head: /** @type {const} */ ("all"),
  scale: /** @type {const} */ ("map"),
  ...changes,
});

/** @param {Partial<import("../src/types.js").Values>} changes */
const values = (changes) => [...(gridOf(EXAMPLE, choice(changes))?.values ?? [])];

test("a map is that of its layer's number and head", () => {
  assert.deepEqual(values({ layer: 4, head: 1 }), HEADS[1]);
  assert.deepEqual(values({ layer: 7, head: 0 }), HEADS[2]);
  assert.deepEqual(values({ layer: 0, head: 0 }), []);
  assert.deepEqual(values({ layer: 4, head: 2 }), []);
});

test("all heads are the method's own map where it has one, else the mean", () => {
  assert.deepEqual(values({ layer: 7 }), TOGETHER[1]);
  assert.deepEqual(values({ method: "weights", layer: 4 }), [3, 4, 5, 6]);
});

test("all layers are the mean", () => {
  assert.deepEqual(values({}), [30, 40, 50, 70]);
  assert.deepEqual(values({ head: 0 }), [0.5, 1, 1.5, 22]);
  assert.deepEqual(values({ method: "weights" }), [1.25, 2, 2.5, 13]);
});

test("the strongest colour is the largest of the map, its layer, or its method, whatever the sign", () => {
  /** @param {Partial<import("../src/types.js").Values>} changes */
  const scales = (changes) =>
    ["map", "layer", "all"].map((scale) => scaleOf(EXAMPLE, choice({ ...changes, scale: /** @type {any} */ (scale) })));
  assert.deepEqual(scales({ layer: 4, head: 0 }), [4, 8, 40]);
  assert.deepEqual(scales({ layer: 7, head: 1 }), [1, 40, 40]);
  assert.deepEqual(scales({ layer: 4 }), [40, 40, 100]);
  assert.deepEqual(scales({}), [70, 70, 100]);
});

test("names say what is averaged", () => {
  assert.equal(nameOf(EXAMPLE, choice({ layer: 7, head: 1 })), "layer 7, head 1");
  assert.equal(nameOf(EXAMPLE, choice({})), "mean of 2 layers, all heads");
  assert.equal(nameOf(EXAMPLE, choice({ method: "weights", layer: 4 })), "layer 4, mean of heads");
});

test("a map that links were read from is of no layer", () => {
  const [maps] = EXAMPLE.maps;
  const example = { ...EXAMPLE, maps: [{ ...maps, stack: /** @type {const} */ ("links"), layers: [0] }] };
  assert.equal(nameOf(example, choice({ method: maps.method, stack: "links" })), "");
});

test("the method beside is the one chosen, none, or the first other one", () => {
  assert.deepEqual(pairOf(EXAMPLE, choice({})), ["norm", "weights"]);
  assert.deepEqual(pairOf(EXAMPLE, choice({ method: "weights" })), ["weights", "norm"]);
  assert.deepEqual(pairOf(EXAMPLE, choice({ beside: "none" })), ["norm"]);
  assert.deepEqual(pairOf(EXAMPLE, choice({ method: "scores only" })), ["norm", "weights"]);
  assert.deepEqual(mapsOf(EXAMPLE, "weights", "encoder").together, null);
});

test("without places there are scores, with one its row, with two their difference", () => {
  const [first, second] = [0, 1].map((index) => ({ side: /** @type {const} */ ("output"), index }));
  assert.deepEqual([...(read(EXAMPLE, choice({}), [])?.values ?? [])], [0.25, -0.75]);
  const row = read(EXAMPLE, choice({ layer: 7 }), [second]);
  assert.deepEqual([row?.kind, row?.side, row?.signed, ...(row?.values ?? [])], ["row", "input", false, 70, 100]);
  const difference = read(EXAMPLE, choice({ layer: 7 }), [first, second]);
  assert.deepEqual([difference?.signed, ...(difference?.values ?? [])], [true, -20, -40]);
});

test("an input has its column, of the outputs", () => {
  const column = read(EXAMPLE, choice({ layer: 7 }), [{ side: "input", index: 1 }]);
  assert.deepEqual([column?.side, ...(column?.values ?? [])], ["output", 60, 100]);
});

test("without scores there is the explained row, or the mean of all rows", () => {
  const bare = { ...EXAMPLE, scores: [] };
  assert.deepEqual([...(read(bare, choice({ layer: 4 }), [])?.values ?? [])], [20, 30]);
  assert.deepEqual([...(read({ ...bare, row: 1 }, choice({ layer: 4 }), [])?.values ?? [])], [30, 40]);
  assert.equal(read({ ...EXAMPLE, scores: [], maps: [] }, choice({}), []), null);
});

test("a click pins, unpins, replaces the second pin, and begins anew on the other side", () => {
  /** @type {(index: number, side?: "input" | "output") => import("../src/types.js").Place} */
  const at = (index, side = "output") => ({ side, index });
  assert.deepEqual(togglePin([], at(1)), [at(1)]);
  assert.deepEqual(togglePin([at(1)], at(1)), []);
  assert.deepEqual(togglePin([at(1), at(2)], at(3)), [at(1), at(3)]);
  assert.deepEqual(togglePin([at(1), at(2)], at(3, "input")), [at(3, "input")]);
});

test("the largest are named, negative ones with a minus, zeros not", () => {
  assert.equal(topText([0, -2, 1], ["a", "b", "c"], 3, String), "b -2 · c 1");
  assert.equal(topText([0, 0], ["a", "b"], 3, String), "");
});
