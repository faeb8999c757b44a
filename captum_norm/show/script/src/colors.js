/**
 * Colours of numbers: from the page's ground through blue (above zero) or orange (below), in equal steps in OKLab, where
 * distances approximate perceived differences [Ottosson 2020]. Blue and orange are told apart by every kind of colour
 * vision, and lightness changes in one direction only. The light scale is that of captum_norm/show/colors.py.
 */

/** @typedef {[number, number, number]} Triple */

const STEPS = 256;

/** OKLab (lightness, green-red, blue-yellow) from zero to one. @type {Record<string, Triple[]>} */
const ANCHORS = {
  "light above": [
    [0.985, -0.004, -0.006],
    [0.66, -0.055, -0.11],
    [0.27, -0.01, -0.105],
  ],
  "light below": [
    [0.985, -0.004, -0.006],
    [0.72, 0.07, 0.125],
    [0.27, 0.065, 0.055],
  ],
  "dark above": [
    [0.22, -0.002, -0.012],
    [0.58, -0.05, -0.125],
    [0.95, -0.03, -0.03],
  ],
  "dark below": [
    [0.22, -0.002, -0.012],
    [0.6, 0.08, 0.115],
    [0.95, 0.015, 0.05],
  ],
};

/** @type {Map<string, Uint8Array>} */
const tables = new Map();

/**
 * The colour of a share of the largest absolute number.
 *
 * @param {number} share from -1 to 1; clipped outside; zero if not a number
 * @param {"light" | "dark"} theme
 * @returns {Triple} red, green, blue, from 0 to 255
 */
export function colorOf(share, theme) {
  const place = 3 * stepOf(share);
  const table = tableOf(theme, share < 0);
  return [table[place], table[place + 1], table[place + 2]];
}

/**
 * @param {Triple} color
 * @returns {string} for CSS
 */
export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

/**
 * Black or white, whichever stands out more from a ground [WCAG 2.2, contrast ratio].
 *
 * @param {Triple} ground
 * @returns {"#000" | "#fff"}
 */
export function inkOn(ground) {
  const [red, green, blue] = ground.map((entry) => linear(entry / 255));
  const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return (luminance + 0.05) ** 2 > 0.05 * 1.05 ? "#000" : "#fff";
}

/**
 * Paints the ground of an element with the colour of a share, and its text with the ink on it.
 *
 * @param {HTMLElement} element
 * @param {number} share
 * @param {"light" | "dark"} theme
 */
export function paint(element, share, theme) {
  const ground = colorOf(share, theme);
  element.style.backgroundColor = css(ground);
  element.style.color = inkOn(ground);
}

/**
 * Fills pixels with the colours of numbers.
 *
 * @param {Uint8ClampedArray} pixels red, green, blue, opacity of each number
 * @param {ArrayLike<number>} values
 * @param {number} max what has the strongest colour; all are those of zero where it is zero
 * @param {"light" | "dark"} theme
 */
export function fillPixels(pixels, values, max, theme) {
  const above = tableOf(theme, false);
  const below = tableOf(theme, true);
  for (let index = 0; index < values.length; index++) {
    const share = max > 0 ? values[index] / max : 0;
    const table = share < 0 ? below : above;
    const place = 3 * stepOf(share);
    pixels[4 * index] = table[place];
    pixels[4 * index + 1] = table[place + 1];
    pixels[4 * index + 2] = table[place + 2];
    pixels[4 * index + 3] = 255;
  }
}

/** @param {number} share */
function stepOf(share) {
  return Math.round(Math.min(Math.abs(share) || 0, 1) * (STEPS - 1));
}

/**
 * @param {"light" | "dark"} theme
 * @param {boolean} below
 * @returns {Uint8Array} (256, 3)
 */
function tableOf(theme, below) {
  const name = `${theme} ${below ? "below" : "above"}`;
  let table = tables.get(name);
  if (!table) {
    table = evenSteps(ANCHORS[name]);
    tables.set(name, table);
  }
  return table;
}

/** @param {Triple[]} anchors */
function evenSteps(anchors) {
  const lengths = anchors
    .slice(1)
    .map((end, index) => Math.hypot(...end.map((entry, axis) => entry - anchors[index][axis])));
  const whole = lengths.reduce((sum, length) => sum + length, 0);
  const table = new Uint8Array(3 * STEPS);
  for (let step = 0; step < STEPS; step++) {
    let rest = (step / (STEPS - 1)) * whole;
    let piece = 0;
    while (piece < lengths.length - 1 && rest > lengths[piece]) rest -= lengths[piece++];
    const part = rest / lengths[piece];
    const lab = anchors[piece].map((entry, axis) => entry + part * (anchors[piece + 1][axis] - entry));
    table.set(rgbOf(/** @type {Triple} */ (lab)), 3 * step);
  }
  return table;
}

/** @param {Triple} lab */
function rgbOf([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((entry) => Math.round(255 * gamma(Math.min(Math.max(entry, 0), 1))));
}

/** @param {number} entry */
function gamma(entry) {
  return entry <= 0.0031308 ? 12.92 * entry : 1.055 * entry ** (1 / 2.4) - 0.055;
}

/** @param {number} entry */
function linear(entry) {
  return entry <= 0.04045 ? entry / 12.92 : ((entry + 0.055) / 1.055) ** 2.4;
}
