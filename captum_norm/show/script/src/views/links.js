/** @import { Example, Links, Place, Side, Stack, State, View } from "../types.js" */
/** @import { ClassedLink, MapLine } from "../layouts/links.js" */

import { colorOf, css, inkOn } from "../colors.js";
import { formatted, h, keepFocus, s, segmented } from "../dom.js";
import { classified, counts, curve, mapLines, overlaid, pickedTokens } from "../layouts/links.js";
import { gridOf, mapsOf } from "../grids.js";
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
/** Heads drawn over each other, each in a colour of its own, side by side so many pixels apart. */
const COLORS = 4;
const APART = 3;

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
  /** The tokens that have rows. @type {Record<Side, Rows>} */
  let rows = { input: rowsOf([]), output: rowsOf([]) };
  /** @type {Record<Side, { list: HTMLElement, items: HTMLElement[] }>} */
  let lists = {
    input: tokensOf(rows.input, texts.input, "input", state),
    output: tokensOf(rows.output, [], "output", state),
  };
  const names = { input: h("span"), output: h("span") };
  columns.append(picker(names.input, "from", state), h("div"), picker(names.output, "to", state));
  columns.append(lists.input.list, drawing, lists.output.list);
  const heads = h("div", { class: "segmented heads", role: "group", "aria-label": "Heads in colours" });
  const overlay = h("div", { class: "choice" }, h("span", {}, "Heads in colours"), heads);
  let light = () => {};

  /** @param {Record<Side, number[]>} shown */
  const build = (shown) => {
    if (`${shown.input} ${shown.output}` === `${rows.input.tokens} ${rows.output.tokens}`) return;
    const before = lists;
    rows = { input: rowsOf(shown.input), output: rowsOf(shown.output) };
    lists = {
      input: tokensOf(rows.input, texts.input, "input", state),
      output: tokensOf(rows.output, texts.output, "output", state),
    };
    const count = Math.max(shown.input.length, shown.output.length, 1);
    const row = count > MANY ? LOW_ROW : ROW;
    columns.style.setProperty("--row", `${row}px`);
    drawing.setAttribute("height", String(row * count));
    keepFocus(columns, () => {
      before.input.list.replaceWith(lists.input.list);
      before.output.list.replaceWith(lists.output.list);
    });
  };

  const draw = () => {
    const [method, stack, layer] = [state.get("method"), state.get("stack"), state.get("layer")];
    const count = mapsOf(example, method, stack).heads?.values.shape[1] ?? 0;
    const colored = state.get("colored").filter((head) => head < count);
    const grids = (colored.length ? colored : [state.get("head")])
      .map((head) => gridOf(example, { method, stack, layer, head }))
      .filter((grid) => grid !== null);
    const found = linksOf(example, method);
    const soft = grids.length > 0 && (!found || mode === "map");
    const classed = found
      ? soft
        ? goldOf(found)
        : classified(turned(found.links), turned(found.sure), turned(found.possible))
      : [];
    const usual = Math.min(USUAL, EACH * Math.max(texts.input.length, texts.output.length));
    const most = Math.min(MOST, state.get("lines") || usual);
    const own = example.outputs !== null;
    const picked = {
      input: pickedTokens(texts.input, state.get("from")),
      output: pickedTokens(texts.output, state.get("to")),
    };
    /** @type {(places: Place[], which?: object, tops?: number[]) => ReturnType<typeof overlaid>} */
    const linesAt = (places, which, tops = []) => {
      const [wanted, count] = [touching(places, picked), which ? Math.max(most, USUAL) : most];
      const maps = soft
        ? grids.map(({ values, columns }, map) =>
            mapLines(values, columns, count, { wanted, own, ...which, top: tops[map] }),
          )
        : [];
      return overlaid(maps, count);
    };
    const { lines, above, tops } = linesAt(state.get("pins"));
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
      const among = { input: rows.input.tokens, output: rows.output.tokens };
      const near = state.get("hover") ? linesAt(places, { among }, tops).lines : lines;
      const touches = touching(places, picked);
      const linked = classed.filter(({ input, output }) => touches(input, output));
      const row =
        Number(drawing.getAttribute("height")) / Math.max(rows.input.tokens.length, rows.output.tokens.length, 1);
      /** @type {(line: { input: number, output: number }) => [number, number]} */
      const ends = ({ input, output }) => [
        row * ((rows.input.at.get(input) ?? 0) + 0.5),
        row * ((rows.output.at.get(output) ?? 0) + 0.5),
      ];
      drawing.replaceChildren(
        ...near.map((line) => softLine(line, ends(line), width, state, colored)),
        ...linked.flatMap((link) => linkLine(link, ends(link), width)),
      );
      mark(lists, rows, near, linked, places, picked, state);
    };
    light();
    choice.hidden = !grids.length || !found;
    sliding.hidden = !soft;
    overlay.hidden = !soft || count < 2;
    tools.hidden = choice.hidden && sliding.hidden;
    keepFocus(heads, () => heads.replaceChildren(...headButtons(count, colored, state)));
    [names.input.textContent, names.output.textContent] = namesOf(example, stack);
    slider.value = String(most);
    limit.textContent = String(Math.min(most, above));
    legend.replaceChildren(...legendOf(classed));
    said.textContent = [
      soft && !example.outputs ? "What a token gives to itself has no line." : "",
      lines.length < above ? `Shown are the strongest ${lines.length} of ${above} lines.` : "",
      soft && !above ? "No line runs between these tokens." : "",
      colored.length > 1 ? "The widths of each head are relative to its largest entry." : "",
    ].join(" ");
  };
  const tools = h("div", { class: "tools" }, choice, sliding, overlay);
  draw();
  state.subscribe(["pins", "method", "stack", "layer", "head", "colored", "from", "to", "lines", "theme"], draw);
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
 * Whether a line runs between tokens that were picked, and from or to one of some places, if there are any.
 *
 * @param {Place[]} places
 * @param {Record<Side, boolean[]>} picked
 * @returns {(input: number, output: number) => boolean}
 */
function touching(places, picked) {
  return (input, output) =>
    picked.input[input] &&
    picked.output[output] &&
    (!places.length || places.some(({ side, index }) => index === (side === "input" ? input : output)));
}

/**
 * The names over the columns.
 *
 * @param {Example} example
 * @param {Stack} stack
 */
function namesOf(example, stack) {
  if (!example.outputs) return ["from", "to"];
  return example.links.length > 0 || stack === "cross" ? ["source", "target"] : ["input", "output"];
}

/**
 * The field over a column, for words of the tokens between which lines run.
 *
 * @param {HTMLElement} name
 * @param {"from" | "to"} key
 * @param {State} state
 */
function picker(name, key, state) {
  const field = h("input", { type: "search", placeholder: "all tokens" });
  field.value = state.get(key);
  field.addEventListener("input", () => state.set({ [key]: field.value }));
  return h("label", { class: "quiet" }, name, field);
}

/**
 * @param {number} count
 * @param {number[]} colored the heads that have a colour
 * @param {State} state
 */
function headButtons(count, colored, state) {
  return Array.from({ length: count }, (_, head) => {
    const at = colored.indexOf(head);
    const button = h("button", { type: "button", "aria-pressed": String(at >= 0), class: `head-${at}` }, String(head));
    const others = colored.filter((other) => other !== head);
    const next = at < 0 ? [...others.slice(0, COLORS - 1), head] : others;
    button.addEventListener("click", () => state.set({ colored: next }));
    return button;
  });
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
 * @param {MapLine & { map: number }} line
 * @param {[number, number]} ends their heights
 * @param {number} width
 * @param {State} state
 * @param {number[]} colored the heads that have a colour
 */
function softLine({ share, value, map }, [from, to], width, state, colored) {
  const size = Math.abs(share);
  const aside = APART * (map - (colored.length - 1) / 2);
  return s(
    "path",
    {
      ...(colored.length
        ? { class: `head-${map}${share < 0 ? " below" : ""}`, d: curve(0, from + aside, width, to + aside) }
        : { stroke: css(colorOf(Math.sign(share) * 0.55, state.get("theme"))), d: curve(0, from, width, to) }),
      "stroke-width": (0.75 + 4.5 * size).toFixed(2),
      "stroke-opacity": (0.12 + 0.88 * size).toFixed(2),
    },
    s("title", {}, colored.length ? `head ${colored[map]}: ${formatted(value)}` : formatted(value)),
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
 * @param {Record<Side, boolean[]>} picked
 * @param {State} state
 */
function mark(lists, rows, lines, links, places, picked, state) {
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
      const near = !places.length || pointed || strongest.has(index) || linked.has(index);
      item.classList.toggle("apart", !near || !picked[side][index]);
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
