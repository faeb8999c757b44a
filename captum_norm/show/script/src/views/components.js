/** @import { Components, Example, State, View } from "../types.js" */
/** @import { Link, Node } from "../layouts/components.js" */

import { colorOf, css, paint } from "../colors.js";
import { direction, formatted, h, isolated, keepFocus, s } from "../dom.js";
import { shortened } from "../drawing/layout.js";
import { largest } from "../grids.js";
import { OUTPUT, carried, componentLayout, isGrid, linksOf, nodesOf } from "../layouts/components.js";
import { percent } from "../layouts/numbers.js";
import { legend } from "../legend.js";
import { topText } from "../readings.js";

/** The most room for the layers, in a narrow window and a wide one: the picture is on the first screen. */
const HEIGHT = { narrow: 190, wide: 380 };
const NARROW = 440;
/** The room for a node, more where edges are between them. */
const ROOM = { least: 8, most: 34, edges: 48 };
const LEFT = 44;
/** The room that a label takes. */
const LABEL = { height: 13, width: 22, letter: 6.2, characters: 12, turned: 64 };
/** The share of the sum of absolute scores that is shown at first. */
const FIRST = 0.8;
const MOST_FIRST = { nodes: 60, edges: 30 };
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

/** What a head reads by. @type {Record<string, string>} */
const READ = { q: "queries", k: "keys", v: "values" };

/** From one node to another, by their keys. @typedef {Pick<Link, "source" | "target" | "score">} Line */

/** @type {View} */
export const components = {
  name: "components",
  title: "Components",
  applies: (_page, example) => example !== null && example.components.length > 0,
  create: (_page, example, state) => createComponents(/** @type {Example} */ (example), state),
};

/**
 * Layers upwards with their components, the strongest ones in a list beside it, and below what the one chosen
 * contributes at each token, promotes, reads and is read by. Where edges are known, the strongest are drawn.
 *
 * @param {Example} example
 * @param {State} state
 */
function createComponents(example, state) {
  const all = example.components;
  const links = linksOf(example);
  const graph = links.length > 0;
  const { nodes, inputs } = nodesOf(all, graph);
  /** @type {Node} */
  const output = { key: OUTPUT, of: all[0], layer: 0, number: 0, position: null, score: 0, values: null };
  const every = [...nodes, ...inputs, output];
  const shares = graph
    ? carried(
        links.map(({ size }) => size),
        example.edges_total,
      )
    : carried(nodes.map(({ score }) => score));
  const enough = shares.findIndex((share) => share >= FIRST);
  const first = Math.min(Math.max(1, enough < 0 ? Infinity : enough), graph ? MOST_FIRST.edges : MOST_FIRST.nodes);
  const most = shares.length - 1;
  const slider = h("input", { type: "range", min: 1, max: most });
  const count = h("output", {});
  slider.addEventListener("input", () => state.set({ nodes: Number(slider.value) }));
  const scale = legend();
  const strongest = h("label", { class: "choice" }, h("span", {}, "Strongest"), slider, count);
  const list = h("ol", { "aria-label": "the strongest components, and the score of each" });
  const drawing = s("svg", { "aria-hidden": "true" });
  const scroll = h("div", { class: "scroll", role: "group", "aria-label": "drawing", "data-answer": "" }, drawing);
  const detail = h("div", {});
  const spoken = h("p", { class: "hidden", role: "status" });
  const told = teller(all, every, graph);
  const top = largest(every.map(({ score }) => score));
  let width = 480;
  /** @type {[Node, SVGElement | HTMLElement][]} */
  let marks = [];
  /** @type {[Line, SVGElement][]} */
  let lines = [];
  const choose = () => {
    const [key, theme] = [state.get("node"), state.get("theme")];
    const known = every.find((node) => node.key === key);
    const node = known ?? nodes[0];
    for (const [of, element] of marks) {
      if (element instanceof HTMLElement) element.setAttribute("aria-pressed", String(of === node));
      else element.classList.toggle("chosen", of === node);
    }
    for (const [{ source, target }, path] of lines)
      path.classList.toggle("dim", graph && known !== undefined && source !== key && target !== key);
    const ends = ["target", "source"].map((end) => endsOf(links, node, /** @type {"source" | "target"} */ (end), goTo));
    detail.replaceChildren(...detailOf(node, told(node), theme), ...promotedBy(node, example), ...ends.flat());
    const said = [...detail.querySelectorAll("p.caption, p.quiet")].map((part) => part.textContent);
    spoken.textContent = key ? said.filter(Boolean).join(". ") : "";
  };
  /** @type {(link: Link, key: string) => HTMLElement} */
  const goTo = (link, key) => {
    const node = /** @type {Node} */ (every.find((one) => one.key === key));
    const button = h("button", { type: "button" }, told(node).name);
    paint(button, link.score / Math.abs(links[0].score), state.get("theme"));
    button.addEventListener("click", () => {
      state.set({ node: key });
      detail.querySelector("p")?.focus();
    });
    return button;
  };
  const draw = () => {
    const theme = state.get("theme");
    const shown = Math.min(state.get("nodes") || first, most);
    slider.max = String(most);
    slider.value = String(shown);
    count.textContent = `${shown} of ${most}${graph ? " edges" : ""}, ${percent(shares[shown])} of the sum of absolute scores`;
    const signed = all.some((of) => of.signed);
    scale.show(top, all[0].unit, signed, theme);
    const strong = links.slice(0, shown);
    const ends = new Set(strong.flatMap(({ source, target }) => [source, target]));
    const drawn = graph
      ? nodes.filter(({ key }) => ends.has(key))
      : nodes.slice(0, isGrid(all) ? MOST_DRAWN : Math.min(shown, MOST_DRAWN));
    const ranked = graph ? [...drawn, ...inputs].sort(byScore) : nodes.slice(0, shown);
    const listed = ranked.slice(0, MOST_LISTED).map((node, index) => {
      const button = h("button", { type: "button", tabindex: index ? -1 : 0 }, told(node).name);
      paint(button, top > 0 ? node.score / top : 0, theme);
      return { node, button };
    });
    keepFocus(list, () =>
      list.replaceChildren(
        ...listed.map(({ node, button }) => h("li", {}, button, h("span", { class: "share" }, formatted(node.score)))),
      ),
    );
    const made = drawInto(drawing, all, drawn, inputs, { width, top, theme, links: graph ? strong : null, output });
    // What is wider than its place can be scrolled by keyboard, too.
    if (Number(drawing.getAttribute("width")) > width) scroll.tabIndex = 0;
    else scroll.removeAttribute("tabindex");
    lines = made.lines;
    for (const [node, shape] of made.shapes) shape.append(s("title", {}, told(node).text));
    marks = [...listed.map(({ node, button }) => /** @type {[Node, HTMLElement]} */ ([node, button])), ...made.shapes];
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
 * @param {boolean} graph whether all that enters the first layer is one node
 * @returns {(node: Node) => { name: string, text: string }}
 */
function teller(all, nodes, graph) {
  const several = new Set(all.map(({ stack }) => stack)).size > 1;
  /** @param {Node} node */
  const group = ({ of, layer }) => (of.kind === "residual" ? `${of.stack} ${layer}` : of.kind);
  /** @type {Map<string, number>} */
  const sums = new Map();
  for (const node of nodes) sums.set(group(node), (sums.get(group(node)) ?? 0) + Math.abs(node.score));
  return (node) => {
    const { key, of, layer, number, position, score } = node;
    if (key === OUTPUT) return { name: OUTPUT, text: OUTPUT };
    if (graph && of.kind === "residual") return { name: "input", text: `input: ${formatted(score)}` };
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
function detailOf({ key, of, values }, { text }, theme) {
  const heading = h("p", { class: "caption", tabindex: -1 }, h("strong", { dir: "auto" }, text));
  if (key === OUTPUT) return [heading];
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
 * The tokens whose logits a component raises most.
 *
 * @param {Node} node
 * @param {Example} example
 */
function promotedBy({ key, of, layer, number }, { promoted }) {
  const name = of.kind === "feed_forward" ? layer : `${layer}.${number}`;
  const tokens = promoted[`${of.stack} ${of.kind} ${name}`]?.map(
    ([token, logit]) => `“${token}” ${logit < 0 ? "" : "+"}${formatted(logit)}`,
  );
  const what = "Adds directly to logits where the output is read: ";
  return tokens && key !== OUTPUT
    ? [h("p", { class: "quiet", dir: "auto" }, ...isolated(what + tokens.join(" · ")))]
    : [];
}

/**
 * The strongest edges of a node: what it reads, or by what it is read.
 *
 * @param {Link[]} links
 * @param {Node} node
 * @param {"source" | "target"} end which end the node is
 * @param {(link: Link, key: string) => HTMLElement} goTo makes a button that leads to another node
 */
function endsOf(links, { key }, end, goTo) {
  const title = end === "target" ? "Reads most from" : "Is read most by";
  const items = links
    .filter((link) => link[end] === key)
    .slice(0, NAMED)
    .map((link) => {
      const parts = link.parts.map(([part, score]) => `${READ[part] ?? ""} ${link.parts[1] ? formatted(score) : ""}`);
      const which = parts.join(", ").trim();
      const score = h("span", { class: "share" }, `${formatted(link.score)}${which && ` (${which})`}`);
      return h("li", {}, goTo(link, end === "target" ? link.source : link.target), score);
    });
  return items.length ? [h("p", { class: "ends quiet" }, title), h("ul", { "aria-label": title }, ...items)] : [];
}

/** @type {(one: Node, other: Node) => number} */
function byScore(one, other) {
  return Math.abs(other.score) - Math.abs(one.score);
}

/**
 * Draws a grid of one kind; or of several kinds the strongest, with edges, or with a line from each to the output.
 *
 * @param {SVGSVGElement} drawing
 * @param {Components[]} all
 * @param {Node[]} shown
 * @param {Node[]} inputs
 * @param {{ width: number, top: number, theme: "light" | "dark", links: Link[] | null, output: Node }} how `top` has the
 *   largest area or the strongest colour
 * @returns {{ shapes: [Node, SVGElement][], lines: [Line, SVGElement][] }} the shape of each node and line
 */
function drawInto(drawing, all, shown, inputs, { width, top, theme, links, output }) {
  const grid = isGrid(all);
  const { levels, bands, columns, at } = componentLayout(all, shown, inputs);
  const roomy = links ? ROOM.edges : ROOM.most;
  const step = Math.min(roomy, Math.max(ROOM.least, (width - LEFT - LABEL.width) / columns));
  const row = Math.min(roomy, Math.max(ROOM.least, (width < NARROW ? HEIGHT.narrow : HEIGHT.wide) / levels.length));
  const head = grid ? 34 : 64;
  const x = (/** @type {number} */ column) => LEFT + step * (column + 0.5);
  const y = (/** @type {number} */ level) => head + row * (levels.length - level - 0.5);
  const across = x(columns - 0.5) + LABEL.width;
  const middle = x((Math.max(...bands.map(({ start, size }) => start + size)) - 1) / 2);
  const ends = new Map([[OUTPUT, { cx: middle, cy: 8 }]]);
  /** @type {[Node, SVGElement][]} */
  const shapes = [];
  for (const [node, { column, level }] of at) {
    const share = node.score / (top || 1);
    const [cx, cy, sign] = [
      links && inputs.includes(node) ? middle : x(column),
      y(level),
      share < 0 ? "below" : "above",
    ];
    const fill = css(colorOf(grid ? share : 0.6 * Math.sign(share), theme));
    const cell = { x: cx - step / 2 + 0.5, y: cy - row / 2 + 0.5, width: step - 1, height: row - 1 };
    const r = Math.max(links ? 3 : 1, 0.48 * Math.min(step, row) * Math.sqrt(Math.abs(share))).toFixed(2);
    shapes.push([node, grid ? s("rect", { ...cell, fill }) : s("circle", { cx, cy, r, fill, class: sign })]);
    ends.set(node.key, { cx, cy });
  }
  /** @type {Line[]} */
  const connected = links ?? (grid ? [] : shown.map(({ key, score }) => ({ source: key, target: OUTPUT, score })));
  const widest = (links ? largest(links.map(({ score }) => score)) : top) || 1;
  const lines = connected.map((line) => {
    const [from, to] = [line.source, line.target].map(
      (key) => /** @type {{ cx: number, cy: number }} */ (ends.get(key)),
    );
    const share = Math.abs(line.score) / widest;
    const rise = Math.abs(from.cy - to.cy);
    const bend = (from.cy + to.cy) / 2 - (rise ? 0 : row / 2);
    // Past the nodes between, in the same column.
    const bow = from.cx === to.cx && rise > row ? Math.min(step, rise / 4) : 0;
    const d = `M${from.cx} ${from.cy}C${from.cx + bow} ${bend} ${to.cx + bow} ${bend} ${to.cx} ${to.cy}`;
    const stroke = css(colorOf(0.6 * Math.sign(line.score), theme));
    const look = {
      class: line.score < 0 ? "below" : "above",
      stroke,
      "stroke-width": (0.5 + 3.5 * (links ? Math.sqrt(share) : share)).toFixed(2),
    };
    return /** @type {[Line, SVGElement]} */ ([line, s("path", { d, ...look })]);
  });
  const halves = new Set(levels.map(({ half }) => half)).size > 1;
  const names = levels.flatMap(({ half, layer }, level) => {
    const named = layer === null ? "input" : halves && !layer ? `${half.slice(0, 3)} 0` : String(layer);
    const skipped = layer !== null && layer % Math.ceil(LABEL.height / row) > 0;
    return skipped ? [] : [label(LEFT - 6, y(level) + 4, named, { "text-anchor": "end" })];
  });
  const feet = y(0) + row / 2 + 6;
  const [under] = grid && shown[0].position !== null ? [all[0]] : links ? [] : inputs.map(({ of }) => of);
  const texts = under?.tokens.texts ?? [];
  for (const { of, start, size, numbered } of bands) {
    const cross = of.stack === "cross" ? "cross-attention " : "";
    const name = cross + (of === under ? "positions" : NAMES[of.kind][1]);
    const left = x(start) - step / 2;
    const ending = left + LABEL.letter * name.length > across;
    names.push(label(ending ? across : left, head - 20, name, { "text-anchor": ending ? "end" : "start" }));
    if (!numbered || size === 1 || of === under) continue;
    for (let column = 0; column < size; column += Math.ceil(LABEL.width / step))
      names.push(label(x(start + column), head - 5, String(column), { "text-anchor": "middle" }));
  }
  for (let column = 0; column < texts.length; column += Math.ceil(LABEL.height / step)) {
    const turn = { "text-anchor": "end", transform: `rotate(-50 ${x(column) + 4} ${feet + 4})` };
    names.push(label(x(column) + 4, feet + 4, shortened(texts[column], LABEL.characters), turn));
  }
  const end = grid ? [] : [s("circle", { cx: middle, cy: 8, r: 5, class: "output" })];
  if (!grid) names.push(label(middle + 10, 12, "output", {}));
  if (links) shapes.push([output, end[0]]);
  const down = feet + (texts.length ? LABEL.turned : 0);
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${across} ${down}`, width: across, height: down }))
    drawing.setAttribute(name, String(value));
  drawing.replaceChildren(...lines.map(([, path]) => path), ...end, ...shapes.map(([, shape]) => shape), ...names);
  return { shapes, lines };
}

/** @type {(x: number, y: number, text: string, attributes: Record<string, string>) => SVGElement} */
function label(x, y, text, attributes) {
  return s("text", { x, y, ...attributes }, text);
}
