/**
 * Creates an element. Texts become text, never markup.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number | boolean>} [attributes] `true` sets an empty attribute, `false` none
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/**
 * Creates an element of a drawing.
 *
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

const STRONG = /(?<right>[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}])|\p{L}/gu;

/**
 * In which direction a text runs: that of most of its letters.
 *
 * @param {string[]} texts
 * @returns {"ltr" | "rtl"}
 */
export function direction(texts) {
  let sum = 0;
  for (const { groups } of texts.join(" ").matchAll(STRONG)) sum += groups?.right ? 1 : -1;
  return sum > 0 ? "rtl" : "ltr";
}

/**
 * A sentence, in which the texts that it quotes keep their own direction.
 *
 * @param {string} sentence
 * @returns {(Node | string)[]}
 */
export function isolated(sentence) {
  return sentence.split(/(?<=“)([^“”]*)(?=”)/).map((part, index) => (index % 2 ? h("bdi", {}, part) : part));
}

/**
 * Changes the document. If this replaces the control that has the focus, the new one of the same name gets it.
 *
 * @param {Element} within
 * @param {() => void} change
 */
export function keepFocus(within, change) {
  const before = document.activeElement;
  const name = before && within.contains(before) ? nameOfControl(before) : null;
  change();
  if (name === null || before?.isConnected) return;
  const after = [...within.querySelectorAll("button, select")].find((control) => nameOfControl(control) === name);
  if (after instanceof HTMLElement) after.focus();
}

/** @param {Element} control */
function nameOfControl(control) {
  return control.getAttribute("aria-label") ?? (control.closest("label")?.firstChild ?? control).textContent;
}

/**
 * Creates a labelled list of choices that follows the state and sets it.
 *
 * @param {string} label
 * @param {[value: string, text: string][]} choices
 * @param {string} value the one chosen
 * @param {(value: string) => void} choose
 * @returns {HTMLLabelElement}
 */
export function select(label, choices, value, choose) {
  const options = choices.map(([name, text]) => h("option", { value: name, selected: name === value }, text));
  const list = h("select", {}, ...options);
  list.addEventListener("change", () => choose(list.value));
  return h("label", { class: "choice" }, h("span", {}, label), list);
}

/**
 * Creates a group of buttons of which one is pressed.
 *
 * @template {string} T
 * @param {string} label
 * @param {[value: T, text: string][]} choices
 * @param {T} value the one pressed
 * @param {(value: T) => void} choose
 * @returns {HTMLElement}
 */
export function segmented(label, choices, value, choose) {
  const buttons = choices.map(([name, text]) => {
    const button = h("button", { type: "button", "aria-pressed": String(name === value) }, text);
    button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      choose(name);
    });
    return button;
  });
  return h("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons);
}

/**
 * Formats a number for reading: four significant digits, a true minus sign, no exponent between 0.0001 and 100000.
 *
 * @param {number} value
 * @returns {string}
 */
export function formatted(value) {
  const size = Math.abs(value);
  const exponent = size < 1e-4 || size >= 1e5;
  const text =
    size === 0 ? "0" : exponent ? size.toExponential(2) : size >= 1e3 ? size.toFixed(0) : size.toPrecision(4);
  return (value < 0 ? "−" : "") + text;
}
