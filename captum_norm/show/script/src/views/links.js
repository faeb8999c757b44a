/** @import { Example, Links, Place, Side, State, View } from "../types.js" */
/** @import { ClassedLink, MapLine } from "../layouts/links.js" */

import { colorOf, css, inkOn } from "../colors.js";
import { formatted, h, s, segmented } from "../dom.js";
import { classified, counts, curve, mapLines } from "../layouts/links.js";
import { gridOf } from "../grids.js";
import { pointing } from "../pointing.js";

const ROW = 26;
const MOST = 1500;
/** Of all tokens together; more lines are one colour. */
const FEW = 300;
const MOST_EACH = 4;
/** Of a token's own lines, when it is pointed at. */
const FAINTEST = 0.02;

const KINDS = /** @type {const} */ ({
  link: "links",
  sure: "agree with a sure gold link",
  possible: "agree with a possible one",
  wrong: "wrong",
  missed: "missed sure gold links",
  "gold sure": "sure gold links",
  "gold possible": "possible gold links",
});

/** @type {View} */
export const links = {
  name: "links",
  title: "Links",
  applies: (_page, example) => example !== null && (example.maps.length > 0 || example.links.length > 0),
  create: (_page, example, state) => createLinks(/** @type {Example} */ (example), state),
};

/**
 * Inputs on the left, outputs on the right, and between them the entries of the map chosen, or the links.
 *
 * @param {Example} example
 * @param {State} state
 */
function createLinks(example, state) {
  const outputs = example.outputs ?? example.inputs;
  const height = ROW * Math.max(example.inputs.texts.length, outputs.texts.length, 1);
  const drawing = s("svg", { height, "aria-hidden": "true" });
  const most = Math.min(MOST, Math.max(FEW, MOST_EACH * Math.max(example.inputs.texts.length, outputs.texts.length)));
  let width = 300;
  const left = tokensOf(example.inputs.texts, "input", state);
  const right = tokensOf(outputs.texts, "output", state);
  const columns = h("div", { class: "columns" }, ...namesOf(example, state), left.list, drawing, right.list);
  const said = h("p", { class: "quiet", "aria-live": "polite" });
  const legend = h("p", { class: "legend quiet" });
  const slider = h("input", { type: "range", min: 0, max: 100, value: Math.round(100 * state.get("threshold")) });
  const limit = h("output", {});
  slider.addEventListener("input", () => state.set({ threshold: Number(slider.value) / 100 }));
  const sliding = h("label", { class: "choice" }, h("span", {}, "Lines from"), slider, limit);
  /** @type {"links" | "map"} */
  let mode = "links";
  const choice = segmented(
    "Lines",
    [
      ["links", "Links"],
      ["map", "Map"],
    ],
    mode,
    (value) => {
      mode = value;
      draw();
    },
  );
  const tools = h("div", { class: "tools" }, choice, sliding);

  const draw = () => {
    const grid = gridOf(example, {
      method: state.get("method"),
      stack: state.get("stack"),
      layer: state.get("layer"),
      head: state.get("head"),
    });
    const found = linksOf(example, state.get("method"));
    const soft = grid !== null && (!found || mode === "map");
    const classed = found
      ? soft
        ? goldOf(found)
        : classified(turned(found.links), turned(found.sure), turned(found.possible))
      : [];
    const places = [state.get("hover"), ...state.get("pins")].filter((place) => place !== null);
    const touches = (/** @type {number} */ input, /** @type {number} */ output) =>
      !places.length || places.some(({ side, index }) => index === (side === "input" ? input : output));
    const least = places.length ? FAINTEST : Math.max(state.get("threshold"), 0.001);
    const { lines, above } = soft
      ? mapLines(grid.values, grid.columns, least, places.length ? MOST : most, {
          wanted: touches,
          own: example.outputs !== null,
        })
      : { lines: [], above: 0 };
    const own = classed.filter(({ input, output }) => touches(input, output));
    drawing.replaceChildren(
      ...lines.map((line) => softLine(line, width, state)),
      ...own.flatMap((link) => linkLine(link, width)),
    );
    mark(left.items, right.items, lines, own, places, state);
    choice.hidden = !grid || !found;
    sliding.hidden = !soft;
    tools.hidden = choice.hidden && sliding.hidden;
    limit.textContent = `${Math.round(100 * state.get("threshold"))} % of the largest`;
    legend.replaceChildren(...legendOf(classed));
    said.textContent = [
      soft && !example.outputs ? "What a token gives to itself has no line." : "",
      lines.length < above ? `Shown are the strongest ${lines.length} of ${above} lines.` : "",
    ].join(" ");
  };
  draw();
  state.subscribe(["hover", "pins", "method", "stack", "layer", "head", "threshold", "theme"], draw);
  new ResizeObserver(() => {
    if (!drawing.clientWidth || drawing.clientWidth === width) return;
    width = drawing.clientWidth;
    draw();
  }).observe(drawing);
  return h("div", {}, tools, legend, columns, said);
}

/**
 * The names over the columns.
 *
 * @param {Example} example
 * @param {State} state
 */
function namesOf(example, state) {
  const translated = example.links.length > 0 || state.get("stack") === "cross";
  const [left, right] = !example.outputs ? ["from", "to"] : translated ? ["source", "target"] : ["input", "output"];
  return [h("div", { class: "quiet" }, left), h("div", {}), h("div", { class: "quiet" }, right)];
}

/**
 * The links to show: those of the method chosen, or those that belong to none.
 *
 * @param {Example} example
 * @param {string} method
 * @returns {Links | undefined}
 */
function linksOf(example, method) {
  return (
    example.links.find((links) => links.method === method) ??
    example.links.find((links) => !links.method) ??
    example.links[0]
  );
}

/**
 * Links with the input first.
 *
 * @template {[number, number, ...unknown[]]} T
 * @template {T[] | null} L
 * @param {L} links
 * @returns {L}
 */
function turned(links) {
  return /** @type {L} */ (links && links.map(([output, input, ...rest]) => [input, output, ...rest]));
}

/**
 * The gold links alone, to compare a map with.
 *
 * @param {Links} links
 * @returns {ClassedLink[]}
 */
function goldOf({ sure, possible }) {
  const gold = classified(turned([...(sure ?? []), ...(possible ?? [])]), turned(sure), turned(possible));
  return gold.map((link) => ({ ...link, kind: link.kind === "sure" ? "gold sure" : "gold possible" }));
}

/**
 * A column of tokens.
 *
 * @param {string[]} texts
 * @param {Side} side
 * @param {State} state
 */
function tokensOf(texts, side, state) {
  const items = texts.map((text) => h("button", { type: "button", dir: "auto", title: text }, text));
  const list = h("ol", { class: side, "aria-label": `${side} tokens` }, ...items.map((item) => h("li", {}, item)));
  pointing(
    list,
    items.map((element, index) => [{ element, place: { side, index } }]),
    state,
  );
  return { list, items };
}

/**
 * @param {MapLine} line
 * @param {number} width
 * @param {State} state
 */
function softLine({ input, output, share, value }, width, state) {
  const size = Math.abs(share);
  return s(
    "path",
    {
      d: curveOf(input, output, width),
      stroke: css(colorOf(Math.sign(share) * 0.55, state.get("theme"))),
      "stroke-width": (0.75 + 4.5 * size).toFixed(2),
      "stroke-opacity": (0.12 + 0.88 * size).toFixed(2),
    },
    s("title", {}, formatted(value)),
  );
}

/**
 * @param {ClassedLink} link
 * @param {number} width
 */
function linkLine({ input, output, kind, probability }, width) {
  const line = s("path", { class: `link ${kind}`, d: curveOf(input, output, width) });
  if (probability !== null) line.setAttribute("stroke-opacity", (0.25 + 0.75 * probability).toFixed(2));
  if (kind !== "wrong") return [line];
  const middle = ROW * ((input + output) / 2 + 0.5);
  const cross = s("path", { class: "cross", d: `M${width / 2 - 5} ${middle - 5}l10 10m0 -10l-10 10` });
  return [line, cross];
}

/**
 * @param {number} input
 * @param {number} output
 * @param {number} width
 */
function curveOf(input, output, width) {
  return curve(0, ROW * (input + 0.5), width, ROW * (output + 0.5));
}

/**
 * Marks the tokens: those pointed at, and how strong the lines to the others are.
 *
 * @param {HTMLElement[]} inputs
 * @param {HTMLElement[]} outputs
 * @param {MapLine[]} lines
 * @param {ClassedLink[]} links
 * @param {Place[]} places
 * @param {State} state
 */
function mark(inputs, outputs, lines, links, places, state) {
  for (const [side, items] of /** @type {[Side, HTMLElement[]][]} */ ([
    ["input", inputs],
    ["output", outputs],
  ])) {
    const strongest = new Map();
    if (places.length) {
      for (const line of lines) {
        const index = line[side];
        if (Math.abs(line.share) > Math.abs(strongest.get(index) ?? 0)) strongest.set(index, line.share);
      }
    }
    const linked = new Set(links.map((link) => link[side]));
    items.forEach((item, index) => {
      const pointed = places.some((place) => place.side === side && place.index === index);
      const pinned = state.get("pins").some((place) => place.side === side && place.index === index);
      item.classList.toggle("pointed", pointed);
      item.setAttribute("aria-pressed", String(pinned));
      item.classList.toggle("apart", places.length > 0 && !pointed && !strongest.has(index) && !linked.has(index));
      const share = pointed ? undefined : strongest.get(index);
      const ground = share === undefined ? null : colorOf(share, state.get("theme"));
      item.style.backgroundColor = ground ? css(ground) : "";
      item.style.color = ground ? inkOn(ground) : "";
    });
  }
}

/** @param {ClassedLink[]} classed */
function legendOf(classed) {
  const found = counts(classed);
  const kinds = /** @type {(keyof typeof KINDS)[]} */ (Object.keys(KINDS)).filter((kind) => found[kind]);
  return kinds.map((kind) => {
    const sample = s(
      "svg",
      { viewBox: "0 0 28 10", "aria-hidden": "true" },
      s("path", { class: `link ${kind}`, d: "M0 5H28" }),
    );
    if (kind === "wrong") sample.append(s("path", { class: "cross", d: "M10 1l8 8m0 -8l-8 8" }));
    return h("span", {}, sample, `${found[kind]} ${KINDS[kind]}`);
  });
}
