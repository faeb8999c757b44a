import assert from "node:assert/strict";
import { test } from "node:test";

import { direction, formatted } from "../src/dom.js";

test("numbers have four digits, and an exponent only where zeros would be counted", () => {
  const written = [0, 1, -0.5, 0.00012345, 0.000012345, 1234.5, 9999.9, 12345.6, 99999, 123456, -1e20].map(formatted);
  const expected = [
    "0",
    "1.000",
    "−0.5000",
    "0.0001234",
    "1.23e-5",
    "1235",
    "10000",
    "12346",
    "99999",
    "1.23e+5",
    "−1.00e+20",
  ];
  assert.deepEqual(written, expected);
});

test("a text runs as most of its letters do, whatever stands first", () => {
  assert.equal(direction(["[CLS]", "הילד", "קרא", "ספר", "טוב", "."]), "rtl");
  assert.equal(direction(["OK", "می‌شود", "123"]), "rtl");
  assert.equal(direction(["the", "word", "ספר"]), "ltr");
  assert.equal(direction(["12", "🙂", "日本"]), "ltr");
});
