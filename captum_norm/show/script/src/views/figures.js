/** @import { Figure, View } from "../types.js" */

import { h } from "../dom.js";

/** @type {View} */
export const figures = {
  name: "figures",
  title: "Figures",
  applies: (page) => page.figures.length > 0,
  create(page) {
    /** @type {Map<string, Figure[]>} */
    const groups = new Map();
    for (const figure of page.figures) groups.set(figure.group, [...(groups.get(figure.group) ?? []), figure]);
    return h("div", {}, ...[...groups].map(([title, group]) => groupOf(title, group)));
  },
};

/**
 * @param {string} title "" for figures on their own
 * @param {Figure[]} group
 */
function groupOf(title, group) {
  const notes = [...new Set(group.map(({ note }) => note))].filter(Boolean);
  return h(
    "section",
    {},
    ...(title ? [h("h3", {}, title)] : []),
    ...notes.map((note) => h("p", { class: "quiet" }, note)),
    h("div", { class: title ? "drawings small" : "drawings" }, ...group.map(drawn)),
  );
}

/** An image, in which an SVG document runs no script and loads nothing. @param {Figure} figure */
function drawn({ title, svg }) {
  const image = h("img", { alt: title, src: `data:image/svg+xml,${encodeURIComponent(svg)}` });
  // Smaller, its text could not be read: what does not fit is scrolled to.
  image.addEventListener("load", () => (image.style.minWidth = `${0.6 * image.naturalWidth}px`));
  return h("figure", {}, h("div", { class: "scroll" }, image), h("figcaption", { "aria-hidden": "true" }, title));
}
