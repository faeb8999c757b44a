/** @import { Example, NumberArray, Page, RawArray, RawExample } from "./types.js" */

const KEPT = 4;
/** Maps of single heads with more entries are decoded when they are asked for. */
const MANY = 1_000_000;

/**
 * Parses the data in the page.
 *
 * @param {Document} document
 * @returns {Page}
 */
export function parsePage(document) {
  return JSON.parse(/** @type {HTMLElement} */ (document.getElementById("page")).textContent ?? "");
}

/**
 * Returns what opens an example: decodes its arrays, and keeps the last few.
 *
 * @param {Page} page
 * @returns {(index: number, heads: boolean) => Promise<Example>} `heads`: with the maps of single heads, however many
 */
export function opener(page) {
  /** @type {Map<string, Promise<Example>>} */
  const opened = new Map();
  return (index, heads) => {
    const key = `${index} ${heads}`;
    const example = opened.get(key) ?? decodeExample(page.examples[index], heads);
    opened.delete(key);
    opened.set(key, example);
    if (opened.size > KEPT) opened.delete(/** @type {string} */ (opened.keys().next().value));
    return example;
  };
}

/**
 * @param {RawExample} example
 * @param {boolean} [heads]
 * @returns {Promise<Example>}
 */
export async function decodeExample(example, heads = true) {
  const late = heads ? [] : example.maps.filter((maps) => isLate(example, maps));
  /** @type {<T extends { values: RawArray }>(entries: T[]) => Promise<(Omit<T, "values"> & { values: NumberArray })[]>} */
  const decoded = (entries) =>
    Promise.all(entries.map(async (entry) => ({ ...entry, values: await decode(entry.values) })));
  const now = example.maps.filter((maps) => !late.includes(maps));
  const [scores, maps, components] = await Promise.all([
    decoded(example.scores),
    decoded(now),
    decoded(example.components),
  ]);
  const later = late.reduce((sum, { values: { shape } }) => sum + shape[0] * shape[1], 0);
  return { ...example, scores, maps, components, later };
}

/** @type {(example: RawExample, maps: RawExample["maps"][number]) => boolean} */
function isLate(example, { method, stack, values: { shape } }) {
  const together = example.maps.some(
    (other) => other.method === method && other.stack === stack && other.values.shape.length === 3,
  );
  return shape.length === 4 && together && shape.reduce((product, size) => product * size, 1) > MANY;
}

/**
 * Decodes an array: the inverse of `encode` in captum_norm/show/page/encoding.py.
 *
 * @param {RawArray} array
 * @returns {Promise<NumberArray>}
 */
export async function decode({ shape, dtype, max, data }) {
  const bytes = await inflate(bytesOf(data));
  const count = shape.reduce((product, size) => product * size, 1);
  const values = new Float32Array(count);
  if (dtype === "i1") {
    const [rows, columns] = shape.slice(-2);
    const entries = new Int8Array(bytes.buffer);
    for (let index = 0; index < count; index++) {
      const map = Math.floor(index / (rows * columns));
      const [column, row] = [Math.floor(index / rows) % columns, index % rows];
      values[map * rows * columns + row * columns + column] = (entries[index] / 127) * max[map];
    }
    return { shape, values };
  }
  const width = dtype === "f4" ? 4 : 2;
  const view = new DataView(interleaved(bytes, width).buffer);
  for (let index = 0; index < count; index++) {
    values[index] = dtype === "f4" ? view.getFloat32(4 * index, true) : half(view.getUint16(2 * index, true)) * max[0];
  }
  return { shape, values };
}

/** @param {string} text base64 */
function bytesOf(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let index = 0; index < bytes.length; index++) bytes[index] = characters.charCodeAt(index);
  return bytes;
}

/**
 * Reads a number in half precision (IEEE 754, binary16).
 *
 * @param {number} bits
 * @returns {number}
 */
export function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size = exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15);
  return bits & 0x8000 ? -size : size;
}

/**
 * From all first bytes, all second bytes ... to the bytes of one entry after the other.
 *
 * @param {Uint8Array} planes
 * @param {number} width bytes of an entry
 * @returns {Uint8Array}
 */
function interleaved(planes, width) {
  const bytes = new Uint8Array(planes.length);
  const count = planes.length / width;
  for (let plane = 0; plane < width; plane++) {
    for (let index = 0; index < count; index++) bytes[index * width + plane] = planes[plane * count + index];
  }
  return bytes;
}

/**
 * @param {Uint8Array<ArrayBuffer>} bytes compressed with zlib
 * @returns {Promise<Uint8Array>}
 */
async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
