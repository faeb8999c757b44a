/** @import { Example, Page, State, Values, View } from "./types.js" */

import { h, keepFocus, segmented, select } from "./dom.js";
import { mappedIn, mapsOf, methodsOf, pairOf, stacksOf } from "./grids.js";

/** @type {(keyof Values)[]} */
const NUMBERS = ["example", "layer", "head"];

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
  const draw = () =>
    keepFocus(bar, () =>
      bar.replaceChildren(...(example ? choices(page, example, state) : []), ...viewChoice(state, applying)),
    );
  draw();
  state.subscribe(["method", "beside", "stack", "layer", "head", "words"], draw);
  return bar;
}

/**
 * @param {Page} page
 * @param {Example} example
 * @param {State} state
 */
function choices(page, example, state) {
  const stack = state.get("stack");
  const shown = pairOf(example, { method: state.get("method"), beside: state.get("beside"), stack });
  const kinds = shown.map((method) => mapsOf(example, method, stack));
  const layers = [...new Set(kinds.flatMap(({ heads, together }) => (together ?? heads)?.layers ?? []))];
  const count = Math.max(0, ...kinds.map(({ heads }) => heads?.values.shape[1] ?? 0));
  const together = kinds.every((kind) => kind.together && !kind.together.mean);
  /** @type {(key: keyof Values, label: string, texts: [string, string][]) => HTMLElement[]} */
  const choice = (key, label, texts) => {
    /** @param {string} value */
    const choose = (value) => state.set({ [key]: NUMBERS.includes(key) && value !== "all" ? Number(value) : value });
    return texts.length > 1 ? [select(label, texts, String(state.get(key)), choose)] : [];
  };
  return [
    ...exampleChoice(page, state),
    ...choice(
      "method",
      "Method",
      methodsOf(example).map((name) => [name, name]),
    ),
    ...besideChoice(example, state),
    ...choice(
      "stack",
      "Stack",
      stacksOf(example).map((name) => [name, name]),
    ),
    ...choice("layer", "Layer", layers.length > 1 ? [["all", "all (mean)"], ...numbered(layers)] : []),
    ...choice(
      "head",
      "Head",
      count > 1 ? [["all", together ? "all" : "all (mean)"], ...numbered([...Array(count).keys()])] : [],
    ),
    ...(example.later ? [headsButton(example, state)] : []),
    ...(hasWords(example) ? [wordsChoice(state)] : []),
  ];
}

/**
 * @param {Page} page
 * @param {State} state
 */
function exampleChoice(page, state) {
  const count = page.examples.length;
  if (count < 2) return [];
  const now = state.get("example");
  /** @param {number} example */
  const go = (example) => state.set({ example, pins: [], hover: null, cell: null });
  /** @type {(label: string, sign: string, to: number) => HTMLElement} */
  const step = (label, sign, to) => {
    const button = h("button", { type: "button", "aria-label": label, disabled: to < 0 || to >= count }, sign);
    button.addEventListener("click", () => go(to));
    return button;
  };
  /** @type {[string, string][]} */
  const titles = page.examples.map(({ title }, index) => [String(index), `${index + 1}. \u2068${title}\u2069`]);
  return [
    h(
      "div",
      { class: "examples" },
      select("Example", titles, String(now), (value) => go(Number(value))),
      h("div", { class: "steps" }, step("Previous example", "‹", now - 1), step("Next example", "›", now + 1)),
    ),
  ];
}

/**
 * @param {number[]} numbers
 * @returns {[string, string][]}
 */
function numbered(numbers) {
  return numbers.map((number) => [String(number), String(number)]);
}

/**
 * @param {Example} example
 * @param {State} state
 */
function besideChoice(example, state) {
  const choice = { method: state.get("method"), stack: state.get("stack") };
  const others = mappedIn(example, choice.stack).filter((name) => name !== choice.method);
  if (!others.length) return [];
  const now = pairOf(example, { ...choice, beside: state.get("beside") })[1] ?? "none";
  /** @type {[string, string][]} */
  const texts = [["none", "none"], ...others.map((name) => /** @type {[string, string]} */ ([name, name]))];
  return [select("beside", texts, now, (beside) => state.set({ beside }))];
}

/** @type {(example: Example, state: State) => HTMLElement} */
function headsButton(example, state) {
  const button = h("button", { type: "button", class: "copy" }, `Show ${example.later} heads`);
  button.addEventListener("click", () => state.set({ heads: true }));
  return button;
}

/** @param {Example} example */
function hasWords(example) {
  return [example.inputs, example.outputs].some((tokens) => tokens?.words);
}

/** @param {State} state */
function wordsChoice(state) {
  return segmented(
    "Tokens",
    [
      ["words", "Words"],
      ["pieces", "Pieces"],
    ],
    state.get("words") ? "words" : "pieces",
    (value) => state.set({ words: value === "words" }),
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
