/** @import { Example, Graph, State, View } from "../types.js" */
/** @import { Drawn, FlowGraph } from "../layouts/flow.js" */

import { paint } from "../colors.js";
import { h, s } from "../dom.js";
import { flowLayout, joined, rolloutGraph, rolloutShares, routes, through } from "../layouts/flow.js";
import { curve } from "../layouts/links.js";
import { percent } from "../layouts/numbers.js";
import { gridOf, mapsOf } from "../grids.js";
import { pointing } from "../pointing.js";
import { read } from "../readings.js";
import { groupingOf } from "../words.js";

const ROW = 24;
const HEAD = 22;
/** How far what stays in its row is from the residual connection. */
const BOW = 11;
/** Longer inputs have rows for the tokens on a route alone. */
const MOST_ROWS = 40;
const MOST_EDGES = 2000;
const LARGEST_THRESHOLD = 0.3;
/** Pinned, a token is the one whose row is followed. */
const SIDE = "output";

/** @type {Record<string, string>} */
const PARTS = {
  attention: "attention",
  "feed-forward": "feed-forward network",
  residual: "residual connection",
  "own position": "the position itself",
};

/** @type {View} */
export const flow = {
  name: "flow",
  title: "Flow",
  applies: (_page, example) => example !== null && (example.graph !== null || rolled(example).length > 0),
  create: (_page, example, state) => createFlow(/** @type {Example} */ (example), state),
};

/** The maps that have a rollout: of several layers of self-attention, never negative. @param {Example} example */
function rolled(example) {
  return example.outputs
    ? []
    : example.maps.filter(
        ({ stack, layers, signed, residual }) =>
          stack !== "cross" && stack !== "answer" && layers.length > 1 && !signed && residual !== null,
      );
}

/**
 * Tokens down, layers across: what reaches the output position by the edges above the threshold.
 *
 * @param {Example} example
 * @param {State} state
 */
function createFlow(example, state) {
  const slider = h("input", { type: "range", min: 0, max: LARGEST_THRESHOLD, step: 0.005, value: state.get("flow") });
  const limit = h("output", {});
  slider.addEventListener("input", () => state.set({ flow: Number(slider.value) }));
  const tools = h(
    "div",
    { class: "tools" },
    h("label", { class: "choice" }, h("span", {}, "Edges above"), slider, limit),
  );
  const names = h("div", {});
  const drawing = s("svg", { "aria-hidden": "true" });
  const scroll = h("div", { class: "scroll" }, drawing);
  const said = h("p", { class: "quiet", "aria-live": "polite" });
  const legend = h("p", { class: "legend quiet" });
  let width = 480;
  /** @type {(() => void)} */
  let light = () => {};

  const draw = () => {
    const found = graphOf(example, state);
    const least = Math.max(state.get("flow"), found?.threshold ?? 0);
    limit.textContent = percent(least);
    drawing.replaceChildren();
    legend.replaceChildren();
    if (!found) {
      names.replaceChildren();
      said.textContent = "The method chosen has no flow: choose another.";
      return;
    }
    const { graph } = found;
    const { texts } = example.inputs;
    const { edges, reach } = routes(graph, least);
    edges.sort((one, other) => one.flow - other.flow);
    const shown = edges.slice(Math.max(0, edges.length - MOST_EDGES));
    const { rows, columns, at } = flowLayout(graph.nodes, reach.keys(), texts.length, MOST_ROWS);
    const step = Math.max(14, (width - 24) / Math.max(1, columns.length - 1));
    const x = (/** @type {number} */ node) => 12 + step * (at.get(node)?.column ?? 0);
    const y = (/** @type {number} */ node) => HEAD + ROW * ((at.get(node)?.row ?? 0) + 0.5);
    const [across, down] = [24 + step * (columns.length - 1), HEAD + ROW * rows.length];
    drawing.setAttribute("viewBox", `0 0 ${across} ${down}`);
    drawing.setAttribute("width", String(across));
    drawing.setAttribute("height", String(down));
    /** @type {Map<Drawn, SVGElement>} */
    const paths = new Map();
    for (const edge of shown) {
      const [x0, y0, x1, y1] = [x(edge.source), y(edge.source), x(edge.target), y(edge.target)];
      const bow = y0 !== y1 ? 0 : edge.part === "feed-forward" ? BOW : edge.part === "attention" ? -BOW : 0;
      const d = bow
        ? `M${x0} ${y0}C${x0 + step / 3} ${y0 + bow} ${x1 - step / 3} ${y1 + bow} ${x1} ${y1}`
        : curve(x0, y0, x1, y1);
      const path = s("path", {
        class: edge.part.replace(" ", "-"),
        d,
        "stroke-width": (0.6 + 4.4 * Math.sqrt(edge.flow)).toFixed(2),
      });
      path.append(s("title", {}, told(edge)));
      paths.set(edge, path);
    }
    const dots = [...reach].map(([node, share]) => {
      const dot = s("circle", { cx: x(node), cy: y(node), r: (1.5 + 4 * Math.sqrt(share)).toFixed(2) });
      if (graph.outputs.includes(node)) dot.setAttribute("class", "output");
      const { position, layer, block } = graph.nodes[node];
      const where = block === "input" ? "input" : `layer ${layer}, behind ${block === "layer" ? "it" : block}`;
      dot.append(s("title", {}, `${texts[position]}, ${where}: ${percent(share)} of the output`));
      dot.addEventListener("pointerenter", () => glow(node));
      dot.addEventListener("pointerleave", () => light());
      return dot;
    });
    const glow = (/** @type {number | null} */ node) => {
      const bright = node === null ? null : through(shown, node);
      paths.forEach((path, edge) => path.classList.toggle("dim", bright !== null && !bright.has(edge)));
    };
    drawing.append(...headsOf(columns, (index) => 12 + step * index), ...paths.values(), ...dots);

    const inputs = new Map(
      graph.nodes.flatMap(({ block, position }, index) =>
        block === "input" && reach.has(index) ? [[position, index]] : [],
      ),
    );
    // The shares are those of all edges, as in the text: only the drawing has a threshold.
    const { shares } = found;
    const top = Math.max(...shares, 0);
    const reached = [...inputs.values()].reduce((sum, index) => sum + (reach.get(index) ?? 0), 0);
    const items = rows.map((position) => {
      const share = shares[position] ?? 0;
      const name = h("button", { type: "button", dir: "auto" }, texts[position]);
      paint(name, top > 0 ? share / top : 0, state.get("theme"));
      return { name, item: h("li", {}, h("span", { class: "share" }, share ? percent(share) : ""), name) };
    });
    const list = h(
      "ol",
      { "aria-label": "tokens, and the share of the output that comes from each" },
      ...items.map(({ item }) => item),
    );
    // Outputs that are no inputs have rows of their own, such as the tokens of an answer: inputs cannot be pinned.
    /** @type {import("../types.js").Place["side"]} */
    const side = example.outputs ? "input" : SIDE;
    pointing(
      list,
      items.map(({ name }, row) => [{ element: name, place: { side, index: rows[row] } }]),
      state,
    );
    names.replaceChildren(list);
    light = () => {
      const hover = state.get("hover");
      const index = hover && (example.outputs === null || hover.side === side) ? hover.index : null;
      items.forEach(({ name }, row) => name.classList.toggle("pointed", index === rows[row]));
      glow(index === null ? null : (inputs.get(index) ?? null));
    };
    light();
    const kinds = [...new Set(edges.map(({ part }) => part))];
    legend.append(
      ...Object.keys(PARTS)
        .filter((part) => kinds.includes(part))
        .map(sampleOf),
    );
    said.textContent = [
      found.note,
      least > 0 && reached < 0.995 ? `The edges shown carry ${percent(reached)} of it.` : "",
      edges.length ? "" : "Nothing exceeds the threshold: lower it.",
      shown.length < edges.length ? `Shown are the strongest ${shown.length} of ${edges.length} edges.` : "",
    ].join(" ");
  };
  draw();
  state.subscribe(["method", "stack", "pins", "flow", "theme"], draw);
  state.subscribe(["hover"], () => light());
  new ResizeObserver(() => {
    if (!scroll.clientWidth || Math.abs(scroll.clientWidth - width) < 2) return;
    width = scroll.clientWidth;
    draw();
  }).observe(scroll);
  return h("div", {}, tools, legend, h("div", { class: "columns" }, names, scroll), said);
}

/** `shares`: of each input in the output followed. @typedef {{ graph: FlowGraph, shares: number[], threshold: number, note: string }} Found */

/**
 * The example's graph, or that of the rollout of the maps chosen.
 *
 * @param {Example} example
 * @param {State} state
 * @returns {Found | null}
 */
function graphOf(example, state) {
  const method = state.get("method");
  const own = !rolled(example).some((maps) => maps.method === method);
  if (example.graph && (own || example.graph.method === method)) return ownGraph(example, example.graph, state);
  const tokens = example.pieces ?? example;
  const maps = rolled(tokens).find((one) => one.method === method && one.stack === state.get("stack"));
  if (!maps) return null;
  const grids = maps.layers.map((layer) => gridOf(tokens, { method, stack: maps.stack, layer, head: "all" }));
  const entries = grids.flatMap((grid) => grid?.values ?? []);
  const keys = tokens.inputs.texts.length;
  const rows = entries[0].length / keys;
  const position = followed(example, state);
  const groups = example.pieces ? groupingOf(tokens.inputs).of : null;
  const before = keys - rows;
  const all = [...Array(rows).keys()];
  const outputs = position === null ? all : all.filter((row) => (groups?.[row + before] ?? row + before) === position);
  const to = position === null ? "all positions together" : `“${example.inputs.texts[position]}”`;
  // Edges much thinner than those drawn are left out, which would be millions in a long text.
  const least = Math.max(state.get("flow") / 4, 0.002);
  const graph = rolloutGraph(entries, keys, outputs, maps.stack, least, !maps.residual);
  const { together } = mapsOf(tokens, method, maps.stack);
  const mean = together && !together.mean ? "" : " (the mean of its heads)";
  const half = maps.residual ? "" : " The residual connection counts as much as attention.";
  return {
    graph: groups ? joined(graph, groups) : graph,
    shares: summed(rolloutShares(entries, keys, outputs, !maps.residual), groups),
    threshold: 0,
    note: `Rollout of ${method}${mean} to ${to}.${half} Pin a token to follow it instead.`,
  };
}

/**
 * The row to follow: the one pinned, or the one explained; null for all together.
 *
 * @param {Example} example
 * @param {State} state
 */
function followed(example, state) {
  return state.get("pins").find(({ side }) => side === SIDE)?.index ?? example.row;
}

/**
 * @param {Example} example
 * @param {Graph} given
 * @param {State} state
 * @returns {Found}
 */
function ownGraph(example, given, state) {
  const { inputs, outputs } = example.pieces ?? example;
  const groups = example.pieces ? groupingOf(outputs ?? inputs).of : null;
  /** @param {[row: number, node: number]} output */
  const rowOf = ([row]) => groups?.[row] ?? row;
  const row = followed(example, state);
  const chosen = given.outputs.filter((output) => rowOf(output) === row);
  const ends = chosen.length ? chosen : given.outputs;
  const rows = new Set(ends.map(rowOf));
  const text = (example.outputs ?? example.inputs).texts[rowOf(ends[0])];
  const to = rows.size > 1 ? "all outputs together" : example.outputs ? `“${text}”` : `the output at “${text}”`;
  const graph = {
    nodes: given.nodes.map(([stack, layer, block, position]) => ({ stack, layer, block, position })),
    edges: given.edges.map(([source, target, part, head, importance]) => ({ source, target, part, head, importance })),
    outputs: ends.map(([, node]) => node),
  };
  const { reach } = routes(graph, given.threshold);
  const routed = inputs.texts.map(() => 0);
  graph.nodes.forEach(({ block, position }, node) => {
    if (block === "input") routed[position] += reach.get(node) ?? 0;
  });
  const grouped = example.pieces ? groupingOf(inputs).of : null;
  return {
    graph: grouped ? joined(graph, grouped) : graph,
    shares: scored(example, given, state) ?? summed(routed, grouped),
    threshold: given.threshold,
    note: `What reaches ${to}.${given.outputs.length > 1 ? " Pin a token to follow it instead." : ""}`,
  };
}

/**
 * The shares of words from those of tokens.
 *
 * @param {ArrayLike<number>} shares
 * @param {number[] | null} groups
 */
function summed(shares, groups) {
  if (!groups) return Array.from(shares);
  const sums = Array(Math.max(...groups) + 1).fill(0);
  groups.forEach((group, index) => (sums[group] += shares[index]));
  return sums;
}

/**
 * The shares of the scores that the method has of its own, of all routes: a graph has those above its threshold.
 *
 * @param {Example} example
 * @param {Graph} graph
 * @param {State} state
 */
function scored(example, graph, state) {
  const scores = example.scores.find(({ method }) => method === graph.method);
  const pins = state.get("pins").filter(({ side }) => side === SIDE);
  const stack = state.get("stack");
  if (!scores || scores.signed || (pins.length && stack !== "answer")) return null;
  const values = read(example, { method: scores.method, stack, layer: "all", head: "all" }, pins.slice(0, 1))?.values;
  const sum = values?.reduce((one, other) => one + other, 0);
  return values && sum ? Array.from(values, (value) => value / sum) : null;
}

/** @param {Drawn} edge */
function told({ part, heads, importance, flow }) {
  const which = heads.length
    ? `, head${heads.length > 1 ? "s" : ""} ${heads.sort((one, other) => one - other).join(", ")}`
    : "";
  return `${PARTS[part] ?? part}${which}: ${percent(importance)} of the stream, ${percent(flow)} of the output`;
}

/**
 * The numbers of the layers, over the last column of each.
 *
 * @param {FlowGraph["nodes"]} columns
 * @param {(index: number) => number} x
 */
function headsOf(columns, x) {
  const last = new Map(columns.map(({ stack, layer }, index) => [`${stack} ${layer}`, index]));
  return [...last.values()].map((index) => {
    const label = columns[index].block === "input" ? "input" : String(columns[index].layer);
    const anchor = index === 0 ? "start" : index === columns.length - 1 ? "end" : "middle";
    return s(
      "text",
      { x: anchor === "start" ? 0 : anchor === "end" ? x(index) + 12 : x(index), y: 12, "text-anchor": anchor },
      label,
    );
  });
}

/** @param {string} part */
function sampleOf(part) {
  const line = s("path", { class: part.replace(" ", "-"), d: "M0 5H28", "stroke-width": 2 });
  return h("span", {}, s("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" }, line), PARTS[part]);
}
