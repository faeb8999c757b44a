/** @import { Example, Page, State, Values, View } from "./types.js" */

import { h, segmented, select } from "./dom.js";
import { mapsOf, methodsOf, stacksOf } from "./maps.js";

/**
 * The choices that all views share: example, method, stack, layer, head, words, and which views are shown.
 *
 * @param {Page} page
 * @param {Example | null} example
 * @param {State} state
 * @param {View[]} applying the views that have something to show
 * @returns {HTMLElement}
 */
export function toolbar(page, example, state, applying) {
  const bar = h("div", { class: "toolbar", role: "toolbar", "aria-label": "What is shown" });
  const draw = () => bar.replaceChildren(...(example ? choices(page, example, state) : []), ...viewChoice(state, applying));
  draw();
  state.subscribe(["method", "stack", "layer", "head", "words"], draw);
  return bar;
}

/**
 * @param {Page} page
 * @param {Example} example
 * @param {State} state
 */
function choices(page, example, state) {
  const { heads, together } = mapsOf(example, state.get("method"), state.get("stack"));
  const layers = (together ?? heads)?.layers ?? [];
  const count = heads?.values.shape[1] ?? 0;
  /** @type {(key: keyof Values, label: string, texts: [string, string][]) => HTMLElement[]} */
  const choice = (key, label, texts) => {
    /** @param {string} value */
    const choose = (value) => state.set({ [key]: /^\d+$/.test(value) && key !== "method" ? Number(value) : value });
    return texts.length > 1 ? [select(label, texts, String(state.get(key)), choose)] : [];
  };
  return [
    ...choice("example", "Example", page.examples.map(({ title }, index) => [String(index), title])),
    ...choice("method", "Method", methodsOf(example).map((name) => [name, name])),
    ...choice("stack", "Stack", stacksOf(example).map((name) => [name, name])),
    ...choice("layer", "Layer", layers.length > 1 ? [["all", "all (mean)"], ...numbered(layers)] : []),
    ...choice("head", "Head", count > 1 ? [["all", together ? "all" : "all (mean)"], ...numbered([...Array(count).keys()])] : []),
    ...(hasWords(example) ? [wordsChoice(state)] : []),
  ];
}

/**
 * @param {number[]} numbers
 * @returns {[string, string][]}
 */
function numbered(numbers) {
  return numbers.map((number) => [String(number), String(number)]);
}

/** @param {Example} example */
function hasWords(example) {
  return [example.inputs, example.outputs].some((tokens) => tokens?.words);
}

/** @param {State} state */
function wordsChoice(state) {
  return segmented("Tokens", [["words", "Words"], ["pieces", "Pieces"]], state.get("words") ? "words" : "pieces", (value) =>
    state.set({ words: value === "words" }),
  );
}

/**
 * @param {State} state
 * @param {View[]} applying
 */
function viewChoice(state, applying) {
  if (applying.length < 2) return [];
  const buttons = applying.map((view) => {
    const on = !state.get("views").length || state.get("views").includes(view.name);
    const button = h("button", { type: "button", "aria-pressed": String(on) }, view.title);
    button.addEventListener("click", () => {
      const now = state.get("views").length ? state.get("views") : applying.map(({ name }) => name);
      const next = on ? now.filter((name) => name !== view.name) : [...now, view.name];
      state.set({ views: next.length === applying.length ? [] : next });
    });
    return button;
  });
  return [h("div", { class: "toggles", role: "group", "aria-label": "Views" }, ...buttons)];
}
