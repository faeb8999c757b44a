import { colorOf, css } from "./colors.js";
import { formatted, h } from "./dom.js";

/**
 * Creates a legend of a scale of colours.
 *
 * @param {(value: number) => string} written how its numbers are written
 * @returns {{ element: HTMLElement, show: (max: number, unit: string, signed: boolean, theme: "light" | "dark") => void }}
 */
export function legend(written = formatted) {
  const [from, bar, to, what] = [h("span"), h("i", { "aria-hidden": "true" }), h("span"), h("span")];
  const element = h("p", { class: "legend" }, h("span", { class: "range" }, from, bar, to), " ", what);
  return {
    element,
    show(max, unit, signed, theme) {
      const stops = Array.from({ length: 17 }, (_, step) => css(colorOf(signed ? step / 8 - 1 : step / 16, theme)));
      bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
      from.textContent = signed ? written(-max) : "0";
      to.textContent = written(max);
      what.textContent = unit;
    },
  };
}
