/** @import { Example, State, View } from "../types.js" */
/** @import { Cell, Shared } from "../drawing/panel.js" */

import { formatted, h, segmented } from "../dom.js";
import { WHOLE, zoomed } from "../drawing/layout.js";
import { panel } from "../drawing/panel.js";
import { gridOf, pairOf } from "../grids.js";
import { scoped } from "../state.js";

/** @type {View} */
export const maps = {
  name: "maps",
  title: "Maps",
  applies: (_page, example) => example !== null && example.maps.length > 0,
  create: (_page, example, state) => createMaps(/** @type {Example} */ (example), state),
};

/**
 * @param {Example} example
 * @param {State} state
 */
function createMaps(example, state) {
  const rows = (example.outputs ?? example.inputs).texts;
  const columns = example.inputs.texts;
  const tip = h("div", { class: "tip", hidden: true });
  const spoken = h("p", { class: "hidden", role: "status" });
  const panels = h("div", { class: "panels" });
  const several = example.maps.some(({ values: { shape } }) => shape[0] * shape[shape.length - 3] > 1);
  const bar = choices(state, () => shared, rows.length, columns.length, several);
  const element = h("div", { class: "atlas" }, bar, panels, tip, spoken);
  let frame = WHOLE;
  /** @type {(() => void)[]} */
  let redraw = [];
  /** @type {Shared} */
  const shared = {
    frame: () => frame,
    setFrame(next) {
      frame = next;
      redraw.forEach((draw) => draw());
    },
    point(cell, at) {
      state.set({ cell, hover: cell && { side: "output", index: cell.row } });
      tip.hidden = !cell;
      spoken.textContent = cell ? textOf(example, state, cell) : "";
      if (cell && at) placeTip(tip, element, at, tipOf(example, state, cell));
    },
  };
  let end = () => {};
  const build = () => {
    end();
    const scope = scoped(state);
    end = scope.end;
    const built = pairOf(example, choiceOf(state)).map((method) => panel(example, method, scope.state, shared));
    redraw = built.map(({ draw }) => draw);
    panels.replaceChildren(...built.map((one) => one.element));
  };
  build();
  state.subscribe(["method", "beside", "stack"], build);
  return element;
}

/**
 * @param {State} state
 * @param {() => Shared} shared
 * @param {number} rows
 * @param {number} columns
 * @param {boolean} several whether there is more than one map to share a scale
 */
function choices(state, shared, rows, columns, several) {
  const scale = segmented(
    "Scale of colours",
    [
      ["map", "each map"],
      ["layer", "each layer"],
      ["all", "all maps"],
    ],
    state.get("scale"),
    (value) => state.set({ scale: value }),
  );
  /** @type {(label: string, sign: string, zoom: () => void) => HTMLElement} */
  const button = (label, sign, zoom) => {
    const made = h("button", { type: "button", "aria-label": label, title: label }, sign);
    made.addEventListener("click", zoom);
    return made;
  };
  /** @param {number} factor */
  const by = (factor) => () => shared().setFrame(zoomed(shared().frame(), factor, { x: 0.5, y: 0.5 }, rows, columns));
  const zoom = h(
    "div",
    { class: "segmented", role: "group", "aria-label": "Zoom" },
    button("Zoom out", "−", by(1 / 1.5)),
    button("Show the whole map", "whole", () => shared().setFrame(WHOLE)),
    button("Zoom in", "+", by(1.5)),
  );
  const shares = several ? [h("span", { class: "quiet" }, "Strongest colour: the largest of"), scale] : [];
  return h("div", { class: "bar" }, ...shares, zoom);
}

/** @param {State} state */
function choiceOf(state) {
  const [method, beside, stack] = [state.get("method"), state.get("beside"), state.get("stack")];
  return { method, beside, stack, layer: state.get("layer"), head: state.get("head") };
}

/**
 * The number of each method at a cell.
 *
 * @param {Example} example
 * @param {State} state
 * @param {Cell} cell
 * @returns {[method: string, value: string][]}
 */
function numbersOf(example, state, { row, column }) {
  const choice = choiceOf(state);
  return pairOf(example, choice).flatMap((method) => {
    const grid = gridOf(example, { ...choice, method });
    return grid
      ? [/** @type {[string, string]} */ ([method, formatted(grid.values[row * grid.columns + column])])]
      : [];
  });
}

/**
 * @param {Example} example
 * @param {State} state
 * @param {Cell} cell
 * @returns {Node[]}
 */
function tipOf(example, state, cell) {
  const [row, column] = namesOf(example, cell);
  const numbers = numbersOf(example, state, cell).map(([method, value]) =>
    h("div", {}, h("dt", {}, method), h("dd", {}, value)),
  );
  return [h("p", {}, h("bdi", {}, row), " ← ", h("bdi", {}, column)), h("dl", {}, ...numbers)];
}

/**
 * @param {Example} example
 * @param {State} state
 * @param {Cell} cell
 */
function textOf(example, state, cell) {
  const [row, column] = namesOf(example, cell);
  return `${row} from ${column}: ${numbersOf(example, state, cell)
    .map((pair) => pair.join(" "))
    .join(", ")}`;
}

/**
 * @param {Example} example
 * @param {Cell} cell
 */
function namesOf(example, { row, column }) {
  return [(example.outputs ?? example.inputs).texts[row] ?? "", example.inputs.texts[column] ?? ""];
}

/**
 * Puts the tip below a point of the window, inside its view.
 *
 * @param {HTMLElement} tip
 * @param {HTMLElement} view
 * @param {{ x: number, y: number }} at
 * @param {Node[]} content
 */
function placeTip(tip, view, { x, y }, content) {
  tip.replaceChildren(...content);
  const around = view.getBoundingClientRect();
  const left = Math.min(Math.max(x - around.left - tip.offsetWidth / 2, 0), around.width - tip.offsetWidth);
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(y - around.top + 10)}px)`;
}
