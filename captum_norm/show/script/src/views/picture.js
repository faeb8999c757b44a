/** @import { Example, Picture, State, View } from "../types.js" */

import { colorOf } from "../colors.js";
import { formatted, h } from "../dom.js";
import { largest } from "../grids.js";
import { activePlaces, read } from "../readings.js";

const HEAT = 0.85;

/** @type {View} */
export const picture = {
  name: "picture",
  title: "Image",
  applies: (_page, example) => example !== null && example.pictures.length > 0,
  create(_page, example, state) {
    const shown = /** @type {Example} */ (example);
    const opacity = h("input", { type: "range", min: 0, max: 100, value: 100 * HEAT });
    const all = shown.pictures.map((one, index) => pictureOf(shown, one, index, state));
    opacity.addEventListener("input", () =>
      all.forEach(({ heat }) => (heat.style.opacity = `${Number(opacity.value) / 100}`)),
    );
    const label = h("label", { class: "choice" }, h("span", {}, "Opacity of the scores"), opacity);
    return h(
      "div",
      { class: "pictures" },
      label,
      h("div", { class: "row", "data-answer": "" }, ...all.map(({ figure }) => figure)),
    );
  },
};

/**
 * A picture under the colours of its patches. The pointer and the arrow keys move from patch to patch.
 *
 * @param {Example} example
 * @param {Picture} picture
 * @param {number} number of the picture
 * @param {State} state
 */
function pictureOf(example, { png, positions }, number, state) {
  const [rows, columns] = [positions.length, positions[0].length];
  const heat = h("canvas", { width: columns, height: rows });
  heat.style.opacity = String(HEAT);
  const mark = h("div", { class: "patch", hidden: true });
  const label = example.pictures.length > 1 ? `picture ${number + 1}` : "picture";
  const frame = h(
    "div",
    {
      class: "picture",
      tabindex: 0,
      role: "application",
      "aria-label": `${label}, ${rows} × ${columns} patches; arrow keys move`,
    },
    h("img", { alt: "", src: `data:image/png;base64,${png}` }),
    heat,
    mark,
  );
  const said = h("figcaption", { "aria-live": "polite" });
  // A patch of a picture whose rows are its own patches stands for its row.
  const side = example.outputs ? "input" : "output";

  const draw = () => {
    const choice = {
      method: state.get("method"),
      stack: state.get("stack"),
      layer: state.get("layer"),
      head: state.get("head"),
    };
    const reading = read(
      example,
      choice,
      activePlaces(state).filter(({ side: one }) => one === "output"),
    );
    const patches = positions.flat().map((position) => reading?.values[position] ?? 0);
    const top = largest(patches);
    const pixels = new ImageData(columns, rows);
    patches.forEach((value, place) => {
      const share = top > 0 ? value / top : 0;
      pixels.data.set([...colorOf(Math.sign(share) * 0.6, "light"), 255 * Math.abs(share)], 4 * place);
    });
    heat.getContext("2d")?.putImageData(pixels, 0, 0);
    const place = state.get("hover") ?? state.get("pins")[0];
    const at = place?.side === side ? positions.flat().indexOf(place.index) : -1;
    mark.hidden = at < 0;
    said.textContent = at < 0 ? `${label}: ${rows} × ${columns} patches` : "";
    if (at < 0) return;
    const [row, column] = [Math.floor(at / columns), at % columns];
    Object.assign(mark.style, {
      left: `${(100 * column) / columns}%`,
      top: `${(100 * row) / rows}%`,
      width: `${100 / columns}%`,
      height: `${100 / rows}%`,
    });
    said.textContent = `row ${row + 1}, column ${column + 1}: ${formatted(patches[at])}`;
  };
  /** @param {number} row @param {number} column */
  const point = (row, column) => state.set({ hover: { side, index: positions[row][column] } });
  frame.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect();
    const place = (/** @type {number} */ share, /** @type {number} */ count) =>
      Math.min(Math.max(Math.floor(share * count), 0), count - 1);
    point(place((event.clientY - box.top) / box.height, rows), place((event.clientX - box.left) / box.width, columns));
  });
  frame.addEventListener("pointerleave", () => state.set({ hover: null }));
  frame.addEventListener("blur", () => state.set({ hover: null }));
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = Math.max(0, positions.flat().indexOf(state.get("hover")?.index ?? positions[0][0]));
    const [row, column] = [Math.floor(at / columns) + move[0], (at % columns) + move[1]];
    point(Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1));
  });
  draw();
  state.subscribe(["hover", "pins", "method", "stack", "layer", "head"], draw);
  return { heat, figure: h("figure", {}, frame, said) };
}
