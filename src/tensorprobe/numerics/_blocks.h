/* Blocks of a tensor as floats or doubles: the dtypes, and the widening of what is stored.
 *
 * `widened` is the one door: bytes of any dtype and any alignment come in, an array of float or double goes out, exact
 * but for 64-bit integers, which are rounded. `prepare_blocks` must have run once.
 */

#ifndef TENSORPROBE_BLOCKS_H
#define TENSORPROBE_BLOCKS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TENSORPROBE_PORTABLE)
#define HAVE_X86 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define F16C __attribute__((target("avx2,f16c")))
#else
#define HAVE_X86 0
#endif

#define BLOCK 2048 /* values: a block and its widened copy stay in the first-level cache */

/* Codes of tensorprobe/model/dtypes.py, in its order. */
enum {
    FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64, BOOL,
    COMPLEX32, COMPLEX64, COMPLEX128, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU, DTYPES
};

#define WIDEN_BY(attributes, name, stored_type, wide_type, expression)                                                 \
    attributes static void name(const void *stored, void *wide, size_t n) {                                           \
        const stored_type *restrict from = stored;                                                                    \
        wide_type *restrict to = wide;                                                                                \
        for (size_t i = 0; i < n; i++) {                                                                              \
            const stored_type value = from[i];                                                                        \
            to[i] = (wide_type)(expression);                                                                          \
        }                                                                                                             \
    }

/* Every widening exists twice on x86-64: the compiler makes the vector code, the processor decides at import. */
#if HAVE_X86
#define WIDEN(name, stored_type, wide_type, expression)                                                               \
    WIDEN_BY(, name, stored_type, wide_type, expression)                                                              \
    WIDEN_BY(AVX2, name##_avx2, stored_type, wide_type, expression)
#define BOTH(name) {name, name##_avx2}
#else
#define WIDEN(name, stored_type, wide_type, expression) WIDEN_BY(, name, stored_type, wide_type, expression)
#define BOTH(name) {name, name}
#endif

static float float8_values[5][256]; /* from E4M3FN to E8M0FNU; filled by prepare_blocks */

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A half has its bits moved to where a float has them; the bias is put right by a multiplication, exact for subnormals. */
static inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t shifted = (uint32_t)(half & 0x7fff) << 13;
    const float magnitude = float_of_bits(shifted) * 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    if (shifted >= 0x0f800000u) bits = shifted | 0x7f800000u; /* infinity and NaN */
    return float_of_bits(bits | sign);
}

WIDEN(widen_bfloat16, uint16_t, float, float_of_bits((uint32_t)value << 16))
WIDEN(widen_float16, uint16_t, float, float_of_half(value))
WIDEN(widen_int8, int8_t, float, value)
WIDEN(widen_uint8, uint8_t, float, value)
WIDEN(widen_int16, int16_t, float, value)
WIDEN(widen_uint16, uint16_t, float, value)
WIDEN(widen_bool, uint8_t, float, value != 0)
WIDEN(widen_e4m3fn, uint8_t, float, float8_values[0][value])
WIDEN(widen_e5m2, uint8_t, float, float8_values[1][value])
WIDEN(widen_e4m3fnuz, uint8_t, float, float8_values[2][value])
WIDEN(widen_e5m2fnuz, uint8_t, float, float8_values[3][value])
WIDEN(widen_e8m0fnu, uint8_t, float, float8_values[4][value])
WIDEN(widen_int32, int32_t, double, value)
WIDEN(widen_uint32, uint32_t, double, value)
WIDEN(widen_int64, int64_t, double, value)
WIDEN(widen_uint64, uint64_t, double, value)

#if HAVE_X86
F16C static void widen_float16_f16c(const void *stored, void *wide, size_t n) {
    const uint16_t *from = stored;
    float *to = wide;
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + i))));
    for (; i < n; i++) to[i] = float_of_half(from[i]);
}
#endif

typedef enum { TO_FLOAT, TO_DOUBLE } Width;

typedef struct {
    Width width;
    unsigned value_size;                            /* bytes of one stored value */
    unsigned parts;                                 /* values in an element: 2 for complex */
    void (*widen[2])(const void *, void *, size_t); /* portable, vector; NULL: the stored value has that width already */
} Kind;

static int vector_code; /* 1 where AVX2 is used */

static Kind kinds[DTYPES] = {
    [FLOAT32] = {TO_FLOAT, 4, 1, {NULL, NULL}},
    [FLOAT64] = {TO_DOUBLE, 8, 1, {NULL, NULL}},
    [BFLOAT16] = {TO_FLOAT, 2, 1, BOTH(widen_bfloat16)},
    [FLOAT16] = {TO_FLOAT, 2, 1, BOTH(widen_float16)},
    [INT8] = {TO_FLOAT, 1, 1, BOTH(widen_int8)},
    [UINT8] = {TO_FLOAT, 1, 1, BOTH(widen_uint8)},
    [INT16] = {TO_FLOAT, 2, 1, BOTH(widen_int16)},
    [UINT16] = {TO_FLOAT, 2, 1, BOTH(widen_uint16)},
    [INT32] = {TO_DOUBLE, 4, 1, BOTH(widen_int32)},
    [UINT32] = {TO_DOUBLE, 4, 1, BOTH(widen_uint32)},
    [INT64] = {TO_DOUBLE, 8, 1, BOTH(widen_int64)},
    [UINT64] = {TO_DOUBLE, 8, 1, BOTH(widen_uint64)},
    [BOOL] = {TO_FLOAT, 1, 1, BOTH(widen_bool)},
    [COMPLEX32] = {TO_FLOAT, 2, 2, BOTH(widen_float16)},
    [COMPLEX64] = {TO_FLOAT, 4, 2, {NULL, NULL}},
    [COMPLEX128] = {TO_DOUBLE, 8, 2, {NULL, NULL}},
    [E4M3FN] = {TO_FLOAT, 1, 1, BOTH(widen_e4m3fn)},
    [E5M2] = {TO_FLOAT, 1, 1, BOTH(widen_e5m2)},
    [E4M3FNUZ] = {TO_FLOAT, 1, 1, BOTH(widen_e4m3fnuz)},
    [E5M2FNUZ] = {TO_FLOAT, 1, 1, BOTH(widen_e5m2fnuz)},
    [E8M0FNU] = {TO_FLOAT, 1, 1, BOTH(widen_e8m0fnu)},
};

typedef union {
    float floats[BLOCK];
    double doubles[BLOCK];
} Wide;

typedef struct {
    Wide stored; /* a copy of the bytes, for a tensor that is not aligned */
    Wide wide;
} Scratch;

/* The n values at `bytes` as an array of float or double, whichever kind->width says; n is at most BLOCK. */
static const void *widened(const Kind *kind, const unsigned char *bytes, size_t n, Scratch *scratch) {
    const void *stored = bytes;
    if ((uintptr_t)bytes % kind->value_size) stored = memcpy(&scratch->stored, bytes, n * kind->value_size);
    if (!kind->widen[0]) return stored;
    kind->widen[vector_code](stored, &scratch->wide, n);
    return &scratch->wide;
}

typedef struct {
    int mantissa_bits, bias;
    int ieee;                 /* the greatest exponent holds infinity and NaN */
    int negative_zero_is_nan; /* and there is no other NaN, nor an infinity */
} Float8;

static float decode_float8(const Float8 *format, int byte) {
    const int magnitude = byte & 0x7f, steps = 1 << format->mantissa_bits;
    const int fraction = magnitude % steps, exponent = magnitude / steps;
    const float sign = byte & 0x80 ? -1.0f : 1.0f;
    if (format->negative_zero_is_nan) {
        if (byte == 0x80) return NAN;
    } else if (format->ieee) {
        if (exponent == 0x7f / steps) return fraction ? NAN : sign * INFINITY;
    } else if (magnitude == 0x7f) {
        return NAN;
    }
    const int units = exponent ? fraction + steps : fraction;
    return sign * ldexpf((float)units, (exponent ? exponent : 1) - format->bias - format->mantissa_bits);
}

/* Fills the tables and takes the code that the processor can run. */
static void prepare_blocks(int has_avx2, int has_f16c) {
    static const Float8 formats[4] = {{3, 7, 0, 0}, {2, 15, 1, 0}, {3, 8, 0, 1}, {2, 16, 0, 1}};
    for (int byte = 0; byte < 256; byte++) {
        for (int i = 0; i < 4; i++) float8_values[i][byte] = decode_float8(&formats[i], byte);
        float8_values[4][byte] = byte == 255 ? NAN : ldexpf(1.0f, byte - 127);
    }
    vector_code = has_avx2;
#if HAVE_X86
    if (has_f16c) kinds[FLOAT16].widen[1] = kinds[COMPLEX32].widen[1] = widen_float16_f16c;
#else
    (void)has_f16c;
#endif
}

#endif
