/** @import { View } from "../types.js" */

import { text } from "./text.js";

/** All views, in the order of the page. @type {View[]} */
export const views = [text];
