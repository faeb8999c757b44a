/** @import { State, Table, View } from "../types.js" */

import { paint } from "../colors.js";
import { h } from "../dom.js";
import { digitsFor, written } from "../layouts/numbers.js";
import { numberOf, sortedRows, tabSeparated } from "../layouts/sorting.js";

/** @typedef {string | number | null} Cell */

/** The most characters of texts that have one line each. */
const SHORT = 16;

/** The first table: what was found. @type {View} */
export const findings = {
  name: "findings",
  title: "Findings",
  applies: (page) => page.tables.length > 0,
  create: (page, _example, state) => h("div", { "data-answer": "" }, sectionOf(page.tables[0], state)),
};

/** @type {View} */
export const table = {
  name: "table",
  title: "Tables",
  applies: (page) => page.tables.length > 1,
  create: (page, _example, state) => h("div", {}, ...page.tables.slice(1).map((one) => sectionOf(one, state))),
};

/**
 * @param {Table} table
 * @param {State} state
 */
function sectionOf(table, state) {
  const content = () => [
    gridOf(table, state),
    ...(table.note ? [h("p", { class: "quiet" }, table.note)] : []),
    ...meanings(table),
  ];
  if (!table.folded) return h("section", {}, h("h3", {}, table.title), ...content());
  const folded = h("details", {}, h("summary", {}, h("h3", {}, table.title)));
  // A folded table is built when it is first opened.
  folded.addEventListener("toggle", () => folded.append(...content()), { once: true });
  return h("section", {}, folded);
}

/**
 * The table with its buttons: one on each column to sort by it, one to copy.
 *
 * @param {Table} table
 * @param {State} state
 */
function gridOf({ title, columns, rows, strong }, state) {
  const bold = new Set(strong.map(([row, column]) => `${row} ${column}`));
  const cells = columns.map((column, at) =>
    cellsOf(
      column,
      rows.map((row) => row[at]),
      state,
    ),
  );
  const lines = rows.map((_, row) => h("tr", {}, ...columns.map((_, column) => cells[column][row])));
  rows.forEach((_, row) =>
    columns.forEach((_, at) => cells[at][row].classList.toggle("strong", bold.has(`${row} ${at}`))),
  );
  const body = h("tbody", {}, ...lines);
  let order = [...rows.keys()];
  /** @type {{ at: number, descending: boolean } | null} */
  let sorted = null;
  const headers = columns.map(({ name, kind, meaning }, at) => {
    const button = h("button", { type: "button", title: meaning }, name);
    const header = h("th", { scope: "col", class: kind }, button);
    button.addEventListener("click", () => {
      // Numbers are first looked at from the largest.
      sorted = { at, descending: sorted?.at === at ? !sorted.descending : kind !== "text" };
      order = sortedRows(rows, at, kind === "text", sorted.descending);
      body.append(...order.map((row) => lines[row]));
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending");
    });
    return header;
  });
  const copy = h("button", { type: "button", class: "copy", title: "as tab-separated values, in this order" }, "Copy");
  copy.addEventListener("click", async () => {
    const text = tabSeparated(
      columns.map(({ name }) => name),
      order.map((row) => rows[row]),
    );
    copy.textContent = (await copied(text)) ? "Copied" : "The browser refused";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  const grid = h("table", {}, h("thead", {}, h("tr", {}, ...headers)), body);
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, grid);
  return h("div", { class: "sortable" }, scroll, h("div", { class: "tools", "aria-live": "polite" }, copy));
}

/**
 * The cells of a column.
 *
 * @param {Table["columns"][number]} column
 * @param {Cell[]} column's
 * @param {State} state
 * @returns {HTMLElement[]}
 */
function cellsOf({ kind, digits }, column, state) {
  const decimals = digits ?? digitsFor(column);
  const texts = column.map((cell) => (cell === null ? "–" : typeof cell === "string" ? cell : written(cell, decimals)));
  const short = kind === "text" && texts.every((text) => text.length <= SHORT) ? " short" : "";
  if (kind === "text" || kind === "number")
    return texts.map((text) => h("td", { class: kind + short, dir: "auto" }, text));
  const numbers = column.map((cell) => numberOf(cell) ?? 0);
  if (kind === "signed") {
    const low = Math.min(0, ...numbers);
    const width = Math.max(0, ...numbers) - low || 1;
    return texts.map((text, row) => h("td", { class: kind }, h("span", {}, text), barOf(numbers[row], low, width)));
  }
  const top = Math.max(...numbers.map(Math.abs)) || 1;
  const cells = texts.map((text) => h("td", { class: kind }, text));
  const color = () => cells.forEach((cell, row) => paint(cell, numbers[row] / top, state.get("theme")));
  color();
  state.subscribe(["theme"], color);
  return cells;
}

/**
 * A bar from the zero line.
 *
 * @param {number} value
 * @param {number} low where the scale starts
 * @param {number} width of the scale
 */
function barOf(value, low, width) {
  const bar = h("i", { class: value < 0 ? "bar below" : "bar" });
  bar.style.left = `${(100 * (Math.min(value, 0) - low)) / width}%`;
  bar.style.width = `${(100 * Math.abs(value)) / width}%`;
  const zero = h("i", { class: "zero" });
  zero.style.left = `${(-100 * low) / width}%`;
  return h("span", { class: "bars", "aria-hidden": "true" }, bar, zero);
}

/** What the columns mean, for those without a pointer that could rest on them. @param {Table} table */
function meanings({ columns }) {
  const told = columns.filter(({ meaning }) => meaning);
  if (!told.length) return [];
  const list = told.map(({ name, meaning }) => h("div", {}, h("dt", {}, name), h("dd", {}, meaning)));
  return [h("details", { class: "quiet" }, h("summary", {}, "What the columns mean"), h("dl", {}, ...list))];
}

/**
 * @param {string} text
 * @returns {Promise<boolean>} whether it is in the clipboard
 */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // In a frame, as of a notebook, it may be forbidden; the older way is not.
    const area = h("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
