// The order of the rows of a table, and the table as text.

/** @typedef {string | number | null} Cell */

const collator = new Intl.Collator("en", { numeric: true });

/**
 * The number of a cell: the cell itself, or the number that its text begins with; null if there is none.
 * @param {Cell} cell
 * @returns {number | null}
 */
export function numberOf(cell) {
  if (typeof cell === "number") return Number.isNaN(cell) ? null : cell;
  const found = /^\s*[-−+]?\s*\d[\d,]*(\.\d+)?(e[-+]?\d+)?|^\s*[-−+]?\.\d+/i.exec(cell ?? "");
  return found ? Number(found[0].replace("−", "-").replace(/[,\s]/g, "")) : null;
}

/**
 * The indices of the rows in the order of a column; equal rows keep their order, empty cells come last either way.
 *
 * @param {Cell[][]} rows
 * @param {number} column
 * @param {boolean} textual whether the column has words, else numbers
 * @param {boolean} descending
 * @returns {number[]}
 */
export function sortedRows(rows, column, textual, descending) {
  const keys = rows.map((row) => (textual ? row[column] : numberOf(row[column])));
  const empty = (/** @type {Cell} */ key) => key === null || key === "";
  const sign = descending ? -1 : 1;
  return rows
    .map((_, index) => index)
    .sort((one, other) => {
      const [a, b] = [keys[one], keys[other]];
      if (empty(a) || empty(b)) return Number(empty(a)) - Number(empty(b)) || one - other;
      const order = textual ? collator.compare(String(a), String(b)) : Number(a) - Number(b);
      return sign * order || one - other;
    });
}

/**
 * The texts that contain what is searched, in an order: by the number explained, the largest first, or by its
 * probability, the smallest first. Texts without such a number come last.
 *
 * @param {{ title: string, value: number | null, probability: number | null }[]} texts
 * @param {string} order `order`, `score` or `surprise`
 * @param {string} search
 * @returns {number[]} their indices
 */
export function textOrder(texts, order, search) {
  const rows = texts.map(({ value, probability }) => [order === "score" ? value : probability]);
  const sorted = order === "order" ? [...texts.keys()] : sortedRows(rows, 0, false, order === "score");
  const wanted = search.trim().toLowerCase();
  return sorted.filter((index) => texts[index].title.toLowerCase().includes(wanted));
}

/**
 * A table as tab-separated values, for a spreadsheet; tabs and line breaks within cells become spaces.
 *
 * @param {string[]} header
 * @param {Cell[][]} rows
 */
export function tabSeparated(header, rows) {
  const line = (/** @type {Cell[]} */ cells) =>
    cells.map((cell) => String(cell ?? "").replace(/[\t\r\n\v\f\u0085\u2028\u2029]+/g, " ")).join("\t");
  return [header, ...rows].map(line).join("\n");
}
