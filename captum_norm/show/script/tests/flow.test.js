import assert from "node:assert/strict";
import test from "node:test";

import { flowLayout, joined, rolloutGraph, rolloutShares, routes, through } from "../src/layouts/flow.js";

const node = (layer, block, position, stack = "decoder") => ({ stack, layer, block, position });
const edge = (source, target, part, importance, head = null) => ({ source, target, part, head, importance });

// One layer: position 1 reads position 0 with two heads, then its feed-forward network.
const GRAPH = {
  outputs: [0],
  nodes: [node(0, "feed-forward", 1), node(0, "attention", 1), node(-1, "input", 0), node(-1, "input", 1)],
  edges: [
    edge(3, 1, "residual", 0.5),
    edge(2, 1, "attention", 0.3, 0),
    edge(2, 1, "attention", 0.2, 4),
    edge(1, 0, "residual", 0.75),
    edge(1, 0, "feed-forward", 0.25),
  ],
};

const sorted = (edges) => edges.map(({ source, target, part }) => `${source} ${target} ${part}`).sort();

test("what reaches the output is the sum of products of all routes, whatever the order of edges", () => {
  for (const edges of [GRAPH.edges, [...GRAPH.edges].reverse()]) {
    const { reach } = routes({ ...GRAPH, edges }, 0);
    assert.equal(reach.get(0), 1);
    assert.equal(reach.get(1), 1);
    assert.equal(reach.get(2), 0.5);
    assert.equal(reach.get(3), 0.5);
  }
});

test("heads of one key are one edge, which knows them", () => {
  const { edges } = routes(GRAPH, 0);
  const attention = edges.find(({ part }) => part === "attention");
  assert.deepEqual(attention?.heads, [0, 4]);
  assert.equal(attention?.importance, 0.5);
  assert.equal(edges.length, 4);
});

test("the threshold drops single edges, and all that they alone led to", () => {
  const { edges, reach } = routes(GRAPH, 0.25);
  assert.deepEqual(sorted(edges), ["1 0 residual", "2 1 attention", "3 1 residual"]);
  assert.equal(edges.find(({ part }) => part === "attention")?.importance, 0.3);
  assert.equal(reach.get(2), 0.75 * 0.3);
  assert.deepEqual(routes(GRAPH, 0.9), { edges: [], reach: new Map([[0, 1]]) });
});

test("the encoder's streams are below the decoder's, whatever their layers", () => {
  const graph = {
    outputs: [0],
    nodes: [
      node(0, "cross-attention", 3),
      node(-1, "input", 3),
      node(5, "feed-forward", 2, "encoder"),
      node(-1, "input", 2, "encoder"),
    ],
    edges: [edge(3, 2, "residual", 0.5), edge(2, 0, "attention", 0.5, 1), edge(1, 0, "residual", 0.5)],
  };
  assert.equal(routes(graph, 0).reach.get(3), 0.25);
  const { rows, columns, at } = flowLayout(graph.nodes, [0, 1, 2, 3], 4, 40);
  assert.deepEqual(
    columns.map(({ stack, block }) => `${stack} ${block}`),
    ["encoder input", "encoder feed-forward", "decoder input", "decoder cross-attention"],
  );
  assert.equal(rows.length, 4);
  assert.deepEqual(at.get(2), { row: 2, column: 1 });
  assert.deepEqual(at.get(0), { row: 3, column: 3 });
});

test("rows of long inputs are those of the shown nodes, columns those of all nodes", () => {
  const nodes = [node(0, "layer", 400), node(-1, "input", 7), node(-1, "input", 300), node(-1, "input", 400)];
  const { rows, columns, at } = flowLayout(nodes, [0, 3, 1], 500, 40);
  assert.deepEqual(rows, [7, 400]);
  assert.equal(columns.length, 2);
  assert.deepEqual(at.get(0), { row: 1, column: 1 });
  assert.equal(at.has(2), false);
});

/** The rows of a rollout, by matrices. */
function rollout(maps, keys, apart) {
  let rolled = Array.from({ length: keys }, (_, row) => Array.from({ length: keys }, (_, key) => Number(row === key)));
  for (const map of maps) {
    const shares = rolled.map((_, row) => {
      const entries = map.slice(row * keys, (row + 1) * keys);
      const sum = entries.reduce((one, other) => one + other, 0);
      return entries.map((entry, key) => (apart ? (entry / sum + Number(key === row)) / 2 : entry / sum));
    });
    const before = rolled;
    rolled = shares.map((row) =>
      row.map((_, key) => row.reduce((sum, share, middle) => sum + share * before[middle][key], 0)),
    );
  }
  return rolled;
}

for (const apart of [false, true]) {
  test(`the routes of a rollout add up to its row, residual connection apart: ${apart}`, () => {
    let seed = 7;
    const draw = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
    const maps = Array.from({ length: 3 }, () => Array.from({ length: 16 }, draw));
    for (let output = 0; output < 4; output += 1) {
      const graph = rolloutGraph(maps, 4, [output], "encoder", 0, apart);
      const { reach } = routes(graph, 0);
      const expected = rollout(maps, 4, apart)[output];
      graph.nodes.forEach(({ block, position }, index) => {
        if (block === "input") assert.ok(Math.abs((reach.get(index) ?? 0) - expected[position]) < 1e-12);
      });
    }
  });
}

test("keys before the rows are inputs of the layer that reads them, and lead no further", () => {
  const maps = [
    [1, 1, 0, 2, 1, 1],
    [1, 3, 0, 0, 2, 2],
  ]; // 2 rows, 3 keys: one cached
  const graph = rolloutGraph(maps, 3, [0], "decoder", 0, false);
  assert.equal(graph.nodes[0].position, 1);
  const { reach } = routes(graph, 0);
  const cached = graph.nodes.findIndex(({ layer, position }) => layer === 0 && position === 0);
  assert.equal(reach.get(cached), 0.25);
  assert.ok(Math.abs(rolloutShares(maps, 3, [0], false)[1] - 0.75 * 0.5) < 1e-12);
  assert.ok(!graph.edges.some(({ target }) => target === cached));
});

test("what reaches a word is what reaches its tokens, and a word's row is the mean of theirs", () => {
  let seed = 3;
  const draw = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const maps = Array.from({ length: 3 }, () => Array.from({ length: 16 }, draw));
  const graph = joined(rolloutGraph(maps, 4, [1, 2], "encoder", 0, false), [0, 1, 1, 2]);
  const { reach } = routes(graph, 0);
  for (const apart of [false, true]) {
    const shares = rolloutShares(maps, 4, [1], apart);
    rollout(maps, 4, apart)[1].forEach((entry, key) => assert.ok(Math.abs(shares[key] - entry) < 1e-12));
  }
  const rolled = rollout(maps, 4, false);
  const mean = rolled[1].map((entry, key) => (entry + rolled[2][key]) / 2);
  const expected = [mean[0], mean[1] + mean[2], mean[3]];
  const inputs = graph.nodes.flatMap(({ block, position }, index) =>
    block === "input" ? [[position, reach.get(index)]] : [],
  );
  assert.equal(inputs.length, 3);
  for (const [position, share] of inputs) assert.ok(Math.abs(share - expected[position]) < 1e-12);
  graph.nodes.forEach((_, index) => {
    const sum = graph.edges
      .filter(({ target }) => target === index)
      .reduce((sum, { importance }) => sum + importance, 0);
    if (graph.nodes[index].block !== "input") assert.ok(Math.abs(sum - 1) < 1e-12);
  });
});

test("parts and heads of joined positions stay apart", () => {
  const { edges, nodes } = joined(GRAPH, [0, 0]);
  assert.equal(nodes.length, 3);
  assert.deepEqual(
    edges.map(({ part, head, importance }) => [part, head, importance]),
    [
      ["residual", null, 0.5],
      ["attention", 0, 0.3],
      ["attention", 4, 0.2],
      ["residual", null, 0.75],
      ["feed-forward", null, 0.25],
    ],
  );
});

test("rows of zeros lead nowhere", () => {
  assert.equal(rolloutGraph([[0, 0, 0, 0]], 2, [0], "encoder", 0, false).edges.length, 0);
});

test("the routes through a node are those to it and from it", () => {
  const { edges } = routes(GRAPH, 0);
  assert.deepEqual(sorted([...through(edges, 2)]), ["1 0 feed-forward", "1 0 residual", "2 1 attention"]);
  assert.deepEqual([...through(edges, 1)].length, 4);
});
