/** @import { Example, Place, Side, Stack, State, View } from "../types.js" */
/** @import { Reading } from "../readings.js" */

import { paint } from "../colors.js";
import { direction, formatted, h, isolated } from "../dom.js";
import { legend } from "../legend.js";
import { gridOf, largest, methodsOf, nameOf } from "../grids.js";
import { percent } from "../layouts/numbers.js";
import { activePlaces, read, togglePin, topText } from "../readings.js";

/** @type {View} */
export const text = {
  name: "text",
  title: "Text",
  applies: (_page, example) => example !== null && methodsOf(example).length > 0 && example.inputs.texts.length > 0,
  create: (_page, example, state) => createText(/** @type {Example} */ (example), state),
};

const NAMED = 3;
/** Texts of more tokens are set smaller, and scroll. */
const LONG = 150;

/** What outputs and inputs are called. @type {Partial<Record<Stack, [string, string]>>} */
const SIDES = { answer: ["Answer", "Prompt, and the answer before"], cross: ["Target", "Source"] };

/**
 * @param {Example} example
 * @param {State} state
 */
function createText(example, state) {
  const caption = h("p", { class: "caption" });
  const spoken = h("p", { class: "hidden", role: "status" });
  const scale = legend(percent);
  const passages = methodsOf(example).map((method, index) => passage(example, method, state, index === 0));
  const draw = () => {
    const places = activePlaces(state);
    caption.replaceChildren(...captionOf(example, state, places));
    // Strips that stand beside each other have one scale: the share of a number in all of its strip.
    const shown = passages.map(({ read: one }) => one(places)).filter((one) => one !== null);
    const max = Math.max(0, ...shown.map(({ top }) => top));
    const signed = shown.some(({ reading }) => reading.signed);
    scale.show(max, "of the strip’s sum", signed, state.get("theme"));
    const said = passages.map(({ draw: one }) => one(places, max));
    spoken.textContent = places.length ? [caption.textContent, ...said].filter(Boolean).join(". ") : "";
  };
  draw();
  state.subscribe(["hover", "pins", "method", "stack", "layer", "head", "theme"], draw);
  return h("div", {}, caption, scale.element, ...passages.map(({ element }) => element), spoken);
}

/**
 * The text once, coloured by one method.
 *
 * @param {Example} example
 * @param {string} method
 * @param {State} state
 * @param {boolean} first whether it is the first one, which answers the page's question
 */
function passage(example, method, state, first) {
  const own = {
    inputs: strip(example, "input", method, state),
    outputs: example.outputs && strip(example, "output", method, state),
  };
  const what = h("p", { class: "quiet" });
  const top = h("p", { class: "quiet", dir: "auto" });
  const label = h("div", { class: "method" }, h("h3", {}, method), what, top);
  const [outputs, inputs] = SIDES[state.get("stack")] ?? ["Output", "Input"];
  const { likely } = example.outputs ?? {};
  const next = h("p", { class: "quiet next", hidden: !likely });
  const lines = own.outputs
    ? h("div", { class: "lines" }, side(outputs), own.outputs.element, next, side(inputs), own.inputs.element)
    : h("div", { class: "lines" }, own.inputs.element);
  /** @type {{ reading: Reading, shares: Float32Array, side: Side, top: number } | null} */
  let shown = null;
  /** @param {Place[]} places */
  const readAt = (places) => {
    const choice = { method, stack: state.get("stack"), layer: state.get("layer"), head: state.get("head") };
    const reading = read(example, choice, places);
    const colored = reading && !example.outputs ? "input" : reading?.side;
    shown = null;
    if (reading && colored) {
      const counted = colored === "input" ? example.counted : null;
      const shares = sharesOf(reading, counted);
      const top = largest(counted ? shares.filter((_, at) => counted[at]) : shares);
      shown = { reading, shares, side: colored, top };
      what.textContent =
        reading.kind === "scores" ? reading.unit : [reading.unit, nameOf(example, choice)].filter(Boolean).join(", ");
    }
    return shown;
  };
  /** @type {(places: Place[], max: number) => string} */
  const draw = (places, max) => {
    own.inputs.draw(shown?.side === "input" ? shown : null, max, places);
    own.outputs?.draw(shown?.side === "output" ? shown : null, max, places);
    const texts = (shown?.side === "output" ? example.outputs : example.inputs)?.texts ?? [];
    const counted = shown?.side === "input" ? example.counted : null;
    const ranked = shown && counted ? shown.shares.map((value, at) => (counted[at] ? value : 0)) : shown?.shares;
    top.textContent = ranked ? topText(ranked, texts, NAMED, percent) : "";
    element.classList.toggle("chosen", method === state.get("method"));
    const at = places.length === 1 && places[0].side === "output" ? likely?.[places[0].index] : undefined;
    next.replaceChildren(...isolated(at ? `Likely there: ${at}` : "Point at a token to see which ones were likely."));
    return [top.textContent ? `${method}: ${top.textContent}` : "", at ? next.textContent : ""]
      .filter(Boolean)
      .join(". ");
  };
  const element = h("div", { class: "passage", ...(first ? { "data-answer": "" } : {}) }, label, lines);
  return { element, read: readAt, draw };
}

/**
 * The shares of numbers in their sum, of absolute values; of those that count. Of a difference, in the larger sum.
 *
 * @param {Reading} reading
 * @param {boolean[] | null} counted
 */
function sharesOf({ values, total }, counted) {
  const sum = total ?? values.reduce((all, value, at) => all + (counted && !counted[at] ? 0 : Math.abs(value)), 0);
  return values.map((value) => (sum > 0 ? value / sum : 0));
}

/** @param {string} name */
function side(name) {
  return h("p", { class: "side" }, name);
}

/**
 * The tokens of one side. One of them is reached by the tab key, the others from there by arrows.
 *
 * @param {Example} example
 * @param {Side} side
 * @param {string} method
 * @param {State} state
 */
function strip(example, side, method, state) {
  const texts = (side === "output" ? example.outputs : example.inputs)?.texts ?? [];
  // A token of a text whose rows are its own tokens stands for its row.
  const placeSide = example.outputs ? side : "output";
  const buttons = texts.map((token) =>
    h("button", { type: "button", class: "token", dir: "auto", tabindex: "-1" }, token),
  );
  buttons[0]?.setAttribute("tabindex", "0");
  const element = h("div", {
    class: texts.length > LONG ? "strip long" : "strip",
    dir: direction(texts),
    role: "group",
    "aria-label": `${side === "output" ? "Output" : example.outputs ? "Input" : "Text"}, ${method}`,
  });
  element.append(...buttons);
  /** @param {Event} event */
  const indexOf = (event) =>
    buttons.indexOf(/** @type {HTMLButtonElement} */ (/** @type {Element} */ (event.target).closest(".token")));
  /** @param {Event} event */
  const point = (event) =>
    state.set({ hover: indexOf(event) >= 0 ? { side: placeSide, index: indexOf(event) } : null });
  const leave = () => state.set({ hover: null });
  element.addEventListener("pointerover", point);
  element.addEventListener("pointerleave", leave);
  element.addEventListener("focusin", point);
  element.addEventListener("focusout", leave);
  element.addEventListener("click", (event) => {
    if (indexOf(event) >= 0)
      state.set({ pins: togglePin(state.get("pins"), { side: placeSide, index: indexOf(event) }) });
  });
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.set({ pins: [] });
    const next = moved(event.key, indexOf(event), buttons.length, element.dir === "rtl");
    if (next === null) return;
    event.preventDefault();
    buttons.forEach((button, index) => button.setAttribute("tabindex", index === next ? "0" : "-1"));
    buttons[next].focus();
  });
  /** @type {(shown: { reading: Reading, shares: Float32Array } | null, max: number, places: Place[]) => void} */
  const draw = (shown, max, places) => {
    const own = places.filter((place) => place.side === placeSide).map(({ index }) => index);
    const pins = state
      .get("pins")
      .filter((place) => place.side === placeSide)
      .map(({ index }) => index);
    const hover = state.get("hover");
    buttons.forEach((button, index) => {
      const still = side === "input" && example.counted?.[index] === false;
      button.classList.toggle("still", still || (side === "output" && example.dependent?.[index] === false));
      if (shown && !still) paint(button, max > 0 ? shown.shares[index] / max : 0, state.get("theme"));
      else button.removeAttribute("style");
      button.title = shown ? `${formatted(shown.reading.values[index])} (${percent(shown.shares[index])})` : "";
      button.setAttribute("aria-pressed", String(pins.includes(index)));
      button.classList.toggle("active", own.includes(index));
      button.classList.toggle("pointed", hover?.side === placeSide && hover.index === index);
    });
  };
  return { element, draw };
}

/**
 * @param {string} key
 * @param {number} index
 * @param {number} count
 * @param {boolean} turned whether the text runs from right to left
 * @returns {number | null} the next token, null if the key is none that moves
 */
function moved(key, index, count, turned) {
  const next = {
    ArrowRight: index + (turned ? -1 : 1),
    ArrowDown: index + 1,
    ArrowLeft: index - (turned ? -1 : 1),
    ArrowUp: index - 1,
    Home: 0,
    End: count - 1,
  }[key];
  return next === undefined ? null : Math.min(Math.max(next, 0), count - 1);
}

/**
 * Says what the colours are.
 *
 * @param {Example} example
 * @param {State} state
 * @param {Place[]} places
 * @returns {(Node | string)[]}
 */
function captionOf(example, state, places) {
  const choice = {
    method: state.get("method"),
    stack: state.get("stack"),
    layer: state.get("layer"),
    head: state.get("head"),
  };
  const grid = gridOf(example, choice);
  if (!places.length || !grid) {
    const what =
      choice.stack === "answer"
        ? "Point at the answer to see what it rests on."
        : "Point at a token to see what it receives.";
    return grid
      ? [h("span", { class: "quiet" }, `${what} Click to keep it; click a second one for the difference.`)]
      : [];
  }
  const received = choice.stack === "answer" ? " rests on" : " receives";
  const verb = places[0].side === "output" ? received : " gives";
  const names = places.map(({ side, index }) =>
    h(
      "strong",
      { dir: "auto" },
      (side === "output" && example.outputs ? example.outputs : example.inputs).texts[index] ?? "",
    ),
  );
  const subject = names.length > 1 ? ["What ", names[0], verb, " more than ", names[1]] : ["What ", names[0], verb];
  return [...subject, h("span", { class: "quiet" }, ` ${nameOf(example, choice)}`)];
}
