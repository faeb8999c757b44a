/** @import { Place, Side, State, Values } from "./types.js" */

/**
 * How each value is written into the address and read from it. `read` returns undefined for what it does not know.
 *
 * @type {{ [K in keyof Values]?: { write: (value: Values[K]) => string, read: (text: string) => Values[K] | undefined } }}
 */
const KEPT = {
  example: { write: String, read: natural },
  method: { write: (value) => value, read: (text) => text },
  beside: { write: (value) => value, read: (text) => text },
  stack: { write: String, read: oneOf(["encoder", "decoder", "cross", "answer", "links", "vision"]) },
  layer: { write: String, read: (text) => (text === "all" ? "all" : natural(text)) },
  head: { write: String, read: (text) => (text === "all" ? "all" : natural(text)) },
  scale: { write: String, read: oneOf(["map", "layer", "all"]) },
  pins: { write: writePins, read: readPins },
  words: { write: (value) => (value ? "1" : "0"), read: (text) => ({ 0: false, 1: true })[text] },
  heads: { write: (value) => (value ? "1" : "0"), read: (text) => ({ 0: false, 1: true })[text] },
  lines: { write: String, read: natural },
  colored: { write: String, read: naturals },
  from: { write: (value) => value, read: (text) => text },
  to: { write: (value) => value, read: (text) => text },
  flow: { write: String, read: share },
  nodes: { write: String, read: natural },
  node: { write: (value) => value, read: (text) => text },
  views: { write: (value) => value.join(","), read: (text) => text.split(",").filter((name) => /^[a-z]+$/.test(name)) },
};

const LONGEST = 4000;

/**
 * Keeps what the page shows, tells views what changed, and keeps the address's fragment up to date.
 *
 * @param {Values} defaults what is not written into the address
 * @param {Location} [location] where the fragment is read from
 * @param {(fragment: string) => void} [write] where it is written to
 * @returns {State & { fit: (changes: Partial<Values>) => void }} `fit` sets what the data leaves no choice about: such
 *   values become the defaults
 */
export function createState(defaults, location, write = () => {}) {
  /** @type {Values} */
  const values = { ...defaults, ...readFragment(location?.hash ?? "") };
  const usual = { ...defaults };
  /** @type {Set<{ keys: (keyof Values)[], callback: () => void }>} */
  const subscribers = new Set();
  const state = {
    /** @type {State["get"]} */
    get: (key) => values[key],
    /** @param {Partial<Values>} changes */
    fit(changes) {
      for (const [key, value] of Object.entries(changes)) {
        if (JSON.stringify(value) !== JSON.stringify(values[/** @type {keyof Values} */ (key)]))
          Object.assign(usual, { [key]: value });
      }
      state.set(changes);
    },
    /** @type {State["set"]} */
    set(changes) {
      const changed = /** @type {(keyof Values)[]} */ (Object.keys(changes)).filter(
        (key) => JSON.stringify(changes[key]) !== JSON.stringify(values[key]),
      );
      if (!changed.length) return;
      Object.assign(values, changes);
      if (changed.some((key) => key in KEPT)) write(writeFragment(values, usual));
      for (const subscriber of [...subscribers]) {
        if (subscribers.has(subscriber) && subscriber.keys.some((key) => changed.includes(key))) subscriber.callback();
      }
    },
    /** @type {State["subscribe"]} */
    subscribe(keys, callback) {
      const subscriber = { keys, callback };
      subscribers.add(subscriber);
      return () => subscribers.delete(subscriber);
    },
  };
  return state;
}

/**
 * Returns a view's own state: the same values, and subscriptions that `end` ends together.
 *
 * @param {State} state
 * @returns {{ state: State, end: () => void }}
 */
export function scoped(state) {
  /** @type {(() => void)[]} */
  const ends = [];
  return {
    state: {
      ...state,
      subscribe(keys, callback) {
        const end = state.subscribe(keys, callback);
        ends.push(end);
        return end;
      },
    },
    end: () => ends.forEach((end) => end()),
  };
}

/**
 * Reads the values in an address's fragment. What is unknown or malformed is ignored.
 *
 * @param {string} fragment with or without #
 * @returns {Partial<Values>}
 */
export function readFragment(fragment) {
  /** @type {Record<string, unknown>} */
  const values = {};
  if (fragment.length > LONGEST) return values;
  for (const [key, text] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    const kind = Object.hasOwn(KEPT, key) ? KEPT[/** @type {keyof Values} */ (key)] : undefined;
    const value = kind?.read(text);
    if (value !== undefined) values[key] = value;
  }
  return values;
}

/**
 * Writes the values that differ from the defaults.
 *
 * @param {Values} values
 * @param {Values} defaults
 * @returns {string} without #; empty where all are the defaults
 */
export function writeFragment(values, defaults) {
  const written = new URLSearchParams();
  for (const key of /** @type {(keyof typeof KEPT)[]} */ (Object.keys(KEPT))) {
    const write = /** @type {(value: unknown) => string} */ (KEPT[key]?.write);
    if (write(values[key]) !== write(defaults[key])) written.set(key, write(values[key]));
  }
  return written.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
}

/** @param {Place[]} pins */
function writePins(pins) {
  return pins.map(({ side, index }) => `${side}:${index}`).join(",");
}

/**
 * @param {string} text
 * @returns {Place[] | undefined}
 */
function readPins(text) {
  const pins = text ? text.split(",").map(readPlace) : [];
  const known = /** @type {Place[]} */ (pins.filter((place) => place !== undefined));
  const fits = known.length === pins.length && known.length <= 2 && new Set(known.map(({ side }) => side)).size <= 1;
  return fits ? known : undefined;
}

/**
 * @param {string} text
 * @returns {Place | undefined}
 */
function readPlace(text) {
  const found = /^(input|output):(\d{1,6})$/.exec(text);
  return found ? { side: /** @type {Side} */ (found[1]), index: Number(found[2]) } : undefined;
}

/** @param {string} text */
function natural(text) {
  return /^\d{1,6}$/.test(text) ? Number(text) : undefined;
}

/** @param {string} text */
function naturals(text) {
  return /^(\d{1,6}(,\d{1,6})*)?$/.test(text) ? text.split(",").filter(Boolean).map(Number) : undefined;
}

/** @param {string} text */
function share(text) {
  return /^(0|1|0?\.\d{1,6})$/.test(text) ? Number(text) : undefined;
}

/**
 * @template {string} T
 * @param {T[]} known
 * @returns {(text: string) => T | undefined}
 */
function oneOf(known) {
  return (text) => known.find((name) => name === text);
}
