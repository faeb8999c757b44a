/** @import { Example, State, View } from "../types.js" */

import { paint } from "../colors.js";
import { formatted, h } from "../dom.js";
import { gridOf, largest } from "../maps.js";

/** @type {View} */
export const text = {
  name: "text",
  title: "Text",
  applies: (_page, example) => example !== null && (example.scores.length > 0 || example.maps.length > 0),
  create: (_page, example, state) => createText(/** @type {Example} */ (example), state),
};

/**
 * @param {Example} example
 * @param {State} state
 */
function createText(example, state) {
  const strip = h("p", { class: "tokens" });
  const buttons = example.inputs.texts.map((token, index) => {
    const button = h("button", { type: "button", class: "token", dir: "auto" }, token);
    const point = () => state.set({ hover: { side: "output", index } });
    const leave = () => state.set({ hover: null });
    for (const [name, callback] of [["pointerenter", point], ["focus", point], ["pointerleave", leave], ["blur", leave]]) {
      button.addEventListener(/** @type {string} */ (name), /** @type {() => void} */ (callback));
    }
    return button;
  });
  strip.append(...buttons);
  const draw = () => {
    const values = valuesOf(example, state);
    const max = largest(values);
    buttons.forEach((button, index) => {
      paint(button, max > 0 ? values[index] / max : 0, state.get("theme"));
      button.title = formatted(values[index]);
    });
  };
  draw();
  state.subscribe(["hover", "pins", "method", "stack", "layer", "head", "theme"], draw);
  return strip;
}

/**
 * @param {Example} example
 * @param {State} state
 * @returns {Float32Array}
 */
function valuesOf(example, state) {
  const method = state.get("method");
  const grid = gridOf(example, { method, stack: state.get("stack"), layer: state.get("layer"), head: state.get("head") });
  const place = state.get("hover") ?? state.get("pins")[0];
  const row = place?.side === "output" && !example.outputs ? place.index : example.row;
  const scores = example.scores.find((entry) => entry.method === method)?.values.values;
  if (grid && row !== null && (place || !scores)) return grid.values.subarray(row * grid.columns, (row + 1) * grid.columns);
  return scores ?? new Float32Array(example.inputs.texts.length);
}
