/** @import { View } from "../types.js" */

import { maps } from "./maps.js";
import { text } from "./text.js";

/** All views, in the order of the page. @type {View[]} */
export const views = [text, maps];
