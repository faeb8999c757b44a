/** @import { Components, Example, State, View } from "../types.js" */
/** @import { Node } from "../layouts/components.js" */

import { colorOf, css, paint } from "../colors.js";
import { direction, formatted, h, keepFocus, s } from "../dom.js";
import { shortened } from "../drawing/layout.js";
import { largest } from "../grids.js";
import { carried, componentLayout, isGrid, nodesOf } from "../layouts/components.js";
import { percent } from "../layouts/numbers.js";
import { legend } from "../legend.js";
import { topText } from "../readings.js";

/** The most room for the layers, in a narrow window and a wide one: the picture is on the first screen. */
const HEIGHT = { narrow: 190, wide: 380 };
const NARROW = 440;
const ROW = { least: 8, most: 34 };
const STEP = { least: 8, most: 34 };
const LEFT = 44;
/** The room that a label takes. */
const LABEL = { height: 13, width: 22, characters: 12, turned: 64 };
/** The share of the sum of absolute scores that is shown at first. */
const FIRST = 0.8;
const MOST_FIRST = 60;
const MOST_LISTED = 200;
const MOST_DRAWN = 20_000;
const NAMED = 5;

/** What one of a kind, and what all are called. @type {Record<Components["kind"], [string, string]>} */
const NAMES = {
  residual: ["residual stream", "residual stream"],
  heads: ["head", "heads"],
  feed_forward: ["feed-forward", "feed-forward networks"],
  neurons: ["neuron", "neurons"],
  experts: ["expert", "experts"],
};

/** @type {View} */
export const components = {
  name: "components",
  title: "Components",
  applies: (_page, example) => example !== null && example.components.length > 0,
  create: (_page, example, state) => createComponents(/** @type {Example} */ (example).components, state),
};

/**
 * Layers upwards with their components, the strongest ones in a list beside it, and below what the one chosen
 * contributes at each token.
 *
 * @param {Components[]} all
 * @param {State} state
 */
function createComponents(all, state) {
  const { nodes, inputs } = nodesOf(all);
  const shares = carried(nodes);
  const first = Math.min(
    Math.max(
      1,
      shares.findIndex((share) => share >= FIRST),
    ),
    MOST_FIRST,
  );
  const slider = h("input", { type: "range", min: 1, max: nodes.length });
  const count = h("output", {});
  slider.addEventListener("input", () => state.set({ nodes: Number(slider.value) }));
  const scale = legend();
  const strongest = h("label", { class: "choice" }, h("span", {}, "Strongest"), slider, count);
  const list = h("ol", { "aria-label": "the strongest components, and the score of each" });
  const drawing = s("svg", { "aria-hidden": "true" });
  const scroll = h("div", { class: "scroll", role: "group", "aria-label": "drawing", "data-answer": "" }, drawing);
  const detail = h("div", {});
  const spoken = h("p", { class: "hidden", role: "status" });
  const told = teller(all, [...nodes, ...inputs]);
  const top = largest([...nodes, ...inputs].map(({ score }) => score));
  let width = 480;
  /** @type {[Node, SVGElement | HTMLElement][]} */
  let marks = [];
  const choose = () => {
    const node = [...nodes, ...inputs].find(({ key }) => key === state.get("node")) ?? nodes[0];
    for (const [of, element] of marks) {
      if (element instanceof HTMLElement) element.setAttribute("aria-pressed", String(of === node));
      else element.classList.toggle("chosen", of === node);
    }
    detail.replaceChildren(...detailOf(node, told(node), state.get("theme")));
    const said = [detail.firstElementChild, detail.lastElementChild].map((part) => part?.textContent);
    spoken.textContent = state.get("node") ? said.join(". ") : "";
  };
  const draw = () => {
    const theme = state.get("theme");
    const shown = Math.min(state.get("nodes") || first, nodes.length);
    slider.value = String(shown);
    count.textContent = `${shown} of ${nodes.length}, ${percent(shares[shown])} of the sum of absolute scores`;
    const signed = all.some((of) => of.signed);
    scale.show(top, all[0].unit, signed, theme);
    const listed = nodes.slice(0, Math.min(shown, MOST_LISTED)).map((node, index) => {
      const button = h("button", { type: "button", tabindex: index ? -1 : 0 }, told(node).name);
      paint(button, top > 0 ? node.score / top : 0, theme);
      return { node, button };
    });
    keepFocus(list, () =>
      list.replaceChildren(
        ...listed.map(({ node, button }) => h("li", {}, button, h("span", { class: "share" }, formatted(node.score)))),
      ),
    );
    const drawn = nodes.slice(0, isGrid(all) ? MOST_DRAWN : Math.min(shown, MOST_DRAWN));
    const shapes = drawInto(drawing, all, drawn, inputs, { width, top, theme });
    // What is wider than its place can be scrolled by keyboard, too.
    if (Number(drawing.getAttribute("width")) > width) scroll.tabIndex = 0;
    else scroll.removeAttribute("tabindex");
    for (const [node, shape] of shapes) shape.append(s("title", {}, told(node).text));
    marks = [...listed.map(({ node, button }) => /** @type {[Node, HTMLElement]} */ ([node, button])), ...shapes];
    for (const [{ key }, element] of marks) element.addEventListener("click", () => state.set({ node: key }));
    choose();
  };
  list.addEventListener("keydown", (event) => {
    const buttons = [...list.querySelectorAll("button")];
    const now = buttons.findIndex((button) => button === event.target);
    const next = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: buttons.length - 1 }[event.key] ?? -1;
    if (!buttons[next]) return;
    event.preventDefault();
    buttons.forEach((button, index) => (button.tabIndex = index === next ? 0 : -1));
    buttons[next].focus();
  });
  draw();
  state.subscribe(["nodes", "theme"], draw);
  state.subscribe(["node"], choose);
  new ResizeObserver(() => {
    if (!scroll.clientWidth || Math.abs(scroll.clientWidth - width) < 2) return;
    width = scroll.clientWidth;
    draw();
  }).observe(scroll);
  const tools = h("div", { class: "tools" }, strongest, scale.element);
  return h("div", {}, tools, h("div", { class: "columns" }, list, scroll), detail, spoken);
}

/**
 * Names nodes, and tells their shares of the absolute scores of their kind, or of the stream at their layer.
 *
 * @param {Components[]} all
 * @param {Node[]} nodes
 * @returns {(node: Node) => { name: string, text: string }}
 */
function teller(all, nodes) {
  const several = new Set(all.map(({ stack }) => stack)).size > 1;
  /** @param {Node} node */
  const group = ({ of, layer }) => (of.kind === "residual" ? `${of.stack} ${layer}` : of.kind);
  /** @type {Map<string, number>} */
  const sums = new Map();
  for (const node of nodes) sums.set(group(node), (sums.get(group(node)) ?? 0) + Math.abs(node.score));
  return (node) => {
    const { of, layer, number, position, score } = node;
    const [one, every] = NAMES[of.kind];
    const whole = of.kind === "residual" ? "the stream there" : `all ${every}`;
    const place = `${several ? `${of.stack} ` : ""}${one} ${layer}${of.values.shape[1] > 1 ? `.${number}` : ""}`;
    const name = position === null ? place : `${place} at “${of.tokens.texts[position]}”`;
    const share = percent(Math.abs(score) / (sums.get(group(node)) || 1));
    return { name, text: `${name}: ${formatted(score)} (${share} of ${whole})` };
  };
}

/**
 * What a node contributes at each token.
 *
 * @param {Node} node
 * @param {{ text: string }} told
 * @param {"light" | "dark"} theme
 */
function detailOf({ of, values }, { text }, theme) {
  const heading = h("p", { class: "caption" }, h("strong", { dir: "auto" }, text));
  if (!values) return [heading, h("p", { class: "quiet" }, "Its scores at single tokens are not on this page.")];
  const { texts } = of.tokens;
  const top = largest(values);
  const tokens = texts.map((token, index) => {
    const element = h("span", { class: "token", dir: "auto", title: formatted(values[index]) }, token);
    paint(element, top > 0 ? values[index] / top : 0, theme);
    return element;
  });
  const best = topText(values, texts, NAMED, formatted);
  return [
    heading,
    h("p", { class: "strip", dir: direction(texts) }, ...tokens),
    h("p", { class: "quiet", dir: "auto" }, best && `At single tokens: ${best}`),
  ];
}

/**
 * Draws a grid of one kind, or the strongest of several kinds with a line from each to the output.
 *
 * @param {SVGSVGElement} drawing
 * @param {Components[]} all
 * @param {Node[]} shown
 * @param {Node[]} inputs
 * @param {{ width: number, top: number, theme: "light" | "dark" }} how `top` has the largest area or the strongest colour
 * @returns {[Node, SVGElement][]} the shape of each node
 */
function drawInto(drawing, all, shown, inputs, { width, top, theme }) {
  const grid = isGrid(all);
  const { levels, bands, columns, at } = componentLayout(all, shown, inputs);
  const step = Math.min(STEP.most, Math.max(STEP.least, (width - LEFT - LABEL.width) / columns));
  const row = Math.min(ROW.most, Math.max(ROW.least, (width < NARROW ? HEIGHT.narrow : HEIGHT.wide) / levels.length));
  const head = grid ? 34 : 64;
  const x = (/** @type {number} */ column) => LEFT + step * (column + 0.5);
  const y = (/** @type {number} */ level) => head + row * (levels.length - level - 0.5);
  const ends = bands.map(({ start, size }) => start + size);
  const output = { x: x((Math.max(...ends) - 1) / 2), y: 8 };
  const entering = new Set(inputs);
  /** @type {[Node, SVGElement][]} */
  const shapes = [];
  /** @type {SVGElement[]} */
  const lines = [];
  for (const [node, { column, level }] of at) {
    const share = node.score / (top || 1);
    const [cx, cy, sign] = [x(column), y(level), share < 0 ? "below" : "above"];
    const fill = css(colorOf(grid ? share : 0.6 * Math.sign(share), theme));
    const cell = { x: cx - step / 2 + 0.5, y: cy - row / 2 + 0.5, width: step - 1, height: row - 1 };
    const r = Math.max(1, 0.48 * Math.min(step, row) * Math.sqrt(Math.abs(share))).toFixed(2);
    shapes.push([node, grid ? s("rect", { ...cell, fill }) : s("circle", { cx, cy, r, fill, class: sign })]);
    if (grid || entering.has(node)) continue;
    const middle = (cy + output.y) / 2;
    const d = `M${cx} ${cy}C${cx} ${middle} ${output.x} ${middle} ${output.x} ${output.y}`;
    lines.push(s("path", { d, class: sign, stroke: fill, "stroke-width": (0.5 + 3.5 * Math.abs(share)).toFixed(2) }));
  }
  const halves = new Set(levels.map(({ half }) => half)).size > 1;
  const names = levels.flatMap(({ half, layer }, level) => {
    const named = layer === null ? "input" : halves && !layer ? `${half.slice(0, 3)} 0` : String(layer);
    const skipped = layer !== null && layer % Math.ceil(LABEL.height / row) > 0;
    return skipped ? [] : [label(LEFT - 6, y(level) + 4, named, { "text-anchor": "end" })];
  });
  const feet = y(0) + row / 2 + 6;
  const [under] = grid && shown[0].position !== null ? [all[0]] : inputs.map(({ of }) => of);
  const texts = under?.tokens.texts ?? [];
  for (const { of, start, size, numbered } of bands) {
    const cross = of.stack === "cross" ? "cross-attention " : "";
    names.push(label(x(start) - step / 2, head - 20, cross + (of === under ? "positions" : NAMES[of.kind][1]), {}));
    if (!numbered || size === 1 || of === under) continue;
    for (let column = 0; column < size; column += Math.ceil(LABEL.width / step))
      names.push(label(x(start + column), head - 5, String(column), { "text-anchor": "middle" }));
  }
  for (let column = 0; column < texts.length; column += Math.ceil(LABEL.height / step)) {
    const turn = { "text-anchor": "end", transform: `rotate(-50 ${x(column) + 4} ${feet + 4})` };
    names.push(label(x(column) + 4, feet + 4, shortened(texts[column], LABEL.characters), turn));
  }
  const end = grid ? [] : [s("circle", { cx: output.x, cy: output.y, r: 5, class: "output" })];
  if (!grid) names.push(label(output.x + 10, output.y + 4, "output", {}));
  const [across, down] = [x(columns) + LABEL.width, feet + (texts.length ? LABEL.turned : 0)];
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${across} ${down}`, width: across, height: down }))
    drawing.setAttribute(name, String(value));
  drawing.replaceChildren(...lines, ...end, ...shapes.map(([, shape]) => shape), ...names);
  return shapes;
}

/** @type {(x: number, y: number, text: string, attributes: Record<string, string>) => SVGElement} */
function label(x, y, text, attributes) {
  return s("text", { x, y, ...attributes }, text);
}
