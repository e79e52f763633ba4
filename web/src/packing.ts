// Reads what src/tensorprobe/packing.py wrote: planes of bytes, deflated, in base64.

export type Numbers = Float64Array | Int32Array;

const SPECIAL = 32767;
const POWERS = Float64Array.from({ length: 700 }, (_, at) => Number(`1e${at - 350}`));

function bytesOf(text: string): Uint8Array<ArrayBuffer> {
  const native = Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> };
  if (native.fromBase64) return native.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

export async function inflate(text: string): Promise<Uint8Array> {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** A reader of signed integers whose bytes stand in planes. */
function planes(bytes: Uint8Array, width: number, count: number): (at: number) => number {
  const [two, three] = [2 * count, 3 * count];
  if (width === 1) return (at) => (bytes[at] << 24) >> 24;
  if (width === 2) return (at) => ((bytes[at] | (bytes[count + at] << 8)) << 16) >> 16;
  const low = (at: number): number => bytes[at] | (bytes[count + at] << 8) | (bytes[two + at] << 16) | (bytes[three + at] << 24);
  if (width === 4) return low;
  const high = planes(bytes.subarray(4 * count), 4, count);
  return (at) => high(at) * 2 ** 32 + (low(at) >>> 0);
}

export function decodeNumbers(bytes: Uint8Array): Float64Array {
  const count = bytes.length / 4;
  const values = new Float64Array(count);
  for (let at = 0; at < count; at++) {
    const low = bytes[at] | (bytes[count + at] << 8);
    const mantissa = (low << 16) >> 16;
    const exponent = ((bytes[2 * count + at] | (bytes[3 * count + at] << 8)) << 16) >> 16;
    if (exponent === SPECIAL) values[at] = mantissa === 0 ? NaN : mantissa * Infinity;
    // A quotient by a power of ten is rounded once; a product by a negative power would be rounded twice.
    else if (exponent >= 2) values[at] = mantissa * POWERS[exponent - 2 + 350];
    else values[at] = exponent > -300 ? mantissa / POWERS[2 - exponent + 350] : (mantissa * 1e-200) / POWERS[-198 - exponent + 350];
  }
  return values;
}

export function decodeIntegers(bytes: Uint8Array, width: number): Numbers {
  const count = bytes.length / width;
  const step = planes(bytes, width, count);
  const values = new Float64Array(count);
  let total = 0, large = false;
  for (let at = 0; at < count; at++) {
    values[at] = total += step(at);
    large ||= total > 0x7fffffff || total < -0x80000000;
  }
  return large ? values : Int32Array.from(values);
}

export async function unpackWords(text: string): Promise<string[]> {
  return JSON.parse(new TextDecoder().decode(await inflate(text))) as string[];
}
