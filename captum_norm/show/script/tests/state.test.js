import assert from "node:assert/strict";
import test from "node:test";

import { createState, readFragment, scoped, writeFragment } from "../src/state.js";

/** @type {import("../src/types.js").Values} */
const DEFAULTS = {
  example: 0,
  method: "norm",
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
  lines: 40,
  colored: [],
  from: "",
  to: "",
  views: [],
  theme: "light",
};

test("what a fragment says comes back as it was", () => {
  /** @type {import("../src/types.js").Values} */
  const values = {
    ...DEFAULTS,
    example: 3,
    method: "norm (attn_res) & more",
    layer: 0,
    head: 11,
    pins: [
      { side: "output", index: 4 },
      { side: "output", index: 0 },
    ],
    words: false,
    lines: 12,
    colored: [11, 0],
    from: "cat & dog",
    views: ["maps"],
  };
  const fragment = writeFragment(values, DEFAULTS);
  assert.deepEqual({ ...DEFAULTS, ...readFragment(`#${fragment}`) }, values);
  assert.match(fragment, /layer=0&head=11&pins=output:4,output:0/);
});

test("defaults are not written", () => {
  assert.equal(writeFragment(DEFAULTS, DEFAULTS), "");
  assert.equal(writeFragment({ ...DEFAULTS, hover: { side: "input", index: 1 }, theme: "dark" }, DEFAULTS), "");
});

for (const hostile of [
  "#__proto__=1&constructor=x&toString=2",
  "#example=-1&layer=1e9&head=NaN&scale=huge&stack=none&words=2&lines=-7",
  "#pins=output:1,output:2,output:3",
  "#pins=output:1,input:2",
  "#pins=output:99999999",
  "#views=<script>",
  "#colored=1,,2",
  "#hover=input:1&theme=dark",
  `#method=${"x".repeat(5000)}`,
  "#%E0%A4%A",
]) {
  test(`ignored: ${hostile.slice(0, 40)}`, () => {
    const { views, ...read } = readFragment(hostile);
    assert.deepEqual([read, views ?? []], [{}, []]);
    assert.equal(/** @type {any} */ ({}).polluted, undefined);
  });
}

test("only those who follow a changed key are called, and not after their end", () => {
  const state = createState(DEFAULTS);
  /** @type {string[]} */
  const calls = [];
  const scope = scoped(state);
  scope.state.subscribe(["layer", "head"], () => calls.push("grid"));
  state.subscribe(["pins"], () => calls.push("pins"));
  state.set({ layer: 2, head: 1 });
  state.set({ layer: 2 });
  state.set({ pins: [] });
  assert.deepEqual(calls, ["grid"]);
  scope.end();
  state.set({ layer: 3 });
  assert.deepEqual(calls, ["grid"]);
});

test("the fragment is written with each change", () => {
  /** @type {string[]} */
  const written = [];
  const state = createState(DEFAULTS, undefined, (fragment) => written.push(fragment));
  state.set({ layer: 2 });
  state.set({ layer: "all" });
  state.set({ hover: { side: "input", index: 1 } }); // not in the address
  assert.deepEqual(written, ["layer=2", ""]);
});
