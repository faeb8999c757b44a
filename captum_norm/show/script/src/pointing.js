/** @import { Place, State } from "./types.js" */

import { togglePin } from "./readings.js";

/**
 * Lets pointer and keyboard point at tokens and pin them, through the state. The tabulator stops once; arrow keys move
 * from there, Enter and the space bar pin, Escape unpins.
 *
 * @param {HTMLElement} container
 * @param {{ element: HTMLElement, place: Place }[][]} grid the tokens in rows, focusable elements
 * @param {State} state
 */
export function pointing(container, grid, state) {
  const at = new Map(grid.flatMap((row, y) => row.map(({ element, place }, x) => [element, { x, y, place }])));
  /** @param {Event} event */
  const found = ({ target }) => {
    const element = target instanceof Element ? target.closest("[tabindex]") : null;
    return element && at.get(/** @type {HTMLElement} */ (element));
  };
  at.forEach(({ x, y }, element) => (element.tabIndex = x || y ? -1 : 0));
  for (const name of ["pointerover", "focusin"]) {
    container.addEventListener(name, (event) => state.set({ hover: found(event)?.place ?? null }));
  }
  for (const name of ["pointerleave", "focusout"]) container.addEventListener(name, () => state.set({ hover: null }));
  container.addEventListener("click", (event) => {
    const place = found(event)?.place;
    if (!place) return;
    state.set({ pins: togglePin(state.get("pins"), place) });
  });
  container.addEventListener("keydown", (event) => {
    const from = found(event);
    if (!from || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") state.set({ pins: [] });
    const { x, y } = from;
    const row = grid[y];
    const to = {
      ArrowLeft: row[x - 1],
      ArrowRight: row[x + 1],
      ArrowUp: grid[y - 1]?.[x],
      ArrowDown: grid[y + 1]?.[x],
      Home: row.length > 1 ? row[0] : grid[0][x],
      End: row.length > 1 ? row[row.length - 1] : grid[grid.length - 1][x],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    at.forEach((_, element) => (element.tabIndex = element === to.element ? 0 : -1));
    to.element.focus();
  });
}
