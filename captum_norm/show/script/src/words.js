/** @import { Example, Links, Maps, NumberArray, Place, Scores, Tokens } from "./types.js" */

/**
 * From tokens to words: the number of the word of each token, where a token outside of all words is one of its own.
 *
 * @typedef {{ of: number[], count: number }} Grouping
 */

/**
 * @param {Tokens} tokens
 * @returns {Grouping}
 */
export function groupingOf({ texts, words }) {
  /** @type {Map<number, number>} */
  const known = new Map();
  let count = 0;
  const of = texts.map((_, index) => {
    const word = words ? words[index] : -1;
    const number = known.get(word) ?? count++;
    if (word !== -1) known.set(word, number);
    return number;
  });
  return { of, count };
}

/**
 * Makes an example of words from one of tokens. Scores, and the columns of maps, are the sums of a word's tokens; rows
 * of maps are their means. The graph stays that of the tokens: only with its thresholds it is known what to join.
 *
 * @param {Example} example
 * @returns {Example} the same one if no word has several tokens
 */
export function asWords(example) {
  const inputs = groupingOf(example.inputs);
  const rows = example.outputs ? groupingOf(example.outputs) : inputs;
  if (inputs.count === inputs.of.length && rows.count === rows.of.length) return withTexts(example);
  return {
    ...example,
    inputs: wordsOf(example.inputs, inputs),
    outputs: example.outputs && wordsOf(example.outputs, rows),
    scores: example.scores.map((scores) => groupScores(scores, inputs)),
    maps: example.maps.map((maps) => groupMaps(maps, rows, inputs)),
    links: example.links.map((links) => groupLinks(links, rows, inputs)),
    counted: example.counted && groupMarks(example.counted, inputs),
    dependent: example.dependent && groupMarks(example.dependent, rows),
    pieces: example,
    pictures: example.pictures.map((picture) => ({
      ...picture,
      positions: picture.positions.map((line) => line.map((index) => inputs.of[index] ?? -1)),
    })),
    row: example.row === null ? null : rows.of[example.row],
  };
}

/**
 * Moves places from tokens to words, or from words to their first tokens.
 *
 * @param {Place[]} places
 * @param {Example} example of tokens
 * @param {boolean} words whether to words
 * @returns {Place[]} each once
 */
export function movedPlaces(places, example, words) {
  const moved = places.map(({ side, index }) => {
    const { of } = groupingOf(side === "output" && example.outputs ? example.outputs : example.inputs);
    return { side, index: words ? (of[index] ?? -1) : of.indexOf(index) };
  });
  return moved.filter((place, at) => place.index >= 0 && moved.findIndex(({ index }) => index === place.index) === at);
}

/** @param {Example} example whose words have one token each */
function withTexts(example) {
  const { inputs, outputs } = example;
  if (!inputs.word_texts && !outputs?.word_texts) return example;
  return {
    ...example,
    inputs: wordsOf(inputs, groupingOf(inputs)),
    outputs: outputs && wordsOf(outputs, groupingOf(outputs)),
  };
}

/**
 * @param {Tokens} tokens
 * @param {Grouping} grouping
 * @returns {Tokens}
 */
function wordsOf({ texts, words, word_texts, likely }, { of, count }) {
  /** @type {string[]} */
  const joined = Array(count).fill("");
  texts.forEach((text, index) => {
    const given = words && words[index] !== -1 ? word_texts?.[words[index]] : undefined;
    joined[of[index]] = given ?? joined[of[index]] + text;
  });
  /** @type {(word: number) => string} */
  const next = (word) => likely?.filter((_, index) => of[index] === word).join("; then ") ?? "";
  return { texts: joined, words: null, word_texts: null, likely: likely && joined.map((_, word) => next(word)) };
}

/**
 * @param {Scores} scores
 * @param {Grouping} grouping
 * @returns {Scores}
 */
function groupScores(scores, { of, count }) {
  const values = new Float32Array(count);
  scores.values.values.forEach((value, index) => (values[of[index]] += value));
  return { ...scores, values: { shape: [count], values } };
}

/**
 * @param {Maps} maps
 * @param {Grouping} rows
 * @param {Grouping} columns
 * @returns {Maps}
 */
function groupMaps(maps, rows, columns) {
  const { shape, values } = maps.values;
  const [height, width] = [rows.of.length, columns.of.length];
  const count = height * width ? values.length / (height * width) : 0;
  const sizes = new Float32Array(rows.count);
  rows.of.forEach((row) => sizes[row]++);
  const grouped = new Float32Array(count * rows.count * columns.count);
  let place = 0;
  for (let map = 0; map < count; map++) {
    for (let row = 0; row < height; row++) {
      const start = (map * rows.count + rows.of[row]) * columns.count;
      const share = 1 / sizes[rows.of[row]];
      for (let column = 0; column < width; column++) grouped[start + columns.of[column]] += share * values[place++];
    }
  }
  /** @type {NumberArray} */
  const array = { shape: [...shape.slice(0, -2), rows.count, columns.count], values: grouped };
  return { ...maps, values: array };
}

/**
 * @param {Links} links
 * @param {Grouping} rows
 * @param {Grouping} columns
 * @returns {Links}
 */
function groupLinks(links, rows, columns) {
  /** @type {Map<string, [number, number, number | null]>} */
  const best = new Map();
  for (const [row, column, probability] of links.links) {
    const key = `${rows.of[row]} ${columns.of[column]}`;
    const known = best.get(key);
    const higher = known ? Math.max(known[2] ?? 0, probability ?? 0) : probability;
    best.set(key, [rows.of[row], columns.of[column], probability === null ? null : higher]);
  }
  /** @param {[number, number][] | null} pairs @returns {[number, number][] | null} */
  const once = (pairs) => {
    if (!pairs) return null;
    /** @type {[string, [number, number]][]} */
    const moved = pairs.map(([row, column]) => [
      `${rows.of[row]} ${columns.of[column]}`,
      [rows.of[row], columns.of[column]],
    ]);
    return [...new Map(moved).values()];
  };
  return { ...links, links: [...best.values()], sure: once(links.sure), possible: once(links.possible) };
}

/**
 * @param {boolean[]} marks
 * @param {Grouping} grouping
 * @returns {boolean[]} whether a word has a marked token
 */
function groupMarks(marks, { of, count }) {
  const grouped = Array(count).fill(false);
  marks.forEach((mark, index) => (grouped[of[index]] ||= mark));
  return grouped;
}
