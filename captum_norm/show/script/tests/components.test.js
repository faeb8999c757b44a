import assert from "node:assert/strict";
import test from "node:test";

import { carried, componentLayout, isGrid, linksOf, nodesOf } from "../src/layouts/components.js";

const tokens = { texts: ["a", "b"], words: null, word_texts: null, likely: null };
const of = (kind, shape, values, stack = "decoder") => ({
  kind,
  stack,
  unit: "part",
  values: { shape, values: Float32Array.from(values) },
  tokens,
  signed: true,
});
// Two layers: two heads, a network, and the streams around them, at two tokens.
const HEADS = of("heads", [2, 2, 2], [1, -3, 0, 0, 2, 2, 0.5, 0]);
const NETWORKS = of("feed_forward", [2, 1, 2], [1, 0, -1, 0.25]);
const STREAMS = of("residual", [3, 1, 2], [1, 2, 3, 4, 5, 6]);

const told = (nodes) => nodes.map(({ key, score }) => [key.replace("decoder ", ""), score]);

test("the scores of a node's tokens add up; the strongest come first, and inputs apart", () => {
  const { nodes, inputs } = nodesOf([HEADS, NETWORKS, STREAMS]);
  assert.deepEqual(told(nodes), [
    ["heads 1.0", 4],
    ["heads 0.0", -2],
    ["feed_forward 0.0", 1],
    ["feed_forward 1.0", -0.75],
    ["heads 1.1", 0.5],
    ["heads 0.1", 0],
  ]);
  assert.deepEqual(Array.from(nodes[1].values), [1, -3]);
  assert.deepEqual(told(inputs), [
    ["residual 0.0.0", 1],
    ["residual 0.0.1", 2],
  ]);
});

test("alone, streams and networks have a node at each position, and neurons no grid", () => {
  assert.deepEqual([[HEADS], [STREAMS], [NETWORKS], [HEADS, NETWORKS]].map(isGrid), [true, true, true, false]);
  assert.equal(isGrid([of("neurons", [1, 2], [1, 2])]), false);
  const { nodes, inputs } = nodesOf([STREAMS]);
  assert.deepEqual(told(nodes).slice(0, 2), [
    ["residual 2.0.1", 6],
    ["residual 2.0.0", 5],
  ]);
  assert.deepEqual([nodes.length, inputs.length], [6, 0]);
  assert.equal(nodesOf([of("neurons", [1, 2], [1, 2])]).nodes[0].values, null);
});

test("shares carried are of absolute scores, also of none", () => {
  assert.deepEqual(Array.from(carried([3, -1])), [0, 0.75, 1]);
  assert.deepEqual(Array.from(carried([3, -1], 8)), [0, 0.375, 0.5]);
  assert.deepEqual(Array.from(carried([0])), [0, 0]);
});

test("layers go upwards from the inputs, and kinds stand side by side", () => {
  const all = [HEADS, NETWORKS, STREAMS];
  const { nodes, inputs } = nodesOf(all);
  const { levels, bands, columns, at } = componentLayout(all, nodes.slice(0, 3), inputs);
  assert.deepEqual(
    levels.map(({ layer }) => layer),
    [null, 0, 1],
  );
  assert.deepEqual(
    bands.map(({ start, size }) => [start, size]),
    [
      [0, 2],
      [3, 1],
    ],
  );
  assert.equal(columns, 4);
  const places = [...at].map(([{ key }, { column, level }]) => [key.replace("decoder ", ""), column, level]);
  assert.deepEqual(places.sort(), [
    ["feed_forward 0.0", 3, 1],
    ["heads 0.0", 0, 1],
    ["heads 1.0", 0, 2],
    ["residual 0.0.0", 0, 0],
    ["residual 0.0.1", 1, 0],
  ]);
});

test("the decoder stands on the encoder, and cross-attention beside its own", () => {
  const all = ["encoder", "decoder", "cross"].map((stack) => of("heads", [1, 2], [1, 2], stack));
  const { levels, bands, at } = componentLayout(all, nodesOf(all).nodes, []);
  assert.deepEqual(levels, [
    { half: "encoder", layer: 0 },
    { half: "decoder", layer: 0 },
  ]);
  assert.deepEqual(
    bands.map(({ start }) => start),
    [0, 0, 3],
  );
  assert.deepEqual(
    [...at].map(([{ of }, { level }]) => `${of.stack} ${level}`).filter((text) => text.startsWith("c")),
    ["cross 1", "cross 1"],
  );
});

test("of many neurons those shown have columns, in the order of their numbers", () => {
  const values = Array.from({ length: 200 }, (_, number) => (number === 150 ? 9 : number === 20 ? -8 : 0));
  const all = [of("neurons", [1, 200], values)];
  const { bands, at } = componentLayout(all, nodesOf(all).nodes.slice(0, 2), []);
  assert.equal(bands[0].size, 2);
  assert.deepEqual(
    [...at].map(([{ number }, { column }]) => [number, column]),
    [
      [20, 0],
      [150, 1],
    ],
  );
});

test("edges into one head are one, of which the strongest come first, and inputs are one node", () => {
  const edges = [
    ["input", "a0.h1<q>", -1],
    ["a0.h1", "m0", 0.5],
    ["input", "a0.h1<v>", 3],
    ["m0", "logits", -4],
    ["m0", "a1.h0<k>", 0.25],
  ];
  const links = linksOf({ components: [HEADS, NETWORKS, STREAMS], edges });
  assert.deepEqual(
    links.map(({ source, target, score, size }) => [source, target, score, size]),
    [
      ["decoder feed_forward 0.0", "output", -4, 4],
      ["decoder residual 0.0", "decoder heads 0.1", 2, 4],
      ["decoder heads 0.1", "decoder feed_forward 0.0", 0.5, 0.5],
      ["decoder feed_forward 0.0", "decoder heads 1.0", 0.25, 0.25],
    ],
  );
  assert.deepEqual(links[1].parts, [
    ["q", -1],
    ["v", 3],
  ]);
  const { nodes, inputs } = nodesOf([HEADS, NETWORKS, STREAMS], true);
  assert.deepEqual(told(inputs), [["residual 0.0", 3]]);
  assert.deepEqual(Array.from(inputs[0].values), [1, 2]);
  const keys = new Set([...nodes, ...inputs].map(({ key }) => key));
  assert.ok(links.every(({ source, target }) => keys.has(source) && (target === "output" || keys.has(target))));
});
