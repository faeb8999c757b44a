/** @import { Example, Page, State, Values } from "./types.js" */

import { opener, parsePage } from "./data.js";
import { h, isolated, keepFocus } from "./dom.js";
import { methodsOf, stacksOf } from "./grids.js";
import { createState, readFragment, scoped } from "./state.js";
import { toolbar } from "./toolbar.js";
import { viewsOf } from "./views/index.js";
import { asWords, movedPlaces } from "./words.js";

/** @type {Values} */
const DEFAULTS = {
  example: 0,
  method: "",
  beside: "",
  stack: "encoder",
  layer: "all",
  head: "all",
  scale: "map",
  hover: null,
  cell: null,
  pins: [],
  words: true,
  heads: false,
  lines: 0,
  colored: [],
  from: "",
  to: "",
  flow: 0.04,
  nodes: 0,
  node: "",
  views: [],
  theme: "light",
};

/**
 * Shows a page, and what the state says of it.
 *
 * @param {Page} page
 * @param {ReturnType<typeof createState>} state
 * @param {HTMLElement} root
 */
function start(page, state, root) {
  const open = opener(page);
  /** Ends what the content now shown follows. */
  let end = () => {};
  let turn = 0;

  /** @param {Example | null} given the example, of tokens */
  const draw = (given) => {
    end();
    const example = given && state.get("words") ? asWords(given) : given;
    if (example) state.fit(fitting(example, state));
    const scope = scoped(state);
    end = scope.end;
    const applying = viewsOf(example).filter((view) => view.applies(page, example));
    const named = applying.filter(({ name }) => state.get("views").includes(name));
    const sections = (named.length ? named : applying).map((view) => {
      const heading = h("h2", { id: `view-${view.name}` }, view.title);
      const attributes = { class: `view ${view.name}`, "aria-labelledby": heading.id };
      return h("section", attributes, heading, view.create(page, example, scope.state));
    });
    const answer = given?.answer ? [h("p", { class: "answer" }, ...isolated(given.answer))] : [];
    const facts = Object.entries(given?.facts ?? {}).map(([name, value]) => `${name}: ${value}`);
    if (facts.length) answer.push(h("p", { class: "quiet" }, ...isolated(facts.join(" · "))));
    const bar = toolbar(page, given, scope.state, applying);
    // What was found on all examples comes before the choice of one.
    const first = sections.filter((section) => section.classList.contains("findings"));
    const others = sections.filter((section) => !first.includes(section));
    const content = first.length ? [...first, bar, ...answer, ...others] : [...answer, bar, ...others];
    keepFocus(root, () => root.replaceChildren(...content));
    scope.state.subscribe(["views"], () => draw(given));
    scope.state.subscribe(["words"], () => {
      if (given)
        state.set({ hover: null, cell: null, pins: movedPlaces(state.get("pins"), given, state.get("words")) });
      draw(given);
    });
  };

  const show = async () => {
    const own = ++turn;
    if (state.get("example") >= page.examples.length && page.examples.length) return state.set({ example: 0 });
    const heads = state.get("heads") || state.get("head") !== "all";
    const example = page.examples.length ? await open(state.get("example"), heads) : null;
    if (own === turn) draw(example); // otherwise another one was chosen meanwhile
  };
  state.subscribe(["example", "heads"], show);
  show();
  addEventListener("hashchange", () => {
    const { theme, ...defaults } = DEFAULTS;
    end();
    state.set({ ...defaults, ...readFragment(location.hash) });
    show();
  });
}

/**
 * What of the state must change to fit an example.
 *
 * @param {Example} example
 * @param {State} now
 * @returns {Partial<Values>}
 */
function fitting(example, now) {
  const methods = methodsOf(example);
  const stacks = stacksOf(example);
  const layers = example.maps.flatMap((maps) => maps.layers);
  const heads = Math.max(0, ...example.maps.map(({ values: { shape } }) => (shape.length === 4 ? shape[1] : 0)));
  const sizes = { input: example.inputs.texts.length, output: (example.outputs ?? example.inputs).texts.length };
  const [method, stack, layer, head] = [now.get("method"), now.get("stack"), now.get("layer"), now.get("head")];
  return {
    method: methods.includes(method) ? method : (methods[0] ?? ""),
    beside: ["none", ...methods].includes(now.get("beside")) ? now.get("beside") : "",
    stack: stacks.includes(stack) ? stack : (stacks[0] ?? "encoder"),
    layer: layer === "all" || layers.includes(layer) ? layer : "all",
    head: head === "all" || head < heads ? head : "all",
    pins: now.get("pins").filter(({ side, index }) => index < sizes[side]),
    hover: null,
    cell: null,
  };
}

/** @param {string} fragment */
function writeAddress(fragment) {
  try {
    history.replaceState(null, "", fragment ? `#${fragment}` : `${location.pathname}${location.search}`);
  } catch {
    // A page in a sandboxed frame has no address of its own.
  }
}

/**
 * Keeps the colours those of the reader's system; paper is light.
 *
 * @param {State} state
 */
function watchTheme(state) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const follow = () => state.set({ theme: dark.matches && !paper.matches ? "dark" : "light" });
  dark.addEventListener("change", follow);
  paper.addEventListener("change", follow);
  follow();
}

const state = createState(DEFAULTS, location, writeAddress);
watchTheme(state);
start(parsePage(document), state, /** @type {HTMLElement} */ (document.getElementById("views")));
