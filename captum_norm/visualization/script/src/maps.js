/** @import { Example, Maps, NumberArray, Stack, Values } from "./types.js" */

/**
 * One map: rows are outputs, columns inputs.
 *
 * @typedef {{ values: Float32Array, rows: number, columns: number, unit: string, signed: boolean }} Grid
 */

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
 * @param {Pick<Values, "method" | "stack" | "layer" | "head">} choice
 * @returns {Grid | null} null where there is no such map
 */
export function gridOf(example, { method, stack, layer, head }) {
  const { heads, together } = mapsOf(example, method, stack);
  const maps = (head === "all" && together) || heads || together;
  if (!maps) return null;
  const [rows, columns] = maps.values.shape.slice(-2);
  const count = maps.values.shape.length === 4 ? maps.values.shape[1] : 1;
  const places = layer === "all" ? maps.layers.map((_, place) => place) : [maps.layers.indexOf(layer)];
  const picked = head === "all" || count === 1 ? [...Array(count).keys()] : [head];
  if (places[0] === -1 || picked[0] >= count) return null;
  const indices = places.flatMap((place) => picked.map((one) => place * count + one));
  return { values: meanOf(maps.values, indices), rows, columns, unit: maps.unit, signed: maps.signed };
}

/**
 * The mean of some of the maps of an array, numbered through its leading axes.
 *
 * @param {NumberArray} array
 * @param {number[]} indices
 * @returns {Float32Array} a view of the array itself where there is one index
 */
export function meanOf({ shape, values }, indices) {
  const size = shape[shape.length - 2] * shape[shape.length - 1];
  const parts = indices.map((index) => values.subarray(index * size, (index + 1) * size));
  if (parts.length === 1) return parts[0];
  const mean = new Float32Array(size);
  for (const part of parts) for (let entry = 0; entry < size; entry++) mean[entry] += part[entry] / parts.length;
  return mean;
}

/**
 * The largest absolute number.
 *
 * @param {ArrayLike<number>} values
 * @returns {number} 0 if there is none
 */
export function largest(values) {
  let top = 0;
  for (let index = 0; index < values.length; index++) top = Math.max(top, Math.abs(values[index]));
  return top;
}
