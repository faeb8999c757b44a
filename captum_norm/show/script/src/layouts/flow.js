// What reaches one output position: the edges above a threshold, and where to draw them.

/**
 * `position` is the index of an input.
 * @typedef {{ stack: string, layer: number, block: string, position: number }} FlowNode
 */
/**
 * `head` is null for all heads together.
 * @typedef {{ source: number, target: number, part: string, head: number | null, importance: number }} FlowEdge
 */
/**
 * Several outputs are explained together, their mean.
 * @typedef {{ nodes: FlowNode[], edges: FlowEdge[], outputs: number[] }} FlowGraph
 */
/**
 * An edge to draw: those of several heads between the same nodes are one.
 * @typedef {{ source: number, target: number, part: string, heads: number[], importance: number, flow: number }} Drawn
 */

const BLOCKS = ["input", "attention", "cross-attention", "layer", "feed-forward"];

/** @param {FlowNode} one @param {FlowNode} other */
function order(one, other) {
  return (
    Number(one.stack !== "encoder") - Number(other.stack !== "encoder") ||
    one.layer - other.layer ||
    BLOCKS.indexOf(one.block) - BLOCKS.indexOf(other.block)
  );
}

/**
 * Follows the edges above a threshold from the output down.
 *
 * @param {FlowGraph} graph
 * @param {number} threshold the importance that each edge must exceed
 * @returns {{ edges: Drawn[], reach: Map<number, number> }} `reach`: the share of the output that each node on a route
 *   contributes, the sum of the products of importances along all routes; `flow`: the same of each edge
 */
export function routes(graph, threshold) {
  const { nodes, edges, outputs } = graph;
  const upwards = edges
    .map((_, index) => index)
    .sort((one, other) => {
      return order(nodes[edges[other].target], nodes[edges[one].target]);
    });
  const reach = new Map(outputs.map((output) => [output, 1 / outputs.length]));
  /** @type {Map<string, Drawn>} */
  const drawn = new Map();
  for (const index of upwards) {
    const { source, target, part, head, importance } = edges[index];
    const arriving = reach.get(target);
    if (arriving === undefined || !(importance > threshold)) continue;
    reach.set(source, (reach.get(source) ?? 0) + arriving * importance);
    const key = `${source} ${target} ${part}`;
    const same = drawn.get(key) ?? { source, target, part, heads: [], importance: 0, flow: 0 };
    same.importance += importance;
    same.flow += arriving * importance;
    if (head !== null) same.heads.push(head);
    drawn.set(key, same);
  }
  return { edges: [...drawn.values()], reach };
}

/**
 * Makes the graph of a rollout: every entry of the layers' maps, with rows divided by their sums, above a threshold.
 *
 * @param {ArrayLike<number>[]} maps of each layer, first layer first, (Q, K) row by row
 * @param {number} keys the number of columns K; those beyond the number of rows come first and have no rows
 * @param {number[]} outputs the rows to explain
 * @param {string} stack
 * @param {number} threshold edges below are not made
 * @param {boolean} apart whether the residual connection is no part of the maps; it then counts as much as attention
 * @returns {FlowGraph}
 */
export function rolloutGraph(maps, keys, outputs, stack, threshold, apart) {
  const first = keys - maps[0].length / keys;
  /** @type {FlowNode[]} */
  const nodes = outputs.map((row) => ({ stack, layer: maps.length - 1, block: "layer", position: row + first }));
  /** @type {FlowEdge[]} */
  const edges = [];
  let above = new Map(nodes.map(({ position }, index) => [position, index]));
  for (let layer = maps.length - 1; layer >= 0; layer -= 1) {
    /** @type {Map<number, number>} */
    const below = new Map();
    const before = keys - maps[layer].length / keys;
    for (const [position, target] of above) {
      const start = (position - before) * keys;
      if (start < 0) continue;
      let sum = 0;
      for (let key = 0; key < keys; key += 1) sum += maps[layer][start + key];
      if (!(sum > 0)) continue;
      for (let key = 0; key < keys; key += 1) {
        const share = maps[layer][start + key] / sum;
        const importance = apart ? (share + Number(key === position)) / 2 : share;
        if (!(importance > threshold)) continue;
        if (!below.has(key)) {
          below.set(key, nodes.length);
          const block = layer === 0 ? "input" : "layer";
          nodes.push({ stack, layer: layer - 1, block, position: key });
        }
        const source = /** @type {number} */ (below.get(key));
        edges.push({ source, target, part: key === position ? "own position" : "attention", head: null, importance });
      }
    }
    above = below;
  }
  return { nodes, edges, outputs: [...outputs.keys()] };
}

/**
 * The shares of the inputs in the rows explained, by the same rollout without a threshold.
 *
 * @param {ArrayLike<number>[]} maps as of {@link rolloutGraph}
 * @param {number} keys
 * @param {number[]} outputs
 * @param {boolean} apart
 * @returns {Float64Array} (K,)
 */
export function rolloutShares(maps, keys, outputs, apart) {
  const before = keys - maps[0].length / keys;
  let shares = new Float64Array(keys);
  for (const row of outputs) shares[row + before] += 1 / outputs.length;
  for (const map of [...maps].reverse()) {
    const below = new Float64Array(keys);
    for (let row = 0; row < keys - before; row += 1) {
      const share = shares[row + before];
      if (!share) continue;
      let sum = 0;
      for (let key = 0; key < keys; key += 1) sum += map[row * keys + key];
      if (!(sum > 0)) continue;
      const factor = (apart ? 0.5 * share : share) / sum;
      for (let key = 0; key < keys; key += 1) below[key] += factor * map[row * keys + key];
      if (apart) below[row + before] += share / 2;
    }
    shares = below;
  }
  return shares;
}

/**
 * Joins the positions of a graph, such as the tokens of a word. What reaches a joined node is what reached its parts;
 * an edge from it has the mean importance, weighted by that.
 *
 * @param {FlowGraph} graph
 * @param {number[]} groups the new position of each position
 * @returns {FlowGraph}
 */
export function joined(graph, groups) {
  const { reach } = routes(graph, 0);
  /** @type {Map<string, number>} */
  const numbers = new Map();
  /** @type {FlowNode[]} */
  const nodes = [];
  /** @type {number[]} */
  const sums = [];
  const moved = graph.nodes.map((node, index) => {
    const position = groups[node.position] ?? node.position;
    const key = `${node.stack} ${node.layer} ${node.block} ${position}`;
    const number = numbers.get(key) ?? nodes.push({ ...node, position }) - 1;
    numbers.set(key, number);
    sums[number] = (sums[number] ?? 0) + (reach.get(index) ?? 0);
    return number;
  });
  /** @type {Map<string, FlowEdge>} */
  const edges = new Map();
  for (const { source, target, part, head, importance } of graph.edges) {
    const [from, to] = [moved[source], moved[target]];
    const own = part === "attention" && nodes[from].position === nodes[to].position;
    const joint = own && head === null && nodes[to].block === "layer" ? "own position" : part;
    const key = `${from} ${to} ${joint} ${head}`;
    const edge = edges.get(key) ?? { source: from, target: to, part: joint, head, importance: 0 };
    if (sums[to] > 0) edge.importance += (importance * (reach.get(target) ?? 0)) / sums[to];
    edges.set(key, edge);
  }
  return { nodes, edges: [...edges.values()], outputs: [...new Set(graph.outputs.map((output) => moved[output]))] };
}

/**
 * Places nodes: a row for each position, a column for each level, the inputs on the left.
 *
 * @param {FlowNode[]} nodes all nodes of the graph: the columns stay where they are when the threshold changes
 * @param {Iterable<number>} shown the nodes to draw
 * @param {number} length the number of positions
 * @param {number} most of more positions only the shown ones have rows
 * @returns {{ rows: number[], columns: FlowNode[], at: Map<number, { row: number, column: number }> }} the position of
 *   each row, a node of each column, and where the shown nodes are
 */
export function flowLayout(nodes, shown, length, most) {
  const level = (/** @type {FlowNode} */ node) => `${node.stack} ${node.layer} ${node.block}`;
  const columns = [...new Map(nodes.map((node) => [level(node), node])).values()].sort(order);
  const column = new Map(columns.map((node, index) => [level(node), index]));
  const drawn = [...shown];
  const rows =
    length <= most
      ? Array.from({ length }, (_, position) => position)
      : [...new Set(drawn.map((index) => nodes[index].position))].sort((one, other) => one - other);
  const row = new Map(rows.map((position, index) => [position, index]));
  const at = new Map(
    drawn.map((index) => [
      index,
      { row: row.get(nodes[index].position) ?? 0, column: column.get(level(nodes[index])) ?? 0 },
    ]),
  );
  return { rows, columns, at };
}

/**
 * Finds the edges on a route through a node.
 * @param {Drawn[]} edges
 * @param {number} node
 * @returns {Set<Drawn>}
 */
export function through(edges, node) {
  /** @type {Set<Drawn>} */
  const found = new Set();
  const walk = (/** @type {"source" | "target"} */ from, /** @type {"source" | "target"} */ to) => {
    /** @type {Map<number, Drawn[]>} */
    const at = new Map();
    for (const edge of edges) at.set(edge[from], [...(at.get(edge[from]) ?? []), edge]);
    const seen = new Set([node]);
    const waiting = [node];
    while (waiting.length) {
      for (const edge of at.get(/** @type {number} */ (waiting.pop())) ?? []) {
        found.add(edge);
        if (!seen.has(edge[to])) {
          seen.add(edge[to]);
          waiting.push(edge[to]);
        }
      }
    }
  };
  walk("source", "target");
  walk("target", "source");
  return found;
}
