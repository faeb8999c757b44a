// What components inside a model contribute, and where they are drawn: layers upwards.

/** @import { Components, Example } from "../types.js" */

/**
 * A component; or a residual stream, or a feed-forward network, at one position.
 *
 * @typedef {object} Node
 * @property {string} key names it in the address
 * @property {Components} of
 * @property {number} layer
 * @property {number} number in its layer
 * @property {number | null} position null: all positions together
 * @property {number} score
 * @property {ArrayLike<number> | null} values at each token; null where they are not known
 */

/** What one component writes as another reads it, its parts added up. @typedef {{ source: string, target: string, score: number, size: number, parts: [part: string, score: number][] }} Link */

/** A row: a layer of the encoder or decoder, or its input, whose layer is null. @typedef {{ half: string, layer: number | null }} Level */

/** Columns of one kind; `numbered`: a column for each of a layer's. @typedef {{ of: Components, start: number, size: number, numbered: boolean }} Band */

/** Of a kind of which a layer has more, only those drawn have columns. */
const MOST_COLUMNS = 128;

/**
 * Whether all are of one kind that fills a grid of layers and numbers, or of layers and positions.
 *
 * @param {Components[]} all
 */
export function isGrid(all) {
  return new Set(all.map(({ kind }) => kind)).size === 1 && all[0].kind !== "neurons";
}

/** What reads all that is written, as a node. */
export const OUTPUT = "output";

/**
 * The edges between two components, by the keys of their nodes: those into a head's queries, keys and values are one.
 *
 * @param {Pick<Example, "components" | "edges">} example
 * @returns {Link[]} the strongest first
 */
export function linksOf({ components, edges }) {
  const stack = components[0]?.stack;
  /** @type {Map<string, Link>} */
  const links = new Map();
  for (const [from, to, score] of edges) {
    const [source, target] = [from, to].map((name) => {
      const [, layer, head = "0"] = /^[am](\d+)(?:\.h(\d+))?/.exec(name) ?? [];
      if (name === "logits") return OUTPUT;
      return `${stack} ${name === "input" ? "residual 0.0" : `${name[0] === "a" ? "heads" : "feed_forward"} ${layer}.${head}`}`;
    });
    const link = links.get(`${source} ${target}`) ?? { source, target, score: 0, size: 0, parts: [] };
    links.set(`${source} ${target}`, link);
    link.score += score;
    link.size += Math.abs(score);
    link.parts.push([/<(\w)>$/.exec(to)?.[1] ?? "", score]);
  }
  return [...links.values()].sort((one, other) => Math.abs(other.score) - Math.abs(one.score));
}

/** Whether each position is a node of its own. @param {Components} of @param {boolean} grid */
function atPositions({ kind, values: { shape } }, grid) {
  return shape.length === 3 && (kind === "residual" || (kind === "feed_forward" && grid));
}

/** @param {Components} of */
function halfOf({ stack }) {
  return stack === "encoder" ? "encoder" : "decoder";
}

/**
 * The nodes of all components. Beside other kinds, residual streams are the inputs alone: what enters the first layer.
 *
 * @param {Components[]} all
 * @param {boolean} [together] whether the inputs are one node
 * @returns {{ nodes: Node[], inputs: Node[] }} `nodes`: the strongest first
 */
export function nodesOf(all, together = false) {
  const grid = isGrid(all);
  /** @type {Node[]} */
  const nodes = [];
  /** @type {Node[]} */
  const inputs = [];
  for (const of of all) {
    const [layers, units, length = 1] = of.values.shape;
    const list = of.kind === "residual" && !grid ? inputs : nodes;
    for (let layer = 0; layer < (list === inputs ? 1 : layers); layer++) {
      for (let number = 0; number < units; number++) {
        const start = (layer * units + number) * length;
        const own = of.values.values.subarray(start, start + length);
        const node = { of, layer, number, values: of.values.shape.length === 3 ? own : null };
        const key = `${of.stack} ${of.kind} ${layer}.${number}`;
        if (atPositions(of, grid) && !(together && list === inputs))
          own.forEach((score, position) => list.push({ ...node, key: `${key}.${position}`, position, score }));
        else list.push({ ...node, key, position: null, score: own.reduce((sum, value) => sum + value, 0) });
      }
    }
  }
  return { nodes: nodes.sort((one, other) => Math.abs(other.score) - Math.abs(one.score)), inputs };
}

/**
 * The shares of the sum of absolute scores that none, the strongest one, the strongest two ... carry.
 *
 * @param {number[]} scores the strongest first
 * @param {number} [total] the sum, if there are others
 * @returns {Float64Array} one more than scores
 */
export function carried(scores, total) {
  const sums = new Float64Array(scores.length + 1);
  scores.forEach((score, index) => (sums[index + 1] = sums[index] + Math.abs(score)));
  return sums.map((sum) => sum / ((total ?? sums[scores.length]) || 1));
}

/**
 * Places nodes: a row for each layer, and one below for the inputs; the kinds side by side.
 *
 * @param {Components[]} all
 * @param {Node[]} shown
 * @param {Node[]} inputs
 * @returns {{ levels: Level[], bands: Band[], columns: number, at: Map<Node, { column: number, level: number }> }}
 */
export function componentLayout(all, shown, inputs) {
  const grid = isGrid(all);
  const inLayers = all.filter(({ kind }) => grid || kind !== "residual");
  /** @type {Level[]} */
  const levels = ["encoder", "decoder"].flatMap((half) => {
    const counts = inLayers.filter((of) => halfOf(of) === half).map(({ values: { shape } }) => shape[0]);
    const below = inputs.some(({ of }) => halfOf(of) === half) ? [{ half, layer: null }] : [];
    return [...below, ...Array.from({ length: Math.max(0, ...counts) }, (_, layer) => ({ half, layer }))];
  });
  const levelOf = new Map(levels.map(({ half, layer }, index) => [`${half} ${layer}`, index]));
  /** @param {Components} of @param {number | null} layer */
  const level = (of, layer) => levelOf.get(`${halfOf(of)} ${layer}`) ?? 0;
  const at = new Map(inputs.map((node) => [node, { column: node.position ?? 0, level: level(node.of, null) }]));
  /** How many columns are taken in each half. @type {Record<string, number>} */
  const taken = { encoder: 0, decoder: 0 };
  const bands = inLayers.map((of) => {
    const whole = atPositions(of, grid) ? of.values.shape[2] : of.values.shape[1];
    const numbered = whole <= MOST_COLUMNS || atPositions(of, grid);
    const start = taken[halfOf(of)];
    /** @type {Map<number, number>} */
    const counts = new Map();
    for (const node of shown.filter((one) => one.of === of).sort((one, other) => one.number - other.number)) {
      const count = counts.get(node.layer) ?? 0;
      counts.set(node.layer, count + 1);
      const column = start + (numbered ? (node.position ?? node.number) : count);
      at.set(node, { column, level: level(of, node.layer) });
    }
    const size = numbered ? whole : Math.max(1, ...counts.values());
    taken[halfOf(of)] += size + 1;
    return { of, start, size, numbered };
  });
  const columns = Math.max(
    0,
    ...bands.map(({ start, size }) => start + size),
    ...inputs.map(({ position }) => (position ?? 0) + 1),
  );
  return { levels, bands, columns, at };
}
