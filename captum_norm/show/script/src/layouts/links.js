// Which lines connect two columns of tokens: the entries of a map, and links beside gold links.

/**
 * A line from an input to an output.
 * @typedef {{ input: number, output: number, value: number, share: number }} MapLine
 */

/**
 * A link, or a gold link that is missing.
 *
 * `kind` is `link` without gold links; else `sure` or `possible` as the gold link that it agrees with, `wrong` if there
 * is none, and `missed` for a sure gold link without a link.
 * @typedef {{ input: number, output: number, probability: number | null,
 *   kind: "link" | "sure" | "possible" | "wrong" | "missed" | "gold sure" | "gold possible" }} ClassedLink
 */

/**
 * Chooses the entries of a map to draw, the weakest first, so that strong lines are on top.
 *
 * @param {ArrayLike<number>} values the map, row by row: a row for each output, a column for each input
 * @param {number} columns the number of inputs
 * @param {number} threshold the smallest share of the largest absolute entry, from 0 to 1
 * @param {number} most the largest number of lines; weaker ones are left out
 * @param {object} [which] the entries to take
 * @param {(input: number, output: number) => boolean} [which.wanted] all by default
 * @param {boolean} [which.own] whether an output's own input counts, as it does unless both are the same tokens
 * @returns {{ lines: MapLine[], above: number, top: number }} `above` counts all entries that are as large as the
 *   threshold asks, `top` is the largest absolute entry that counts
 */
export function mapLines(values, columns, threshold, most, { wanted = () => true, own = true } = {}) {
  const before = columns - values.length / columns;
  let top = 0;
  /** @param {(value: number, input: number, output: number) => void} visit */
  const each = (visit) => {
    for (let index = 0; index < values.length; index += 1) {
      const input = index % columns;
      const output = (index - input) / columns;
      if (own || input !== output + before) visit(values[index], input, output);
    }
  };
  each((value) => (top = Math.max(top, Math.abs(value) || 0)));
  /** @type {MapLine[]} */
  const lines = [];
  if (top === 0) return { lines, above: 0, top };
  each((value, input, output) => {
    const share = value / top;
    if (Math.abs(share) >= threshold && value !== 0 && wanted(input, output))
      lines.push({ input, output, value, share });
  });
  lines.sort((one, other) => Math.abs(one.share) - Math.abs(other.share));
  return { lines: lines.slice(Math.max(0, lines.length - most)), above: lines.length, top };
}

/**
 * Compares links with gold links; each link and each missed sure one once, in the order of inputs.
 *
 * @param {Iterable<[number, number, (number | null)?]>} links
 * @param {Iterable<[number, number]> | null | undefined} sure the sure gold links, or nothing without gold links
 * @param {Iterable<[number, number]> | null | undefined} possible the possible ones, with or without the sure ones
 * @returns {ClassedLink[]}
 */
export function classified(links, sure, possible) {
  const gold = sure || possible;
  const sureKeys = new Set([...(sure ?? [])].map(([input, output]) => `${input} ${output}`));
  const possibleKeys = new Set([...(possible ?? [])].map(([input, output]) => `${input} ${output}`));
  /** @type {Map<string, ClassedLink>} */
  const found = new Map();
  for (const [input, output, probability = null] of links) {
    const key = `${input} ${output}`;
    const kind = !gold ? "link" : sureKeys.has(key) ? "sure" : possibleKeys.has(key) ? "possible" : "wrong";
    found.set(key, { input, output, probability, kind });
  }
  for (const key of sureKeys) {
    const [input, output] = key.split(" ").map(Number);
    if (!found.has(key)) found.set(key, { input, output, probability: null, kind: "missed" });
  }
  return [...found.values()].sort((one, other) => one.input - other.input || one.output - other.output);
}

/**
 * Counts the links of each kind.
 * @param {ClassedLink[]} links
 * @returns {Record<string, number>}
 */
export function counts(links) {
  /** @type {Record<string, number>} */
  const found = {};
  for (const { kind } of links) found[kind] = (found[kind] ?? 0) + 1;
  return found;
}

/**
 * A curve that leaves and arrives horizontally, as the `d` of an SVG path.
 * @param {number} x0 @param {number} y0 @param {number} x1 @param {number} y1
 */
export function curve(x0, y0, x1, y1) {
  const middle = round((x0 + x1) / 2);
  return `M${round(x0)} ${round(y0)}C${middle} ${round(y0)} ${middle} ${round(y1)} ${round(x1)} ${round(y1)}`;
}

/** @param {number} value */
function round(value) {
  return Math.round(value * 10) / 10;
}
