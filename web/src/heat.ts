// Colours of heat maps: values on a scale from dark to bright, differences from blue through nothing to red.

export type Rgb = [number, number, number];

const BRIGHT: Rgb[] = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
const DECADES = 6;

function between(stops: Rgb[], share: number): Rgb {
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place)), part = place - low;
  return stops[low].map((each, at) => Math.round(each + (stops[low + 1][at] - each) * part)) as Rgb;
}

export const NOT_FINITE: Rgb = [255, 0, 200];

/** A value between the least and the greatest. */
export function valueColour(value: number, low: number, high: number): Rgb {
  if (!Number.isFinite(value)) return NOT_FINITE;
  return between(BRIGHT, high > low ? (value - low) / (high - low) : 0.5);
}

/** A difference: its sign, and its size on a scale of six powers of ten below the greatest. */
export function differenceColour(value: number, most: number, dark: boolean): Rgb {
  if (!Number.isFinite(value)) return NOT_FINITE;
  const nothing: Rgb = dark ? [30, 34, 40] : [247, 247, 247];
  if (value === 0 || !(most > 0)) return nothing;
  const share = Math.max(0.12, 1 + Math.log10(Math.abs(value) / most) / DECADES);
  const ends: Rgb[] = value > 0
    ? [nothing, dark ? [190, 70, 50] : [244, 165, 130], dark ? [255, 120, 90] : [178, 24, 43]]
    : [nothing, dark ? [50, 100, 180] : [146, 197, 222], dark ? [90, 170, 255] : [33, 102, 172]];
  return between(ends, share);
}

export function range(planes: Float64Array[]): [number, number] {
  let low = Infinity, high = -Infinity;
  for (const plane of planes) for (const value of plane) if (Number.isFinite(value)) { if (value < low) low = value; if (value > high) high = value; }
  return low > high ? [0, 1] : [low, high];
}

export function most(plane: Float64Array): number {
  let found = 0;
  for (const value of plane) if (Number.isFinite(value) && Math.abs(value) > found) found = Math.abs(value);
  return found;
}

/** Which elements a cell stands for: the row and the column in the folded tensor, as ranges. */
export function cellRange(cell: number, block: number, size: number): [number, number] {
  return [cell * block, Math.min((cell + 1) * block, size) - 1];
}

/** The index of a folded row in the axes that were folded into it. */
export function unfold(row: number, sizes: number[]): number[] {
  const index: number[] = [];
  for (let axis = sizes.length - 1; axis >= 0; axis--) {
    index.unshift(row % sizes[axis]);
    row = Math.floor(row / sizes[axis]);
  }
  return index;
}
