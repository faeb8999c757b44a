/** @import { Cell } from "./panel.js" */

import { formatted, h } from "../dom.js";

/**
 * @param {Float32Array} values
 * @param {number} columns
 * @param {number} count
 * @returns {(Cell & { value: number })[]} those furthest from zero
 */
export function largestEntries(values, columns, count) {
  /** @type {number[]} */
  const best = [];
  for (let index = 0; index < values.length; index++) {
    const size = Math.abs(values[index]);
    if (!size || (best.length === count && size <= Math.abs(values[best[count - 1]]))) continue;
    let at = best.length;
    while (at > 0 && Math.abs(values[best[at - 1]]) < size) at--;
    best.splice(at, 0, index);
    best.length = Math.min(best.length, count);
  }
  return best.map((index) => ({ row: Math.floor(index / columns), column: index % columns, value: values[index] }));
}

/**
 * @param {HTMLTableElement} list
 * @param {(Cell & { value: number })[]} entries
 * @param {string[]} rows
 * @param {string[]} columns
 */
export function fillList(list, entries, rows, columns) {
  const names = h(
    "tr",
    {},
    h("th", { scope: "col" }, "receives"),
    h("th", { scope: "col" }, "from"),
    h("th", { scope: "col" }, "value"),
  );
  list.replaceChildren(
    names,
    ...entries.map(({ row, column, value }) =>
      h(
        "tr",
        {},
        h("td", { dir: "auto" }, rows[row]),
        h("td", { dir: "auto" }, columns[column]),
        h("td", { class: "number" }, formatted(value)),
      ),
    ),
  );
}
