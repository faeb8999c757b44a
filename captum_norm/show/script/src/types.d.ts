/**
 * The page's data, as captum_norm/show/page.py declares it: there is the meaning of each field.
 * Raw: as it stands in the file, arrays encoded. Without prefix: with arrays decoded, which is what views see.
 */

export interface RawArray {
  shape: number[];
  dtype: "f4" | "f2" | "i1";
  max: number[];
  data: string;
}

/** Row-major. */
export interface NumberArray {
  shape: number[];
  values: Float32Array;
}

export interface Tokens {
  texts: string[];
  words: number[] | null;
  word_texts: string[] | null;
  likely: string[] | null;
}

export type Stack = "encoder" | "decoder" | "cross" | "answer" | "links" | "vision";

interface ScoresOf<A> {
  method: string;
  unit: string;
  values: A;
  signed: boolean;
}

interface MapsOf<A> {
  method: string;
  unit: string;
  /** (L, Q, K) or (L, H, Q, K). */
  values: A;
  layers: number[];
  stack: Stack;
  signed: boolean;
  residual: boolean | null;
  /** Whether these are the mean of heads. */
  mean: boolean;
}

export interface Links {
  links: [number, number, number | null][];
  sure: [number, number][] | null;
  possible: [number, number][] | null;
  method: string;
}

export interface Graph {
  nodes: [stack: string, layer: number, block: string, position: number][];
  edges: [source: number, target: number, part: string, head: number | null, importance: number][];
  outputs: [row: number, node: number][];
  threshold: number;
  method: string;
}

interface ComponentsOf<A> {
  kind: "residual" | "heads" | "feed_forward" | "neurons" | "experts";
  stack: Stack;
  unit: string;
  /** (L, U, S), or (L, U) of all positions together. */
  values: A;
  tokens: Tokens;
  signed: boolean;
}

export interface Picture {
  /** Base64. */
  png: string;
  positions: number[][];
}

interface ExampleOf<A> {
  title: string;
  inputs: Tokens;
  /** null: the rows are the inputs. */
  outputs: Tokens | null;
  scores: ScoresOf<A>[];
  maps: MapsOf<A>[];
  links: Links[];
  graph: Graph | null;
  components: ComponentsOf<A>[];
  promoted: Record<string, [token: string, logit: number][]>;
  edges: [source: string, target: string, score: number][];
  edges_total: number;
  pictures: Picture[];
  row: number | null;
  facts: Record<string, string>;
  counted: boolean[] | null;
  dependent: boolean[] | null;
  answer: string;
  value: number | null;
  probability: number | null;
}

export interface Column {
  name: string;
  kind: "text" | "number" | "signed" | "heat";
  digits: number | null;
  meaning: string;
}

export interface Table {
  title: string;
  columns: Column[];
  rows: (string | number | null)[][];
  note: string;
  strong: [row: number, column: number][];
  folded: boolean;
}

export interface Figure {
  title: string;
  svg: string;
  group: string;
  note: string;
}

export interface Page {
  title: string;
  facts: Record<string, string>;
  examples: ExampleOf<RawArray>[];
  tables: Table[];
  figures: Figure[];
  notes: string[];
  lead: string;
  answer: string;
}

export type RawExample = ExampleOf<RawArray>;
export interface Example extends ExampleOf<NumberArray> {
  /** Of an example of words: the one of tokens that it was made from. */
  pieces?: Example;
  /** How many maps of single heads are not decoded yet, since there are many: `heads` of the state asks for them. */
  later: number;
}
export type Maps = MapsOf<NumberArray>;
export type Scores = ScoresOf<NumberArray>;
export type Components = ComponentsOf<NumberArray>;

export type Side = "input" | "output";

/**
 * A token pointed at. Where an example has no outputs of its own, its rows are its inputs: "output" then is the token as
 * a row (what it receives), "input" the token as a column (what it gives).
 */
export interface Place {
  side: Side;
  index: number;
}

export interface Values {
  /** The number of the example. */
  example: number;
  /** The name of the method shown; "" if the example has none. */
  method: string;
  /** The name of the method whose maps are next to it, or "none"; "": the example's first other one with maps. */
  beside: string;
  stack: Stack;
  /** The number of a layer in the model (an entry of `Maps.layers`), or the mean of all. */
  layer: number | "all";
  /** The index of a head, or all heads together. */
  head: number | "all";
  /** What has the darkest colour: the largest entry of each map, of each layer's maps, or of all maps of a method. */
  scale: "map" | "layer" | "all";
  /** What the pointer or the keyboard is on; not kept in the address. */
  hover: Place | null;
  /** The entry of a map that the pointer or the keyboard is on; not kept in the address. */
  cell: { row: number; column: number } | null;
  /** At most two, of the same side. */
  pins: Place[];
  /**
   * Whether the tokens of a word are shown together. main.js sees to it: views are given an example whose tokens, scores,
   * maps, links and graph are those of words, and are created anew when this changes.
   */
  words: boolean;
  /** Whether the maps of single heads are shown where they are many. */
  heads: boolean;
  /** How many lines of a map are drawn, the strongest; 0: as many as suit the text. */
  lines: number;
  /** The heads whose lines are drawn over each other, each in a colour; none: the lines of the map chosen. */
  colored: number[];
  /** Words of the tokens from which and to which lines run; none: all. */
  from: string;
  to: string;
  /** The importance that an edge must exceed, from 0 to 1. */
  flow: number;
  /** How many components, or edges between them, are shown, the strongest; 0: those that carry most. */
  nodes: number;
  /** The component chosen: stack, kind, and layer, number and position; "": the strongest. */
  node: string;
  /** The names of the views shown, in the order of the page. */
  views: string[];
  /** The colours in use; set by main.js, not kept in the address. */
  theme: "light" | "dark";
}

export interface State {
  get<K extends keyof Values>(key: K): Values[K];
  /** Sets values, calls the subscribers of those that changed once each, and writes them to the address. */
  set(changes: Partial<Values>): void;
  /** Calls back when one of the keys changed. Returns what ends it. */
  subscribe(keys: (keyof Values)[], callback: () => void): () => void;
}

export interface View {
  /** As in the address: lower case, one word. */
  name: string;
  /** As on the page. */
  title: string;
  /** Whether there is something to show. */
  applies(page: Page, example: Example | null): boolean;
  /**
   * Builds the view's content; its heading and frame are main.js's. Called anew for each example and for words or pieces,
   * after which subscriptions made before are ended. Data enters the document by `textContent` alone.
   *
   * @param example null where the page has no examples, but tables or figures.
   */
  create(page: Page, example: Example | null, state: State): HTMLElement;
}
