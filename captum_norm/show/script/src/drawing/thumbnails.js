/** @import { Example, State, Values } from "../types.js" */

import { h } from "../dom.js";
import { gridOf, mapsOf, nameOf, scaleOf } from "../grids.js";
import { paintEntries } from "./canvas.js";
import { shrunk } from "./layout.js";

const PIXELS = 64;

/** @typedef {Pick<Values, "layer" | "head">} Place */

/**
 * Small maps of all layers and heads, which choose the large one. With heads they are a table of layers by heads, whose
 * first row and column stand for all layers and all heads.
 *
 * @param {Example} example
 * @param {string} method
 * @param {State} state
 * @returns {HTMLElement | null} null where there is nothing to choose
 */
export function thumbnails(example, method, state) {
  const { heads, together } = mapsOf(example, method, state.get("stack"));
  const layers = /** @type {import("../types.js").Maps} */ (heads ?? together).layers;
  /** @type {Values["head"][]} */
  const columns = heads ? ["all", ...Array(heads.values.shape[1]).keys()] : ["all"];
  /** @type {Values["layer"][]} */
  const rows = layers.length > 1 ? ["all", ...layers] : [...layers];
  if (rows.length * columns.length < 2) return null;
  const cells = rows.flatMap((layer) => columns.map((head) => thumbnail(example, method, state, { layer, head })));
  const element = h("div", {
    class: heads ? "thumbnails table" : "thumbnails",
    role: "group",
    "aria-label": `Layers${heads ? " and heads" : ""} of ${method}`,
  });
  /** @param {string | number} text */
  const name = (text) => h("span", { class: "number", "aria-hidden": "true" }, String(text));
  if (heads) {
    element.style.gridTemplateColumns = `auto repeat(${columns.length}, minmax(1.25rem, 1fr))`;
    element.append(h("span"), ...columns.map(name));
    rows.forEach((layer, row) => {
      element.append(
        name(layer),
        ...cells.slice(row * columns.length, (row + 1) * columns.length).map(({ button }) => button),
      );
    });
  } else {
    cells.forEach(({ button }, index) => button.append(name(rows[index] === "all" ? "mean" : rows[index])));
    element.append(...cells.map(({ button }) => button));
  }
  const press = () => {
    const chosen = { layer: rows.length > 1 ? state.get("layer") : rows[0], head: heads ? state.get("head") : "all" };
    const at = Math.max(
      0,
      cells.findIndex(({ place }) => place.layer === chosen.layer && place.head === chosen.head),
    );
    cells.forEach(({ button }, index) => {
      button.setAttribute("aria-pressed", String(index === at));
      button.setAttribute("tabindex", index === at ? "0" : "-1");
    });
  };
  element.addEventListener("keydown", (event) => {
    const at = cells.findIndex(({ button }) => button === event.target);
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns.length, ArrowUp: -columns.length }[event.key];
    if (at < 0 || by === undefined) return;
    event.preventDefault();
    cells[at + by]?.button.focus();
  });
  const draw = () => cells.forEach((cell) => cell.draw());
  press();
  requestAnimationFrame(draw); // the large map comes first
  state.subscribe(["scale", "theme"], draw);
  state.subscribe(["layer", "head"], press);
  return element;
}

/**
 * @param {Example} example
 * @param {string} method
 * @param {State} state
 * @param {Place} place
 */
function thumbnail(example, method, state, place) {
  const choice = { method, stack: state.get("stack"), ...place };
  const canvas = h("canvas", { "aria-hidden": "true" });
  const button = h("button", { type: "button", "aria-label": nameOf(example, choice) }, canvas);
  button.addEventListener("click", () => state.set(place));
  const draw = () => {
    const grid = gridOf(example, choice);
    if (grid)
      paintEntries(
        canvas,
        shrunk(grid, PIXELS),
        scaleOf(example, { ...choice, scale: state.get("scale") }),
        state.get("theme"),
      );
  };
  return { button, draw, place };
}
