/** @import { Example, Links, Place, Side, State, View } from "../types.js" */
/** @import { ClassedLink, MapLine } from "../layouts/links.js" */

import { colorOf, css, inkOn } from "../colors.js";
import { formatted, h, keepFocus, s, segmented } from "../dom.js";
import { classified, counts, curve, mapLines } from "../layouts/links.js";
import { gridOf } from "../grids.js";
import { pointing } from "../pointing.js";

/** The height of a row, and that where there are many. */
const ROW = 26;
const LOW_ROW = 20;
const MANY = 20;
/** Of longer inputs only the tokens of the lines drawn have rows. */
const MOST_ROWS = 40;
/** Lines drawn unless the reader says how many: so many for each token, and at most so many. */
const EACH = 2;
const USUAL = 40;
const MOST = 200;

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
  const texts = { input: example.inputs.texts, output: (example.outputs ?? example.inputs).texts };
  const drawing = s("svg", { "aria-hidden": "true" });
  let width = 300;
  const columns = h("div", { class: "columns", "data-answer": "" });
  const said = h("p", { class: "quiet", "aria-live": "polite" });
  const legend = h("p", { class: "legend quiet" });
  const slider = h("input", { type: "range", min: 1, max: MOST });
  const limit = h("output", {});
  slider.addEventListener("input", () => state.set({ lines: Number(slider.value) }));
  const sliding = h("label", { class: "choice" }, h("span", {}, "Strongest lines"), slider, limit);
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
  /** The tokens that have rows. @type {Record<Side, Rows>} */
  let rows = { input: rowsOf([]), output: rowsOf([]) };
  /** @type {Record<Side, { list: HTMLElement, items: HTMLElement[] }>} */
  let lists = {
    input: tokensOf(rows.input, texts.input, "input", state),
    output: tokensOf(rows.output, [], "output", state),
  };
  let light = () => {};

  /** @param {Record<Side, number[]>} shown */
  const build = (shown) => {
    if (columns.childElementCount && `${shown.input} ${shown.output}` === `${rows.input.tokens} ${rows.output.tokens}`)
      return;
    rows = { input: rowsOf(shown.input), output: rowsOf(shown.output) };
    lists = {
      input: tokensOf(rows.input, texts.input, "input", state),
      output: tokensOf(rows.output, texts.output, "output", state),
    };
    const count = Math.max(shown.input.length, shown.output.length, 1);
    const row = count > MANY ? LOW_ROW : ROW;
    columns.style.setProperty("--row", `${row}px`);
    drawing.setAttribute("height", String(row * count));
    keepFocus(columns, () =>
      columns.replaceChildren(...namesOf(example, state), lists.input.list, drawing, lists.output.list),
    );
  };

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
    const usual = Math.min(USUAL, EACH * Math.max(texts.input.length, texts.output.length));
    const most = Math.min(MOST, state.get("lines") || usual);
    const own = example.outputs !== null;
    const { lines, above, top } = soft
      ? mapLines(grid.values, grid.columns, most, { wanted: touching(state.get("pins")), own })
      : { lines: [], above: 0, top: 0 };
    /** @param {Side} side */
    const shown = (side) => {
      const all = [...texts[side].keys()];
      if (!soft || all.length <= MOST_ROWS) return all;
      const pins = state.get("pins").filter((pin) => pin.side === side);
      const some = new Set([...lines.map((line) => line[side]), ...pins.map(({ index }) => index)]);
      return all.filter((index) => some.has(index));
    };
    build({ input: shown("input"), output: shown("output") });
    light = () => {
      const places = [state.get("hover"), ...state.get("pins")].filter((place) => place !== null);
      const touches = touching(places);
      const near =
        soft && state.get("hover")
          ? mapLines(grid.values, grid.columns, Math.max(most, USUAL), {
              wanted: touches,
              own,
              among: { input: rows.input.tokens, output: rows.output.tokens },
              top,
            }).lines
          : lines;
      const linked = classed.filter(({ input, output }) => touches(input, output));
      const row =
        Number(drawing.getAttribute("height")) / Math.max(rows.input.tokens.length, rows.output.tokens.length, 1);
      /** @type {(line: { input: number, output: number }) => [number, number]} */
      const ends = ({ input, output }) => [
        row * ((rows.input.at.get(input) ?? 0) + 0.5),
        row * ((rows.output.at.get(output) ?? 0) + 0.5),
      ];
      drawing.replaceChildren(
        ...near.map((line) => softLine(line, ends(line), width, state)),
        ...linked.flatMap((link) => linkLine(link, ends(link), width)),
      );
      mark(lists, rows, near, linked, places, state);
    };
    light();
    choice.hidden = !grid || !found;
    sliding.hidden = !soft;
    tools.hidden = choice.hidden && sliding.hidden;
    slider.value = String(most);
    limit.textContent = String(Math.min(most, above));
    legend.replaceChildren(...legendOf(classed));
    said.textContent = [
      soft && !example.outputs ? "What a token gives to itself has no line." : "",
      lines.length < above ? `Shown are the strongest ${lines.length} of ${above} lines.` : "",
    ].join(" ");
  };
  draw();
  state.subscribe(["pins", "method", "stack", "layer", "head", "lines", "theme"], draw);
  state.subscribe(["hover"], () => light());
  new ResizeObserver(() => {
    if (!drawing.clientWidth || drawing.clientWidth === width) return;
    width = drawing.clientWidth;
    light();
  }).observe(drawing);
  return h("div", {}, tools, legend, columns, said);
}

/** The tokens with rows, and the row of each. @typedef {{ tokens: number[], at: Map<number, number> }} Rows */

/** @param {number[]} tokens @returns {Rows} */
function rowsOf(tokens) {
  return { tokens, at: new Map(tokens.map((token, row) => [token, row])) };
}

/**
 * Whether a line is from or to one of some places; every line, if there are none.
 *
 * @param {Place[]} places
 * @returns {(input: number, output: number) => boolean}
 */
function touching(places) {
  return (input, output) =>
    !places.length || places.some(({ side, index }) => index === (side === "input" ? input : output));
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
 * @param {Rows} rows
 * @param {string[]} texts
 * @param {Side} side
 * @param {State} state
 */
function tokensOf({ tokens }, texts, side, state) {
  const items = tokens.map((token) => h("button", { type: "button", dir: "auto", title: texts[token] }, texts[token]));
  const list = h("ol", { class: side, "aria-label": `${side} tokens` }, ...items.map((item) => h("li", {}, item)));
  pointing(
    list,
    items.map((element, row) => [{ element, place: { side, index: tokens[row] } }]),
    state,
  );
  return { list, items };
}

/**
 * @param {MapLine} line
 * @param {[number, number]} ends their heights
 * @param {number} width
 * @param {State} state
 */
function softLine({ share, value }, [from, to], width, state) {
  const size = Math.abs(share);
  return s(
    "path",
    {
      d: curve(0, from, width, to),
      stroke: css(colorOf(Math.sign(share) * 0.55, state.get("theme"))),
      "stroke-width": (0.75 + 4.5 * size).toFixed(2),
      "stroke-opacity": (0.12 + 0.88 * size).toFixed(2),
    },
    s("title", {}, formatted(value)),
  );
}

/**
 * @param {ClassedLink} link
 * @param {[number, number]} ends their heights
 * @param {number} width
 */
function linkLine({ kind, probability }, [from, to], width) {
  const line = s("path", { class: `link ${kind}`, d: curve(0, from, width, to) });
  if (probability !== null) line.setAttribute("stroke-opacity", (0.25 + 0.75 * probability).toFixed(2));
  if (kind !== "wrong") return [line];
  const middle = (from + to) / 2;
  const cross = s("path", { class: "cross", d: `M${width / 2 - 5} ${middle - 5}l10 10m0 -10l-10 10` });
  return [line, cross];
}

/**
 * Marks the tokens: those pointed at, and how strong the lines to the others are.
 *
 * @param {Record<Side, { items: HTMLElement[] }>} lists
 * @param {Record<Side, Rows>} rows
 * @param {MapLine[]} lines
 * @param {ClassedLink[]} links
 * @param {Place[]} places
 * @param {State} state
 */
function mark(lists, rows, lines, links, places, state) {
  for (const side of /** @type {Side[]} */ (["input", "output"])) {
    const strongest = new Map();
    if (places.length) {
      for (const line of lines) {
        const index = line[side];
        if (Math.abs(line.share) > Math.abs(strongest.get(index) ?? 0)) strongest.set(index, line.share);
      }
    }
    const linked = new Set(links.map((link) => link[side]));
    lists[side].items.forEach((item, row) => {
      const index = rows[side].tokens[row];
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
