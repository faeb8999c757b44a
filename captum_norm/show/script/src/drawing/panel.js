/** @import { Example, State, Values } from "../types.js" */
/** @import { Box } from "./canvas.js" */
/** @import { Frame } from "./layout.js" */

import { formatted, h } from "../dom.js";
import { gridOf, nameOf, scaleOf } from "../grids.js";
import { legend } from "../legend.js";
import { togglePin } from "../readings.js";
import { drawMap } from "./canvas.js";
import { fillList, largestEntries } from "./entries.js";
import { revealing, within, zoomed } from "./layout.js";
import { thumbnails } from "./thumbnails.js";

const DRAGGED = 4;
const LISTED = 12;

/** @typedef {NonNullable<Values["cell"]>} Cell */

/**
 * What the panels of one view share.
 *
 * @typedef {object} Shared
 * @property {() => Frame} frame
 * @property {(frame: Frame) => void} setFrame
 * @property {(cell: Cell | null, at: { x: number, y: number } | null) => void} point says which cell is pointed at, and
 *   where in the window
 */

/**
 * One method's maps: a large one, and small ones to choose it by.
 *
 * @param {Example} example
 * @param {string} method
 * @param {State} state
 * @param {Shared} shared
 * @returns {{ element: HTMLElement, draw: () => void }}
 */
export function panel(example, method, state, shared) {
  const rows = (example.outputs ?? example.inputs).texts;
  const columns = example.inputs.texts;
  const canvas = h("canvas", { "aria-hidden": "true" });
  const field = h("div", { class: "field", tabindex: "0", role: "application", "aria-roledescription": "map" }, canvas);
  const name = h("span", { class: "quiet" });
  const scale = legend();
  const list = h("table");
  const details = h("details", { class: "largest" }, h("summary", {}, "Largest entries"), list);
  /** @type {Box} */
  let box = { left: 0, top: 0, width: 1, height: 1 };
  /** The largest entry, and of which map. @type {Float32Array | null} */
  let named = null;
  /** @type {(Cell & { value: number }) | undefined} */
  let largestEntry;
  const choice = () => ({ method, stack: state.get("stack"), layer: state.get("layer"), head: state.get("head") });

  const draw = () => {
    const grid = gridOf(example, choice());
    canvas.hidden = !grid;
    name.textContent = grid ? nameOf(example, choice()) : `has no layer ${state.get("layer")}`;
    if (!grid || !field.clientWidth) return;
    const max = scaleOf(example, { ...choice(), scale: state.get("scale") });
    const [theme, cell, places] = [state.get("theme"), state.get("cell"), [...state.get("pins"), ...hovered(state)]];
    /** @param {"input" | "output"} side */
    const marks = (side) => places.filter((place) => place.side === side).map(({ index }) => index);
    const marked = { rowMarks: marks("output"), columnMarks: marks("input"), cell, explained: example.row };
    box = drawMap(canvas, { grid, max, rows, columns, frame: shared.frame(), theme, ...marked }, field.clientWidth);
    field.classList.toggle("zoomed", shared.frame().zoom > 1);
    scale.show(max, grid.unit, grid.signed, theme);
    if (named !== grid.values) largestEntry = largestEntries(grid.values, grid.columns, 1)[0];
    named = grid.values;
    const top = largestEntry;
    const best = top ? `; largest ${formatted(top.value)}, ${rows[top.row]} from ${columns[top.column]}` : "";
    field.setAttribute(
      "aria-label",
      `${[method, name.textContent].filter(Boolean).join(", ")}, ${rows.length} by ${columns.length}${best}. Arrow keys move from entry to entry.`,
    );
    if (details.open) fillList(list, largestEntries(grid.values, grid.columns, LISTED), rows, columns);
  };
  details.addEventListener("toggle", draw);

  /** @param {Cell} cell */
  const positionOf = ({ row, column }) => {
    const { row: top, column: left, zoom } = shared.frame();
    const around = canvas.getBoundingClientRect();
    const across = (column + 0.5 - left) * (box.width / columns.length) * zoom;
    const down = (row + 1 - top) * (box.height / rows.length) * zoom;
    return { x: around.left + box.left + across, y: around.top + box.top + down };
  };
  /** @param {MouseEvent} event @returns {Cell | null} */
  const cellAt = (event) => {
    const around = canvas.getBoundingClientRect();
    const { row, column, zoom } = shared.frame();
    const x = (event.clientX - around.left - box.left) / box.width;
    const y = (event.clientY - around.top - box.top) / box.height;
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    return {
      row: Math.floor(row + (y * rows.length) / zoom),
      column: Math.floor(column + (x * columns.length) / zoom),
    };
  };
  /** @param {MouseEvent | null} event @param {number} factor */
  const zoom = (event, factor) => {
    const around = canvas.getBoundingClientRect();
    const at = event
      ? {
          x: (event.clientX - around.left - box.left) / box.width,
          y: (event.clientY - around.top - box.top) / box.height,
        }
      : { x: 0.5, y: 0.5 };
    shared.setFrame(zoomed(shared.frame(), factor, at, rows.length, columns.length));
  };

  /** @type {{ x: number, y: number, frame: Frame, moved: boolean } | null} */
  let drag = null;
  field.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, frame: shared.frame(), moved: false };
  });
  field.addEventListener("pointermove", (event) => {
    if (drag && event.buttons) {
      const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.moved ||= Math.hypot(x, y) > DRAGGED;
      const { row, column, zoom: by } = drag.frame;
      const to = {
        row: row - (y * rows.length) / (box.height * by),
        column: column - (x * columns.length) / (box.width * by),
        zoom: by,
      };
      if (drag.moved && by > 1) shared.setFrame(within(to, rows.length, columns.length));
    }
    const cell = cellAt(event);
    shared.point(cell, cell && positionOf(cell));
  });
  field.addEventListener("pointerleave", () => {
    drag = null;
    shared.point(null, null);
  });
  field.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell && !drag?.moved) pin(state, cell);
    drag = null;
  });
  field.addEventListener("dblclick", (event) => zoom(event, 2));
  field.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event, 2 ** (-event.deltaY / 200));
    },
    { passive: false },
  );
  field.addEventListener("keydown", (event) => {
    const cell = state.get("cell");
    const next = cell ? step(event.key, cell, rows.length, columns.length) : { row: example.row ?? 0, column: 0 };
    if (event.key === "Escape") {
      state.set({ pins: [] });
      shared.point(null, null);
    } else if (event.key === "+" || event.key === "=") zoom(null, 1.5);
    else if (event.key === "-") zoom(null, 1 / 1.5);
    else if (event.key === "Enter" || event.key === " ") cell && pin(state, cell);
    else if (/^(Arrow|Home|End)/.test(event.key) && next) {
      shared.setFrame(revealing(shared.frame(), next, rows.length, columns.length));
      shared.point(next, positionOf(next));
    } else return;
    event.preventDefault();
  });
  field.addEventListener("blur", () => shared.point(null, null));

  let width = 0;
  new ResizeObserver(() => {
    if (field.clientWidth !== width) draw();
    width = field.clientWidth;
  }).observe(field);
  state.subscribe(["layer", "head", "scale", "theme", "hover", "cell", "pins"], draw);
  const small = thumbnails(example, method, state);
  const head = h("div", { class: "head" }, h("h3", {}, method, " ", name), scale.element);
  return { element: h("div", { class: "panel" }, head, field, ...(small ? [small] : []), details), draw };
}

/** @param {State} state */
function hovered(state) {
  const hover = state.get("hover");
  return hover ? [hover] : [];
}

/**
 * @param {State} state
 * @param {Cell} cell
 */
function pin(state, { row }) {
  state.set({ pins: togglePin(state.get("pins"), { side: "output", index: row }) });
}

/**
 * @param {string} key
 * @param {Cell} cell
 * @param {number} rows
 * @param {number} columns
 * @returns {Cell | null}
 */
function step(key, { row, column }, rows, columns) {
  const to = {
    ArrowUp: { row: row - 1, column },
    ArrowDown: { row: row + 1, column },
    ArrowLeft: { row, column: column - 1 },
    ArrowRight: { row, column: column + 1 },
    Home: { row, column: 0 },
    End: { row, column: columns - 1 },
  }[key];
  if (!to) return null;
  return { row: Math.min(Math.max(to.row, 0), rows - 1), column: Math.min(Math.max(to.column, 0), columns - 1) };
}
