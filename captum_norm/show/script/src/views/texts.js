/** @import { Page, State, View } from "../types.js" */

import { decode } from "../data.js";
import { formatted, h, select } from "../dom.js";
import { paintEntries } from "../drawing/canvas.js";
import { largest } from "../grids.js";
import { percent } from "../layouts/numbers.js";
import { textOrder } from "../layouts/sorting.js";

/** Of fewer texts, the choice of one is enough. */
const FEW = 8;

/** @type {View} */
export const texts = {
  name: "texts",
  title: "Texts",
  applies: (page) => page.examples.length > FEW,
  create: (page, _example, state) => createTexts(page, state),
};

/**
 * All texts, each with its scores as a small strip: searched, sorted, and chosen by a click.
 *
 * @param {Page} page
 * @param {State} state
 */
function createTexts(page, state) {
  const rows = page.examples.map((example, index) => {
    const strip = h("canvas", { "aria-hidden": "true" });
    const numbers = [
      ...(example.value === null ? [] : [formatted(example.value)]),
      ...(example.probability === null ? [] : [percent(example.probability)]),
    ];
    const button = h(
      "button",
      { type: "button", "aria-pressed": String(index === state.get("example")) },
      h("span", { class: "number" }, String(index + 1)),
      h("bdi", {}, example.title),
      strip,
      h("span", { class: "number" }, numbers.join(" · ")),
    );
    button.addEventListener("click", () => state.set({ example: index, pins: [], hover: null, cell: null }));
    return { strip, item: h("li", {}, button) };
  });
  const list = h("ol", { class: "overview", "aria-label": "texts" });
  const count = h("span", { class: "quiet", role: "status" });
  const search = h("input", { type: "search", "aria-label": "Search the texts", placeholder: "Search" });
  /** @type {[value: string, text: string][]} */
  const orders = [["order", "as given"]];
  if (page.examples.some(({ value }) => value !== null)) orders.push(["score", "by score"]);
  if (page.examples.some(({ probability }) => probability !== null)) orders.push(["surprise", "by surprise"]);
  let order = "order";
  const show = () => {
    const shown = textOrder(page.examples, order, search.value);
    list.replaceChildren(...shown.map((index) => rows[index].item));
    count.textContent = search.value ? `${shown.length} of ${rows.length}` : "";
  };
  search.addEventListener("input", show);
  const choice = select("Sort", orders, order, (value) => {
    order = value;
    show();
  });
  show();
  const draw = async () => {
    for (const [index, { scores }] of page.examples.entries()) {
      if (!scores.length) continue;
      const { values } = await decode(scores[0].values);
      const grid = { values, rows: 1, columns: values.length };
      paintEntries(rows[index].strip, grid, largest(values), state.get("theme"));
    }
  };
  draw();
  state.subscribe(["theme"], draw);
  return h("div", {}, h("div", { class: "tools" }, search, ...(orders.length > 1 ? [choice] : []), count), list);
}
