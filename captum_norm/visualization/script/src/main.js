/** @import { Example, State, Values } from "./types.js" */

import { opener, parsePage } from "./data.js";
import { h } from "./dom.js";
import { methodsOf, stacksOf } from "./maps.js";
import { createState, scoped } from "./state.js";
import { toolbar } from "./toolbar.js";
import { views } from "./views/index.js";

/** @type {Values} */
const DEFAULTS = {
  example: 0,
  method: "",
  stack: "encoder",
  layer: "all",
  head: "all",
  scale: "layer",
  hover: null,
  pins: [],
  words: true,
  threshold: 0.1,
  views: [],
  theme: "light",
};

const page = parsePage(document);
const open = opener(page);
const state = createState(DEFAULTS, location, writeAddress);
const root = /** @type {HTMLElement} */ (document.getElementById("views"));

/** Ends the subscriptions of the example shown. */
let end = () => {};
let shown = 0;

/** Shows the example that the state names. */
async function show() {
  const turn = ++shown;
  if (page.examples.length && state.get("example") >= page.examples.length) return state.set({ example: 0 });
  const example = page.examples.length ? await open(state.get("example")) : null;
  if (turn !== shown) return; // another one was chosen meanwhile
  end();
  if (example) state.set(fitting(example, state));
  const scope = scoped(state);
  end = scope.end;
  const applying = views.filter((view) => view.applies(page, example));
  const draw = () => {
    const named = applying.filter((view) => state.get("views").includes(view.name));
    const drawn = (named.length ? named : applying).map((view) => {
      const inner = scoped(scope.state);
      ends.push(inner.end);
      return h(
        "section",
        { class: `view ${view.name}`, "aria-labelledby": `view-${view.name}` },
        h("h2", { id: `view-${view.name}` }, view.title),
        view.create(page, example, inner.state),
      );
    });
    root.replaceChildren(toolbar(page, example, scope.state, applying), ...drawn);
  };
  /** @type {(() => void)[]} */
  const ends = [];
  draw();
  scope.state.subscribe(["views"], () => {
    ends.splice(0).forEach((one) => one());
    draw();
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
    stack: stacks.includes(stack) ? stack : (stacks[0] ?? "encoder"),
    layer: layer === "all" || layers.includes(layer) ? layer : "all",
    head: head === "all" || head < heads ? head : "all",
    pins: now.get("pins").filter(({ side, index }) => index < sizes[side]),
    hover: null,
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

/** Keeps the colours those of the reader's system; paper is light. */
function watchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const follow = () => state.set({ theme: dark.matches && !paper.matches ? "dark" : "light" });
  dark.addEventListener("change", follow);
  paper.addEventListener("change", follow);
  follow();
}

watchTheme();
state.subscribe(["example"], () => {
  state.set({ pins: [], hover: null });
  show();
});
addEventListener("hashchange", () => location.reload());
show();
