/** @import { Example, View } from "../types.js" */

import { components } from "./components.js";
import { figures } from "./figures.js";
import { flow } from "./flow.js";
import { links } from "./links.js";
import { maps } from "./maps.js";
import { picture } from "./picture.js";
import { findings, table } from "./table.js";
import { text } from "./text.js";
import { texts } from "./texts.js";

/**
 * All views, in the order of the page: what answers its question comes first.
 *
 * @param {Example | null} example
 * @returns {View[]}
 */
export function viewsOf(example) {
  const linked = Boolean(example?.links.length);
  return [
    findings,
    components,
    picture,
    ...(linked ? [links] : []),
    text,
    texts,
    maps,
    ...(linked ? [] : [links]),
    flow,
    table,
    figures,
  ];
}
