/** @import { Example, Maps, Stack, Values } from "./types.js" */

/**
 * One map: rows are outputs, columns inputs.
 *
 * @typedef {{ values: Float32Array, rows: number, columns: number, unit: string, signed: boolean }} Grid
 */

/** Which map. @typedef {Pick<Values, "method" | "stack" | "layer" | "head">} Choice */

/** Means of maps, and the largest number of each map: computed once. */
/** @type {WeakMap<Maps, Map<string, Float32Array>>} */
const means = new WeakMap();
/** @type {WeakMap<Maps, Float32Array>} */
const maxima = new WeakMap();
const KEPT_MEANS = 64;

/**
 * The names of the methods of an example, in the order of its maps, then of its scores.
 *
 * @param {Example} example
 * @returns {string[]}
 */
export function methodsOf(example) {
  return [...new Set([...example.maps, ...example.scores].map(({ method }) => method))];
}

/**
 * @param {Example} example
 * @returns {Stack[]}
 */
export function stacksOf(example) {
  return [...new Set(example.maps.map(({ stack }) => stack))];
}

/**
 * The names of the methods that have maps in a stack.
 *
 * @param {Example} example
 * @param {Stack} stack
 * @returns {string[]}
 */
export function mappedIn(example, stack) {
  return [...new Set(example.maps.filter((maps) => maps.stack === stack).map(({ method }) => method))];
}

/**
 * The methods whose maps are next to each other: the one chosen, and the one beside it.
 *
 * @param {Example} example
 * @param {Pick<Values, "method" | "beside" | "stack">} choice
 * @returns {string[]}
 */
export function pairOf(example, { method, beside, stack }) {
  const all = mappedIn(example, stack);
  const first = all.includes(method) ? method : all[0];
  const second = beside || all.find((name) => name !== first);
  return all
    .filter((name) => name === first || name === second)
    .sort((a, b) => Number(b === first) - Number(a === first));
}

/**
 * The maps of a method in a stack: those of each head, and those of all heads together.
 *
 * @param {Example} example
 * @param {string} method
 * @param {Stack} stack
 * @returns {{ heads: Maps | null, together: Maps | null }}
 */
export function mapsOf(example, method, stack) {
  const own = example.maps.filter((maps) => maps.method === method && maps.stack === stack);
  /** @param {number} axes */
  const withAxes = (axes) => own.find((maps) => maps.values.shape.length === axes) ?? null;
  return { heads: withAxes(4), together: withAxes(3) };
}

/**
 * The map of one layer and head, or of all of them.
 *
 * All heads: the method's own map of all heads where there is one, else the mean of the heads. All layers: the mean of
 * the layers. A head is ignored where a method has none.
 *
 * @param {Example} example
 * @param {Choice} choice
 * @returns {Grid | null} null where there is no such map
 */
export function gridOf(example, choice) {
  const found = find(example, choice);
  if (!found) return null;
  const { maps, indices } = found;
  const [rows, columns] = maps.values.shape.slice(-2);
  return { values: meanOf(maps, indices), rows, columns, unit: maps.unit, signed: maps.signed };
}

/**
 * What has the strongest colour in a map.
 *
 * @param {Example} example
 * @param {Choice & Pick<Values, "scale">} choice
 * @returns {number} the largest absolute number of the map, of the maps of its layer, or of the maps of its method
 */
export function scaleOf(example, choice) {
  const found = find(example, choice);
  if (!found) return 0;
  const { maps, indices, layer } = found;
  const tops = maximaOf(maps);
  if (choice.scale === "all") return largest(tops);
  if (indices.length > 1 && (choice.scale === "map" || layer === null)) return topOf(meanOf(maps, indices));
  if (choice.scale === "map" || layer === null) return tops[indices[0]];
  const heads = headsOf(maps);
  return largest(tops.subarray(layer * heads, (layer + 1) * heads));
}

/**
 * Says which map it is: of which layer, and of which head.
 *
 * @param {Example} example
 * @param {Choice} choice
 * @returns {string}
 */
export function nameOf(example, choice) {
  const { heads, together } = mapsOf(example, choice.method, choice.stack);
  const maps = (choice.head === "all" && together) || heads || together;
  if (!maps || choice.stack === "answer" || choice.stack === "links") return "";
  const layers =
    choice.layer !== "all"
      ? `layer ${choice.layer}`
      : maps.layers.length > 1
        ? `mean of ${maps.layers.length} layers`
        : `layer ${maps.layers[0]}`;
  if (!heads && !together?.mean) return layers;
  return `${layers}, ${choice.head !== "all" ? `head ${choice.head}` : together && !together.mean ? "all heads" : "mean of heads"}`;
}

/** @type {WeakMap<Float32Array, number>} */
const peaks = new WeakMap();

/** @param {Float32Array} values that do not change */
function topOf(values) {
  const top = peaks.get(values) ?? largest(values);
  peaks.set(values, top);
  return top;
}

/** @param {Maps} maps */
export function headsOf(maps) {
  return maps.values.shape.length === 4 ? maps.values.shape[1] : 1;
}

/**
 * The largest absolute number.
 *
 * @param {ArrayLike<number>} values
 * @returns {number} 0 if there is none
 */
export function largest(values) {
  let top = 0;
  for (let index = 0; index < values.length; index++) {
    const size = values[index] < 0 ? -values[index] : values[index];
    if (size > top) top = size;
  }
  return top;
}

/**
 * @param {Example} example
 * @param {Choice} choice
 * @returns {{ maps: Maps, indices: number[], layer: number | null } | null} the maps to take the mean of, numbered
 *   through the leading axes; and the place of the layer if it is one
 */
function find(example, { method, stack, layer, head }) {
  const { heads, together } = mapsOf(example, method, stack);
  const maps = (head === "all" && together) || heads || together;
  if (!maps) return null;
  const count = headsOf(maps);
  const places = layer === "all" ? maps.layers.map((_, place) => place) : [maps.layers.indexOf(layer)];
  const picked = head === "all" || maps === together ? [...Array(count).keys()] : [head];
  if (places[0] === -1 || picked[0] >= count) return null;
  const indices = places.flatMap((place) => picked.map((one) => place * count + one));
  return { maps, indices, layer: places.length === 1 ? places[0] : null };
}

/**
 * @param {Maps} maps
 * @param {number[]} indices
 * @returns {Float32Array} a part of the array itself where there is one index; the same object each time
 */
function meanOf(maps, indices) {
  const { shape, values } = maps.values;
  const size = shape[shape.length - 2] * shape[shape.length - 1];
  const kept = means.get(maps) ?? new Map();
  means.set(maps, kept);
  const key = indices.join();
  const known = kept.get(key);
  if (known) return known;
  if (indices.length === 1) {
    kept.set(key, values.subarray(indices[0] * size, (indices[0] + 1) * size));
    return kept.get(key);
  }
  const mean = new Float32Array(size);
  for (const index of indices) {
    for (let entry = 0; entry < size; entry++) mean[entry] += values[index * size + entry] / indices.length;
  }
  if (kept.size >= KEPT_MEANS) kept.clear();
  kept.set(key, mean);
  return mean;
}

/** @param {Maps} maps */
function maximaOf(maps) {
  let tops = maxima.get(maps);
  if (!tops) {
    const { shape, values } = maps.values;
    const size = shape[shape.length - 2] * shape[shape.length - 1];
    tops = Float32Array.from({ length: shape[0] * headsOf(maps) }, (_, index) =>
      largest(values.subarray(index * size, (index + 1) * size)),
    );
    maxima.set(maps, tops);
  }
  return tops;
}
