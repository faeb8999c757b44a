// How numbers are written.

/**
 * A number with a minus sign; whole numbers as they are.
 * @param {number} value
 * @param {number} digits after the point
 */
export function written(value, digits) {
  const text = Number.isInteger(value) && digits > 0 && Math.abs(value) >= 1e6 ? String(value) : value.toFixed(digits);
  return (/^-0(\.0*)?$/.test(text) ? text.slice(1) : text).replace("-", "−");
}

/**
 * The digits after the point that give the largest of some numbers four significant ones; 0 if all are whole.
 * @param {(number | string | null)[]} cells what is no number does not count
 */
export function digitsFor(cells) {
  const numbers = cells.filter((cell) => typeof cell === "number");
  if (numbers.every(Number.isInteger)) return 0;
  const top = Math.max(0, ...numbers.map(Math.abs));
  return top > 0 ? Math.min(Math.max(3 - Math.floor(Math.log10(top)), 0), 12) : 4;
}

/**
 * A share in percent, as short as it can be.
 * @param {number} share
 */
export function percent(share) {
  const value = 100 * share;
  if (value !== 0 && Math.abs(value) < 0.05) return "< 0.1 %";
  return `${written(value, Math.abs(value) < 9.95 && value !== 0 ? 1 : 0)} %`;
}
