/** @import { Example, Place, State, Values } from "./types.js" */

import { shortened } from "./drawing/layout.js";
import { gridOf } from "./grids.js";

const LONGEST = 24;

/**
 * The numbers to colour tokens by.
 *
 * @typedef {object} Reading
 * @property {"scores" | "row" | "column" | "rows"} kind scores; a row or column of a map; the mean of its rows
 * @property {Float32Array} values
 * @property {"input" | "output"} side of which tokens they are
 * @property {string} unit
 * @property {boolean} signed
 * @property {number} [total] of a difference: what its shares are of, the larger sum of the two
 */

/**
 * Reads what belongs to the places pointed at: a row of the map for an output, a column for an input; the difference of
 * two where there are two. Without places, the method's scores, or the explained row, or the mean of all rows.
 *
 * @param {Example} example
 * @param {Pick<Values, "method" | "stack" | "layer" | "head">} choice
 * @param {Place[]} places none, one, or two of the same side
 * @returns {Reading | null} null where the method has nothing to show
 */
export function read(example, choice, places) {
  const grid = gridOf(example, choice);
  const scores = example.scores.find(({ method }) => method === choice.method);
  const picked = grid && !places.length && !scores && example.row !== null ? [rowPlace(example.row)] : places;
  if (!grid || (!picked.length && scores)) {
    return scores ? { kind: "scores", side: "input", ...scores, values: scores.values.values } : null;
  }
  const { unit, signed } = grid;
  if (!picked.length) return { kind: "rows", side: "input", unit, signed, values: meanRow(grid) };
  const lines = picked.map(({ side, index }) => (side === "output" ? row(grid, index) : column(grid, index)));
  const values = lines.length > 1 ? lines[0].map((value, index) => value - lines[1][index]) : lines[0];
  const along = picked[0].side === "output";
  return {
    kind: along ? "row" : "column",
    side: along ? "input" : "output",
    unit,
    signed: signed || lines.length > 1,
    values,
    ...(lines.length > 1 ? { total: Math.max(...lines.map(sumOf)) } : {}),
  };
}

/** @param {Float32Array} values */
function sumOf(values) {
  return values.reduce((sum, value) => sum + Math.abs(value), 0);
}

/**
 * The places that count: what is pinned, else what is pointed at.
 *
 * @param {State} state
 * @returns {Place[]}
 */
export function activePlaces(state) {
  const hover = state.get("hover");
  const pins = state.get("pins");
  return pins.length ? pins : hover ? [hover] : [];
}

/**
 * Pins a token, or unpins it. A third one takes the place of the second, one of the other side that of all.
 *
 * @param {Place[]} pins
 * @param {Place} place
 * @returns {Place[]}
 */
export function togglePin(pins, place) {
  const same = pins.filter(({ side }) => side === place.side);
  const others = same.filter(({ index }) => index !== place.index);
  return others.length < same.length ? others : [...same.slice(0, 1), place];
}

/**
 * Says which tokens have the largest numbers.
 *
 * @param {ArrayLike<number>} values
 * @param {string[]} texts
 * @param {number} count
 * @param {(value: number) => string} written how numbers are written
 * @returns {string} "guitar 41 % · stage 20 %"; empty where all are zero
 */
export function topText(values, texts, count, written) {
  return [...texts.keys()]
    .filter((index) => values[index] !== 0)
    .sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]))
    .slice(0, count)
    .map((index) => `${shortened(texts[index], LONGEST)} ${written(values[index])}`)
    .join(" · ");
}

/** @param {number} index @returns {Place} */
function rowPlace(index) {
  return { side: "output", index };
}

/** @typedef {import("./grids.js").Grid} Grid */

/** @param {Grid} grid @param {number} index */
function row({ values, columns }, index) {
  return values.subarray(index * columns, (index + 1) * columns);
}

/** @param {Grid} grid @param {number} index */
function column({ values, rows, columns }, index) {
  return Float32Array.from({ length: rows }, (_, place) => values[place * columns + index]);
}

/** @param {Grid} grid */
function meanRow({ values, rows, columns }) {
  const mean = new Float32Array(columns);
  values.forEach((value, place) => (mean[place % columns] += value / rows));
  return mean;
}
