// Numbers as the page writes them.

/** 7.84e-02, as Python does. */
export function error(value: number): string {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(2).split("e");
  const size = exponent.slice(1).padStart(2, "0");
  return `${mantissa}e${exponent[0]}${size}`;
}

/** A value of a tensor: as short as six digits allow. */
export function value(given: number): string {
  if (!Number.isFinite(given)) return Number.isNaN(given) ? "NaN" : given > 0 ? "inf" : "-inf";
  if (given === 0) return "0";
  const size = Math.abs(given);
  return size >= 1e-4 && size < 1e6 ? String(Number(given.toPrecision(6))) : String(Number(given.toPrecision(4)).toExponential());
}

export const count = (given: number): string => (Number.isNaN(given) ? "–" : given.toLocaleString("en"));

export function number(given: number, form: string): string {
  if (form === "count") return Number.isInteger(given) ? count(given) : error(given);
  return form === "ratio" ? value(given) : error(given);
}

/** "20,000×" for how far something is beyond what is allowed. */
export function times(ratio: number): string {
  if (!Number.isFinite(ratio)) return "";
  return ratio >= 100 ? `${count(Number(ratio.toPrecision(2)))}×` : `${ratio.toPrecision(2)}×`;
}
