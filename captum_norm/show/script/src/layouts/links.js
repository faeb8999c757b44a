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
 * @param {number} most how many lines there are at most: the strongest
 * @param {object} [which] the entries to take
 * @param {(input: number, output: number) => boolean} [which.wanted] all by default
 * @param {boolean} [which.own] whether an output's own input counts, as it does unless both are the same tokens
 * @param {{ input: number[], output: number[] }} [which.among] the tokens to look at, all by default
 * @param {number} [which.top] the largest absolute entry that counts, if it is known
 * @returns {{ lines: MapLine[], above: number, top: number }} `above` counts all entries that are not 0, `top` is the
 *   largest absolute entry that counts
 */
export function mapLines(values, columns, most, { wanted = () => true, own = true, among, top = 0 } = {}) {
  const rows = values.length / columns;
  const before = columns - rows;
  const outputs = among?.output ?? Array.from({ length: rows }, (_, row) => row);
  const inputs = among?.input ?? Array.from({ length: columns }, (_, column) => column);
  let [above, least] = [0, 0];
  /** @type {MapLine[]} */
  let lines = [];
  const cut = () => {
    lines.sort((one, other) => Math.abs(one.value) - Math.abs(other.value));
    lines = lines.slice(Math.max(0, lines.length - most));
    if (lines.length === most && most) least = Math.abs(lines[0].value);
  };
  for (const output of outputs) {
    for (const input of inputs) {
      if (!own && input === output + before) continue;
      const value = values[output * columns + input];
      const size = value < 0 ? -value : value;
      if (!(size > 0)) continue;
      if (size > top) top = size;
      if (!wanted(input, output)) continue;
      above += 1;
      if (size <= least && lines.length >= most) continue;
      lines.push({ input, output, value, share: 0 });
      if (lines.length >= 2 * most + 64) cut();
    }
  }
  cut();
  return { lines: lines.map((line) => ({ ...line, share: line.value / top })), above, top };
}

/**
 * Lays the lines of several maps over each other, each relative to the largest entry of its own map.
 *
 * @param {ReturnType<typeof mapLines>[]} maps
 * @param {number} most how many lines there are at most: the strongest
 * @returns {{ lines: (MapLine & { map: number })[], above: number, tops: number[] }} `map` is the place of a line's map
 */
export function overlaid(maps, most) {
  const lines = maps.flatMap(({ lines }, map) => lines.map((line) => ({ ...line, map })));
  lines.sort((one, other) => Math.abs(one.share) - Math.abs(other.share));
  return {
    lines: lines.slice(Math.max(0, lines.length - most)),
    above: maps.reduce((sum, { above }) => sum + above, 0),
    tops: maps.map(({ top }) => top),
  };
}

/**
 * Says which tokens a reader picked: those in which one of the words typed stands; all, if there are none.
 *
 * @param {string[]} texts
 * @param {string} typed words with spaces between them
 * @returns {boolean[]}
 */
export function pickedTokens(texts, typed) {
  const words = typed.toLocaleLowerCase().split(/\s+/).filter(Boolean);
  return texts.map((text) => !words.length || words.some((word) => text.toLocaleLowerCase().includes(word)));
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
