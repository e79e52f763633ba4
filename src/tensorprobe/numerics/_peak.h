/* The greatest magnitude in a tensor, as the bits of a value without its sign.
 *
 * Floats of one sign are ordered as the integers they are stored in, with infinity above every number and NaN above
 * infinity: one pass of integer maxima tells whether all is finite, how near to the limit it comes, and needs no arithmetic.
 */

#ifndef TENSORPROBE_PEAK_H
#define TENSORPROBE_PEAK_H

#include "_blocks.h"

#define PEAK_LANES 64

#define PEAK_BY(attributes, name, word, mask)                                                                         \
    attributes static uint64_t name(const void *bytes, size_t n) {                                                    \
        const word *restrict values = bytes;                                                                          \
        word greatest[PEAK_LANES] = {0};                                                                              \
        size_t i = 0;                                                                                                 \
        for (; i + PEAK_LANES <= n; i += PEAK_LANES)                                                                  \
            for (int lane = 0; lane < PEAK_LANES; lane++) {                                                           \
                const word magnitude = values[i + lane] & (mask);                                                     \
                greatest[lane] = magnitude > greatest[lane] ? magnitude : greatest[lane];                             \
            }                                                                                                         \
        for (; i < n; i++) {                                                                                          \
            const word magnitude = values[i] & (mask);                                                                \
            greatest[0] = magnitude > greatest[0] ? magnitude : greatest[0];                                          \
        }                                                                                                             \
        for (int lane = 1; lane < PEAK_LANES; lane++)                                                                 \
            greatest[0] = greatest[lane] > greatest[0] ? greatest[lane] : greatest[0];                                \
        return (uint64_t)greatest[0];                                                                                 \
    }

#if HAVE_X86
#define PEAK(name, word, mask) PEAK_BY(, name, word, mask) PEAK_BY(AVX2, name##_avx2, word, mask)
#else
#define PEAK(name, word, mask) PEAK_BY(, name, word, mask)
#define peak_of_bytes_avx2 peak_of_bytes
#define peak_of_halves_avx2 peak_of_halves
#define peak_of_floats_avx2 peak_of_floats
#define peak_of_doubles_avx2 peak_of_doubles
#endif

/* Signed words: the sign is gone, and vectors compare signed integers of every width. */
PEAK(peak_of_bytes, int8_t, 0x7f)
PEAK(peak_of_halves, int16_t, 0x7fff)
PEAK(peak_of_floats, int32_t, 0x7fffffff)
PEAK(peak_of_doubles, int64_t, INT64_C(0x7fffffffffffffff))

/* Whether the order of the bits of this dtype is that of the magnitudes, with NaN on top. */
static int has_peak(int64_t code) {
    switch (code) {
    case FLOAT32: case FLOAT64: case BFLOAT16: case FLOAT16: case COMPLEX32: case COMPLEX64: case COMPLEX128: case E4M3FN: case E5M2:
        return 1;
    default:
        return 0;
    }
}

static uint64_t peak_of_aligned(int value_size, const void *bytes, size_t n) {
    switch (value_size) {
    case 1: return (vector_code ? peak_of_bytes_avx2 : peak_of_bytes)(bytes, n);
    case 2: return (vector_code ? peak_of_halves_avx2 : peak_of_halves)(bytes, n);
    case 4: return (vector_code ? peak_of_floats_avx2 : peak_of_floats)(bytes, n);
    default: return (vector_code ? peak_of_doubles_avx2 : peak_of_doubles)(bytes, n);
    }
}

static uint64_t peak_of(const Kind *kind, const unsigned char *bytes, int64_t count) {
    const size_t n = (size_t)count * (size_t)kind->parts, size = (size_t)kind->value_size;
    if ((uintptr_t)bytes % size == 0) return peak_of_aligned(kind->value_size, bytes, n);
    uint64_t greatest = 0;
    Wide block;
    for (size_t i = 0; i < n; i += BLOCK) {
        const size_t part = n - i < BLOCK ? n - i : BLOCK;
        const uint64_t peak = peak_of_aligned(kind->value_size, memcpy(&block, bytes + i * size, part * size), part);
        greatest = peak > greatest ? peak : greatest;
    }
    return greatest;
}

#endif
