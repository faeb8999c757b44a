/** @import { Grid } from "../grids.js" */
/** @import { Frame } from "./layout.js" */

import { fillPixels } from "../colors.js";
import { cellSize, labelsShown, shortened } from "./layout.js";

const LONGEST_LABEL = 16;
const GAP = 6;
const MARGIN = 12;
const HIGHEST = 720;

/** What was painted last, since most drawing is that of marks. */
/** @type {WeakMap<object, { values: Float32Array, max: number, theme: string, picture: HTMLCanvasElement }>} */
const pictures = new WeakMap();

/** The width of the widest label. @type {WeakMap<string[], number>} */
const widths = new WeakMap();

/** Where a map's entries are on its canvas. @typedef {{ left: number, top: number, width: number, height: number }} Box */

/**
 * What to draw.
 *
 * @typedef {object} Drawing
 * @property {Grid} grid
 * @property {number} max what has the strongest colour
 * @property {string[]} rows labels
 * @property {string[]} columns labels
 * @property {Frame} frame
 * @property {"light" | "dark"} theme
 * @property {number | null} explained the row that is explained
 * @property {number[]} rowMarks rows pointed at or pinned
 * @property {number[]} columnMarks
 * @property {{ row: number, column: number } | null} cell
 */

/**
 * Draws a map with its labels.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Drawing} drawing
 * @param {number} width the room it has
 * @returns {Box} where the entries are
 */
export function drawMap(canvas, drawing, width) {
  const { grid, frame, rows, columns } = drawing;
  const style = getComputedStyle(canvas);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.font = `12px ${style.fontFamily}`;
  const [left, top] = [roomFor(context, rows, width / 3) + MARGIN, roomFor(context, columns, 130)];
  const cell = cellSize(grid.rows, grid.columns, Math.max(width - left - 2, 40), HIGHEST);
  const box = { left, top, width: cell.width * grid.columns, height: cell.height * grid.rows };
  fit(canvas, context, left + box.width + 2, top + box.height + 2);
  context.font = `12px ${style.fontFamily}`;
  drawEntries(context, drawing, box);
  const [across, down] = [cell.width * frame.zoom, cell.height * frame.zoom];
  /** @param {string} name */
  const color = (name) => style.getPropertyValue(name);
  context.save();
  context.beginPath();
  context.rect(left - 1, top - 1, box.width + 2, box.height + 2);
  context.clip();
  context.lineWidth = 1.5;
  /** @type {(row: number, name: string) => void} */
  const outline = (row, name) => {
    context.strokeStyle = color(name);
    context.strokeRect(left, top + (row - frame.row) * down, box.width, down);
  };
  if (drawing.explained !== null) outline(drawing.explained, "--mark");
  for (const row of drawing.rowMarks) outline(row, "--accent");
  if (drawing.cell) {
    const [x, y] = [left + (drawing.cell.column - frame.column) * across, top + (drawing.cell.row - frame.row) * down];
    context.strokeStyle = color("--accent");
    context.lineWidth = 2;
    context.strokeRect(x, y, Math.max(across, 3), Math.max(down, 3));
  }
  context.restore();
  context.strokeStyle = color("--line");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, box.width + 1, box.height + 1);
  drawRowLabels(context, drawing, box, down, color);
  drawColumnLabels(context, drawing, box, across, color);
  return box;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string[]} texts
 * @param {number} most
 * @returns {number} the width of the widest label, with a gap
 */
function roomFor(context, texts, most) {
  const widest =
    widths.get(texts) ??
    texts.reduce((width, text) => Math.max(width, context.measureText(shortened(text, LONGEST_LABEL)).width), 0);
  widths.set(texts, widest);
  return Math.min(Math.ceil(widest), most) + GAP;
}

/**
 * Sizes a canvas to whole pixels of the screen.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {CanvasRenderingContext2D} context
 * @param {number} width
 * @param {number} height
 */
function fit(canvas, context, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Drawing} drawing
 * @param {Box} box
 */
function drawEntries(context, { grid, max, frame, theme }, { left, top, width, height }) {
  if (!grid.rows || !grid.columns) return;
  const known = pictures.get(context);
  const key = { values: grid.values, max, theme };
  const same = known && known.values === key.values && known.max === max && known.theme === theme;
  const picture = same ? known.picture : document.createElement("canvas");
  if (!same) paintEntries(picture, grid, max, theme);
  pictures.set(context, { ...key, picture });
  context.imageSmoothingEnabled = false;
  const [across, down] = [grid.columns / frame.zoom, grid.rows / frame.zoom];
  context.drawImage(picture, frame.column, frame.row, across, down, left, top, width, height);
}

/**
 * Makes a canvas one pixel for each entry.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {{ values: Float32Array, rows: number, columns: number }} grid
 * @param {number} max
 * @param {"light" | "dark"} theme
 */
export function paintEntries(canvas, { values, rows, columns }, max, theme) {
  if (!rows || !columns) return;
  [canvas.width, canvas.height] = [columns, rows];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const pixels = context.createImageData(columns, rows);
  fillPixels(pixels.data, values, max, theme);
  context.putImageData(pixels, 0, 0);
}

/** @typedef {(name: string) => string} Color */

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Drawing} drawing
 * @param {Box} box
 * @param {number} size of a row
 * @param {Color} color
 */
function drawRowLabels(context, { grid, rows, frame, cell, rowMarks, explained }, { left, top }, size, color) {
  const marked = [...(cell ? [cell.row] : []), ...rowMarks];
  const forced = [...marked, ...(explained === null ? [] : [explained])];
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const index of labelsShown(frame.row, grid.rows / frame.zoom, grid.rows, size, forced)) {
    const y = top + (index + 0.5 - frame.row) * size;
    context.fillStyle = color(marked.includes(index) ? "--accent" : index === explained ? "--mark" : "--ink");
    context.fillText(shortened(rows[index], LONGEST_LABEL), left - GAP, y, left - GAP - MARGIN / 2);
    if (index === explained) {
      context.beginPath();
      context.moveTo(0, y - 4);
      context.lineTo(7, y);
      context.lineTo(0, y + 4);
      context.fill();
    }
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Drawing} drawing
 * @param {Box} box
 * @param {number} size of a column
 * @param {Color} color
 */
function drawColumnLabels(context, { grid, columns, frame, cell, columnMarks }, { left, top }, size, color) {
  const marked = [...(cell ? [cell.column] : []), ...columnMarks];
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const index of labelsShown(frame.column, grid.columns / frame.zoom, grid.columns, size, marked)) {
    context.save();
    context.translate(left + (index + 0.5 - frame.column) * size, top - GAP);
    context.rotate(-Math.PI / 2);
    context.fillStyle = color(marked.includes(index) ? "--accent" : "--ink");
    context.fillText(shortened(columns[index], LONGEST_LABEL), 0, 0, top - GAP);
    context.restore();
  }
}
