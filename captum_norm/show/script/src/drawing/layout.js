/**
 * The part of a map that is shown: its first row and column, and how many times larger than the whole it is.
 *
 * @typedef {{ row: number, column: number, zoom: number }} Frame
 */

/** @type {Frame} */
export const WHOLE = { row: 0, column: 0, zoom: 1 };

const LARGEST_CELL = 34;
const LABEL_ROW = 13;
/** What a side has at least, unless its cells are large already. */
const SMALLEST_SIDE = 150;
const SMALLEST_CELL = 24;

/**
 * The size of a map's cells when all of it is shown: squares if possible; wider or higher ones where a map has few rows
 * or columns.
 *
 * @param {number} rows
 * @param {number} columns
 * @param {number} width the room for the columns
 * @param {number} height the most room for the rows
 * @returns {{ width: number, height: number }} of one cell
 */
export function cellSize(rows, columns, width, height) {
  const most = { width: width / Math.max(columns, 1), height: height / Math.max(rows, 1) };
  /** @param {number} count */
  const least = (count) => Math.min(SMALLEST_SIDE / Math.max(count, 1), SMALLEST_CELL);
  const wide = Math.min(most.width, LARGEST_CELL, Math.max(most.height, least(columns)));
  return { width: wide, height: Math.min(most.height, Math.max(wide, least(rows))) };
}

/**
 * Chooses the labels that have room: every first, second, third ... one, and those that must be shown, which push away
 * others.
 *
 * @param {number} start the index of the first one in sight; may be a fraction
 * @param {number} count how many are in sight
 * @param {number} total how many there are
 * @param {number} size the pixels of each
 * @param {number[]} forced those that must be shown
 * @returns {number[]} in order
 */
export function labelsShown(start, count, total, size, forced) {
  const step = Math.max(1, Math.ceil(LABEL_ROW / size));
  const [from, to] = [Math.max(0, Math.floor(start)), Math.min(total - 1, Math.ceil(start + count) - 1)];
  const must = [...new Set(forced)].filter((index) => index >= from && index <= to);
  const shown = [];
  for (let index = Math.ceil(from / step) * step; index <= to; index += step) {
    if (must.every((other) => Math.abs(other - index) >= step)) shown.push(index);
  }
  return [...shown, ...must].sort((a, b) => a - b);
}

/**
 * Zooms around a point that stays where it is.
 *
 * @param {Frame} frame
 * @param {number} factor above 1: closer
 * @param {{ x: number, y: number }} at where, as shares of the frame's width and height
 * @param {number} rows
 * @param {number} columns
 * @returns {Frame}
 */
export function zoomed(frame, factor, at, rows, columns) {
  const most = Math.max(1, Math.max(rows, columns) / 4);
  const zoom = Math.min(Math.max(frame.zoom * factor, 1), most);
  const row = frame.row + at.y * rows * (1 / frame.zoom - 1 / zoom);
  const column = frame.column + at.x * columns * (1 / frame.zoom - 1 / zoom);
  return within({ row, column, zoom }, rows, columns);
}

/**
 * Moves a frame into the map.
 *
 * @param {Frame} frame
 * @param {number} rows
 * @param {number} columns
 * @returns {Frame}
 */
export function within({ row, column, zoom }, rows, columns) {
  /** @type {(value: number, most: number) => number} */
  const clamp = (value, most) => Math.min(Math.max(value, 0), most);
  return { row: clamp(row, rows - rows / zoom), column: clamp(column, columns - columns / zoom), zoom };
}

/**
 * Moves a frame so far that a cell is in sight.
 *
 * @param {Frame} frame
 * @param {{ row: number, column: number }} cell
 * @param {number} rows
 * @param {number} columns
 * @returns {Frame}
 */
export function revealing(frame, cell, rows, columns) {
  /** @type {(start: number, count: number, index: number) => number} */
  const along = (start, count, index) => Math.min(Math.max(start, index + 1 - count), index);
  const row = along(frame.row, rows / frame.zoom, cell.row);
  return within(
    { row, column: along(frame.column, columns / frame.zoom, cell.column), zoom: frame.zoom },
    rows,
    columns,
  );
}

/**
 * Makes a map small enough for a thumbnail: each pixel is the entry of its block that is furthest from zero, so that
 * single large entries stay visible.
 *
 * @param {{ values: Float32Array, rows: number, columns: number }} grid
 * @param {number} most pixels of a side
 * @returns {{ values: Float32Array, rows: number, columns: number }}
 */
export function shrunk({ values, rows, columns }, most) {
  const block = Math.max(1, Math.ceil(Math.max(rows, columns) / most));
  if (block === 1) return { values, rows, columns };
  const [height, width] = [Math.ceil(rows / block), Math.ceil(columns / block)];
  const small = new Float32Array(height * width);
  for (let row = 0; row < rows; row++) {
    const start = Math.floor(row / block) * width;
    for (let column = 0; column < columns; column++) {
      const place = start + Math.floor(column / block);
      const value = values[row * columns + column];
      if (Math.abs(value) > Math.abs(small[place])) small[place] = value;
    }
  }
  return { values: small, rows: height, columns: width };
}

/**
 * @param {string} text
 * @param {number} length
 * @returns {string} at most so many characters, the last one an ellipsis if some are missing
 */
export function shortened(text, length) {
  if (text.length <= length) return text;
  const characters = Array.from(new Intl.Segmenter().segment(text), ({ segment }) => segment);
  return characters.length <= length ? text : `${characters.slice(0, length - 1).join("")}…`;
}
