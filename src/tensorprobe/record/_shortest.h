/* The shortest decimal digits that read back as the same double, written as msgspec writes them into JSON.
 *
 * Schubfach (R. Giulietti, "The Schubfach way to render doubles", 2020): the bounds of the interval that rounds to the double
 * are scaled by a power of ten of 128 bits, and the shortest number between them is taken. Powers of ten come from Python,
 * which has integers of any length: `powers` holds ceil(10^k 2^s) for k from LEAST_POWER on, s so that 128 bits are used.
 */
#ifndef TENSORPROBE_SHORTEST_H
#define TENSORPROBE_SHORTEST_H

#include <stdint.h>
#include <string.h>

#define LEAST_POWER (-292)
#define POWERS 617
#define FRACTION_BITS 52
#define EXPONENT_OFFSET 1075 /* of a double whose fraction is taken as a whole number */
#define NUMBER_TEXT 32       /* bytes that are enough for any number */

__extension__ typedef unsigned __int128 Product;
typedef struct {
    uint64_t low, high;
} Power;
typedef struct {
    uint64_t digits;
    int exponent;
} Decimal;

static Power powers[POWERS];

static int floor_log2_of_power(int k) { return (int)((int64_t)k * 1741647 >> 19); }

/* The upper 64 bits of a product of 192; the last one is set if anything was cut off. */
static uint64_t scaled(Power power, uint64_t factor) {
    const Product low = (Product)power.low * factor, high = (Product)power.high * factor + (uint64_t)(low >> 64);
    return (uint64_t)(high >> 64) | ((uint64_t)high > 1);
}

static Decimal shortest(uint64_t fraction, int biased) {
    const uint64_t c = biased ? fraction | UINT64_C(1) << FRACTION_BITS : fraction;
    const int q = (biased ? biased : 1) - EXPONENT_OFFSET;
    if (biased && q <= 0 && q > -FRACTION_BITS - 1 && !(c & ((UINT64_C(1) << -q) - 1))) return (Decimal){c >> -q, 0};
    const int odd = (int)(c & 1), closer = fraction == 0 && biased > 1; /* below a power of two, numbers are twice as dense */
    const int k = (int)(((int64_t)q * 1262611 - (closer ? 524031 : 0)) >> 22);
    const int h = q + floor_log2_of_power(-k) + 1;
    const Power power = powers[-k - LEAST_POWER];
    const uint64_t lower = scaled(power, (4 * c - 2 + (uint64_t)closer) << h) + (uint64_t)odd;
    const uint64_t middle = scaled(power, 4 * c << h), upper = scaled(power, (4 * c + 2) << h) - (uint64_t)odd;
    const uint64_t s = middle / 4, tens = s / 10;
    if (s >= 10) {
        const int below = lower <= 40 * tens, above = 40 * tens + 40 <= upper;
        if (below != above) return (Decimal){tens + (uint64_t)above, k + 1};
    }
    const int below = lower <= 4 * s, above = 4 * s + 4 <= upper;
    if (below != above) return (Decimal){s + (uint64_t)above, k};
    const uint64_t half = 4 * s + 2;
    return (Decimal){s + (middle > half || (middle == half && (s & 1))), k};
}

/* The digits of a number in decimal; how many they are. `to` has room for 20. */
static int write_digits(char *to, uint64_t number) {
    char reversed[20];
    int n = 0;
    do reversed[n++] = (char)('0' + number % 10);
    while (number /= 10);
    for (int i = 0; i < n; i++) to[i] = reversed[n - 1 - i];
    return n;
}

static int write_zeros(char *to, int n) {
    memset(to, '0', (size_t)n);
    return n;
}

/* A finite double as JSON; how many bytes it takes of the NUMBER_TEXT that `to` has. */
static int write_double(char *to, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int n = 0;
    if (bits >> 63) to[n++] = '-';
    bits &= ~(UINT64_C(1) << 63);
    if (!bits) {
        memcpy(to + n, "0.0", 3);
        return n + 3;
    }
    Decimal number = shortest(bits & ((UINT64_C(1) << FRACTION_BITS) - 1), (int)(bits >> FRACTION_BITS));
    while (number.digits % 10 == 0) number.digits /= 10, number.exponent++;
    char digits[20];
    const int length = write_digits(digits, number.digits), k = number.exponent, point = length + k;
    if (k >= 0 && point <= 16) { /* 1234000.0 */
        memcpy(to + n, digits, (size_t)length);
        n += length + write_zeros(to + n + length, k);
        memcpy(to + n, ".0", 2);
        return n + 2;
    }
    if (point > 0 && point <= 16) { /* 12.34 */
        memcpy(to + n, digits, (size_t)point);
        to[n + point] = '.';
        memcpy(to + n + point + 1, digits + point, (size_t)(length - point));
        return n + length + 1;
    }
    if (point > -5 && point <= 0) { /* 0.001234 */
        memcpy(to + n, "0.", 2);
        n += 2 + write_zeros(to + n + 2, -point);
        memcpy(to + n, digits, (size_t)length);
        return n + length;
    }
    to[n++] = digits[0]; /* 1.234e30 */
    if (length > 1) {
        to[n++] = '.';
        memcpy(to + n, digits + 1, (size_t)(length - 1));
        n += length - 1;
    }
    to[n++] = 'e';
    if (point - 1 < 0) to[n++] = '-';
    return n + write_digits(to + n, (uint64_t)(point - 1 < 0 ? 1 - point : point - 1));
}

#endif
