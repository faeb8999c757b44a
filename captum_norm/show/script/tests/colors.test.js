import assert from "node:assert/strict";
import test from "node:test";

import { colorOf, fillPixels, inkOn } from "../src/colors.js";

/** @param {number[]} color */
const luminance = (color) => {
  const [red, green, blue] = color.map((entry) =>
    entry / 255 <= 0.04045 ? entry / 255 / 12.92 : ((entry / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};

for (const theme of /** @type {const} */ (["light", "dark"])) {
  for (const sign of [1, -1]) {
    test(`${theme}, ${sign}: lightness goes one way`, () => {
      const shades = Array.from({ length: 33 }, (_, step) => luminance(colorOf((sign * step) / 32, theme)));
      for (let step = 1; step < shades.length; step++) {
        assert.ok(
          theme === "light" ? shades[step] < shades[step - 1] : shades[step] > shades[step - 1],
          `step ${step}`,
        );
      }
    });
  }

  test(`${theme}: every ink stands out from its ground by 4.5 to 1`, () => {
    for (let step = -128; step <= 128; step++) {
      const ground = colorOf(step / 128, theme);
      const [ink, back] = [luminance(inkOn(ground) === "#000" ? [0, 0, 0] : [255, 255, 255]), luminance(ground)];
      assert.ok((Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05) >= 4.5, `share ${step / 128}`);
    }
  });
}

test("the light scale is that of figures and the terminal", () => {
  // captum_norm.show.colors.signed_color_of(-1), (-0.5), (0), (0.5), (1)
  assert.deepEqual(
    [-1, -0.5, 0, 0.5, 1].map((share) => colorOf(share, "light")),
    [
      [71, 19, 0],
      [200, 119, 45],
      [246, 251, 254],
      [65, 145, 207],
      [11, 32, 89],
    ],
  );
});

test("shares are clipped, and what is not a number is zero", () => {
  assert.deepEqual(colorOf(7, "light"), colorOf(1, "light"));
  assert.deepEqual(colorOf(-7, "light"), colorOf(-1, "light"));
  assert.deepEqual(colorOf(NaN, "dark"), colorOf(0, "dark"));
});

test("pixels have the colours of their numbers; where all are zero, that of zero", () => {
  const pixels = new Uint8ClampedArray(12);
  fillPixels(pixels, [0, 2, -1], 2, "light");
  assert.deepEqual(
    [...pixels],
    [0, 1, -0.5].flatMap((share) => [...colorOf(share, "light"), 255]),
  );
  fillPixels(pixels, [0, 0, 0], 0, "dark");
  assert.deepEqual([...pixels.slice(0, 4)], [...colorOf(0, "dark"), 255]);
});
