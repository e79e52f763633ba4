// A logarithmic axis with a place for zero at the bottom and for infinity at the top.

export interface LogScale {
  top: number; // exponents of ten
  bottom: number;
  y: (value: number) => number; // 0 is the bottom of the plot, 1 its top
  ticks: number[]; // exponents
}

const LANE = 0.05; // of the height, for zero and for infinity

/** The axis ends at `most`; what is greater is in the lane of infinity. */
export function logScale(values: Float64Array[], hasZero: boolean, hasInfinity: boolean, most = Infinity): LogScale {
  let least = Infinity, greatest = -Infinity;
  for (const column of values)
    for (const value of column)
      if (value > 0 && value < Infinity && value <= most) {
        if (value < least) least = value;
        if (value > greatest) greatest = value;
      }
  if (least > greatest) [least, greatest] = [1e-8, 1];
  const bottom = Math.max(Math.floor(Math.log10(least)), Math.ceil(Math.log10(greatest)) - 24);
  const top = Math.max(Math.ceil(Math.log10(greatest)), bottom + 1);
  const low = hasZero ? LANE : 0, high = hasInfinity ? 1 - LANE : 1;
  const step = Math.max(1, Math.ceil((top - bottom) / 7));
  const ticks: number[] = [];
  for (let exponent = top; exponent >= bottom; exponent -= step) ticks.push(exponent);
  return {
    top, bottom, ticks,
    y: (value) => {
      if (Number.isNaN(value)) return NaN;
      if (value === Infinity || value > most) return 1;
      if (value <= 0) return 0;
      const share = (Math.log10(value) - bottom) / (top - bottom);
      return low + Math.min(1, Math.max(0, share)) * (high - low);
    },
  };
}

/** The position in `sorted` of the element that is nearest to `wanted`. */
export function nearest(sorted: ArrayLike<number>, wanted: number): number {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low;
}
