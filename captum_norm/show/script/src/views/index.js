/** @import { View } from "../types.js" */

import { figures } from "./figures.js";
import { flow } from "./flow.js";
import { links } from "./links.js";
import { maps } from "./maps.js";
import { picture } from "./picture.js";
import { table } from "./table.js";
import { text } from "./text.js";

/** All views, in the order of the page. @type {View[]} */
export const views = [picture, text, maps, links, flow, table, figures];
