/* How far two stored values are apart: exact differences of integers, and distances in units of the last place (ULP).
 *
 * The distance of two floats is that of their ordinals. The ordinal of a value counts the numbers of a format between
 * zero and it: for a number of the format it is the stored magnitude read as an integer, with the sign in front (so both
 * zeros are 0), and in between it grows in a straight line. The format is that of both sides, or the coarser of the two:
 * the one with fewer bits of mantissa, then the one whose subnormals begin higher. Against an integer it is the format of
 * the float; two integers are their difference apart.
 *
 * There are two ways to it. Where both sides are of one format of at most 32 bits (or bfloat16 meets float32), the stored
 * bits are shifted to the top of a word, and words are subtracted: `words` below, summed in _pairs.h. All else goes through
 * doubles, which hold a fraction of an ordinal too: `ulps_by_ordinal`. Both give the same number where both apply.
 */

#ifndef TENSORPROBE_DISTANCE_H
#define TENSORPROBE_DISTANCE_H

#include "_blocks.h"

#define SIGN_BIT (UINT64_C(1) << 63)
#define INTEGRAL (-1) /* in place of a number of mantissa bits */

typedef struct {
    int mantissa_bits;
    int least_exponent; /* of a normal number */
    int word_shift;     /* moves the stored bits to the top of a 32-bit word; -1: they have no such word */
} Format;

static const Format formats[DTYPES] = {
    [FLOAT32] = {23, -126, 0},        [FLOAT64] = {52, -1022, -1},      [BFLOAT16] = {7, -126, 16},
    [FLOAT16] = {10, -14, 16},        [INT8] = {INTEGRAL, 0, -1},       [UINT8] = {INTEGRAL, 0, -1},
    [INT16] = {INTEGRAL, 0, -1},      [UINT16] = {INTEGRAL, 0, -1},     [INT32] = {INTEGRAL, 0, -1},
    [UINT32] = {INTEGRAL, 0, -1},     [INT64] = {INTEGRAL, 0, -1},      [UINT64] = {INTEGRAL, 0, -1},
    [BOOL] = {INTEGRAL, 0, -1},       [COMPLEX32] = {10, -14, 16},      [COMPLEX64] = {23, -126, 0},
    [COMPLEX128] = {52, -1022, -1},   [E4M3FN] = {3, -6, 24},           [E5M2] = {2, -14, 24},
    [E4M3FNUZ] = {3, -7, 24},         [E5M2FNUZ] = {2, -15, 24},        [E8M0FNU] = {0, -127, 23}, /* it has no sign */
};

static inline double double_of_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t bits_of_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

typedef struct { /* of a format, in terms of the bits of a double */
    uint64_t least_normal; /* a magnitude from here on has a straight relation to its ordinal */
    uint64_t offset;       /* which is its bits less this */
    double subnormal;      /* a smaller one is multiplied by this */
    double unit;           /* a distance of ordinals times this is in units of the last place */
} Ruler;

static Ruler ruler_of(const Format *format) {
    if (format->mantissa_bits == 52) return (Ruler){0, 0, 1, 1};
    const uint64_t least_normal = (uint64_t)(format->least_exponent + 1023) << 52;
    const uint64_t subnormal = (uint64_t)(1023 + 52 - format->least_exponent) << 52;
    const uint64_t unit = (uint64_t)(1023 - 52 + format->mantissa_bits) << 52;
    return (Ruler){least_normal, least_normal - (UINT64_C(1) << 52), double_of_bits(subnormal), double_of_bits(unit)};
}

static inline uint64_t ordinal_of(double value, const Ruler *ruler) {
    const uint64_t magnitude = bits_of_double(value) & ~SIGN_BIT;
    /* Adding 2^52 leaves the whole number in the low bits; conversions to 64-bit integers would not be vector code. */
    const uint64_t below = bits_of_double(double_of_bits(magnitude) * ruler->subnormal + 0x1p52) - bits_of_double(0x1p52);
    const uint64_t ordinal = (int64_t)magnitude >= (int64_t)ruler->least_normal ? magnitude - ruler->offset : below;
    return (int64_t)bits_of_double(value) < 0 ? 0 - ordinal : ordinal;
}

/* Rounds once, as a conversion does. */
static inline double double_of_unsigned(uint64_t number) {
    const double high = double_of_bits((number >> 32) | UINT64_C(0x4530000000000000)); /* 2^84 and the upper half */
    const double low = double_of_bits((number & 0xffffffffu) | UINT64_C(0x4330000000000000));
    return (high - (0x1p84 + 0x1p52)) + low;
}

#define ULPS_BY_ORDINAL(attributes, name)                                                                              \
    attributes static void name(const double *restrict a, const double *restrict b, size_t n, const Ruler *given,     \
                                double *restrict ulps) {                                                              \
        const Ruler ruler = *given;                                                                                   \
        for (size_t i = 0; i < n; i++) {                                                                              \
            const uint64_t p = ordinal_of(a[i], &ruler), q = ordinal_of(b[i], &ruler);                                \
            ulps[i] = double_of_unsigned((int64_t)p > (int64_t)q ? p - q : q - p) * ruler.unit;                       \
        }                                                                                                             \
    }

ULPS_BY_ORDINAL(, ulps_by_ordinal)
#if HAVE_X86
ULPS_BY_ORDINAL(AVX2, ulps_by_ordinal_avx2)
#endif

WIDEN(words_of_16_bits, uint16_t, uint32_t, (uint32_t)value << 16)
WIDEN(words_of_8_bits, uint8_t, uint32_t, (uint32_t)value << 24)
WIDEN(words_of_exponents, uint8_t, uint32_t, (uint32_t)value << 23)

static const struct {
    void (*spread[2])(const void *, void *, size_t);
} word_makers[3] = {{BOTH(words_of_16_bits)}, {BOTH(words_of_8_bits)}, {BOTH(words_of_exponents)}};

/* The stored bits of n values at the top of a word each; `stored` is aligned. */
static void make_words(const Format *format, const void *stored, uint32_t *words, size_t n) {
    if (format->word_shift == 0)
        memcpy(words, stored, n * sizeof *words);
    else
        word_makers[format->word_shift == 16 ? 0 : format->word_shift == 24 ? 1 : 2].spread[vector_code](stored, words, n);
}

/* An integer of any type as 64 bits, which are to be read as unsigned if the type is uint64. */
static int64_t integer_at(int code, const unsigned char *bytes) {
    union { int8_t i8; uint8_t u8; int16_t i16; uint16_t u16; int32_t i32; uint32_t u32; int64_t i64; } value;
    memcpy(&value, bytes, kinds[code].value_size);
    switch (code) {
        case INT8: return value.i8;
        case UINT8: return value.u8;
        case INT16: return value.i16;
        case UINT16: return value.u16;
        case INT32: return value.i32;
        case UINT32: return value.u32;
        case BOOL: return value.u8 != 0;
        default: return value.i64;
    }
}

typedef struct {
    const unsigned char *bytes;
    int code;
} Side;

/* Candidate minus baseline where one of them has 64 bits: as a whole number, which is rounded once (twice where the signs
 * are opposite and the sum is beyond 64 bits). Through doubles, 2^60 and 2^60 + 1 would be the same. */
static void subtract_integers(Side a, Side b, size_t n, double *difference) {
    const unsigned size_a = kinds[a.code].value_size, size_b = kinds[b.code].value_size;
    for (size_t i = 0; i < n; i++) {
        const int64_t x = integer_at(a.code, a.bytes + i * size_a), y = integer_at(b.code, b.bytes + i * size_b);
        const int x_negative = x < 0 && a.code != UINT64, y_negative = y < 0 && b.code != UINT64;
        const uint64_t u = x_negative ? 0 - (uint64_t)x : (uint64_t)x, v = y_negative ? 0 - (uint64_t)y : (uint64_t)y;
        double d;
        if (x_negative != y_negative)
            d = (double)v + (double)u;
        else
            d = v >= u ? (double)(v - u) : -(double)(u - v);
        difference[i] = y_negative ? -d : d;
    }
}

#endif
