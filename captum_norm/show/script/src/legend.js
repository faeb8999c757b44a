import { colorOf, css } from "./colors.js";
import { formatted, h } from "./dom.js";

/**
 * Creates a legend of a scale of colours.
 *
 * @returns {{ element: HTMLElement, show: (max: number, unit: string, signed: boolean, theme: "light" | "dark") => void }}
 */
export function legend() {
  const [from, bar, to, what] = [h("span"), h("i", { "aria-hidden": "true" }), h("span"), h("span")];
  const element = h("p", { class: "legend" }, h("span", { class: "range" }, from, bar, to), " ", what);
  return {
    element,
    show(max, unit, signed, theme) {
      const stops = Array.from({ length: 17 }, (_, step) => css(colorOf(signed ? step / 8 - 1 : step / 16, theme)));
      bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
      from.textContent = signed ? formatted(-max) : "0";
      to.textContent = formatted(max);
      what.textContent = unit;
    },
  };
}
