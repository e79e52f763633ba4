/* A first look at a pair of tensors, reference `a` and result `b`: only the sums that tell whether more must be looked at.
 *
 * A fraction of what _pairs.h measures, and several times as fast for a wide reference beside a narrow result. Of pairs
 * with a value that is not finite it says nothing, unless all bytes are equal: then all figures are 0. The order of summation is of no account here.
 */

#ifndef TENSORPROBE_GLANCE_H
#define TENSORPROBE_GLANCE_H

#include "_pairs.h"

#define GLANCE 1024 /* values at a time, in the first-level cache; a multiple of GLANCE_LANES, at most BLOCK */
#define GLANCE_LANES 8

typedef struct {
    double squares_a, squares_d, a_times_d, sum_d, max_d, max_a, different, astray_1e3, astray_1e2;
} Glance;

#define GLANCE_FIELDS 9

typedef struct {
    double lanes[GLANCE_FIELDS][GLANCE_LANES];
} GlanceSums;

#define GLANCE_BY(attributes, suffix)                                                                                  \
    attributes static void glance_values##suffix(const double *restrict a, const double *restrict b, size_t n,        \
                                                 GlanceSums *restrict sums) {                                         \
        double sa[GLANCE_LANES], sd[GLANCE_LANES], ad[GLANCE_LANES], s[GLANCE_LANES], md[GLANCE_LANES];               \
        double ma[GLANCE_LANES], different[GLANCE_LANES], fine[GLANCE_LANES], rough[GLANCE_LANES];                    \
        double *const all[GLANCE_FIELDS] = {sa, sd, ad, s, md, ma, different, fine, rough};                           \
        for (int k = 0; k < GLANCE_FIELDS; k++) memcpy(all[k], sums->lanes[k], sizeof sa);                            \
        for (size_t i = 0; i < n; i += GLANCE_LANES)                                                                  \
            for (int lane = 0; lane < GLANCE_LANES; lane++) {                                                         \
                const double x = a[i + lane], d = b[i + lane] - x;                                                    \
                const double size = fabs(x), error = fabs(d);                                                         \
                sa[lane] += x * x;                                                                                    \
                sd[lane] += d * d;                                                                                    \
                ad[lane] += x * d;                                                                                    \
                s[lane] += d;                                                                                         \
                md[lane] = error > md[lane] ? error : md[lane];                                                       \
                ma[lane] = size > ma[lane] ? size : ma[lane];                                                         \
                different[lane] += error > 0 ? 1.0 : 0.0;                                                             \
                fine[lane] += error > 1e-3 * size ? 1.0 : 0.0;                                                        \
                rough[lane] += error > 1e-2 * size ? 1.0 : 0.0;                                                       \
            }                                                                                                         \
        for (int k = 0; k < GLANCE_FIELDS; k++) memcpy(sums->lanes[k], all[k], sizeof sa);                            \
    }                                                                                                                 \
    attributes static void floats_to_doubles##suffix(const float *restrict from, size_t n, double *restrict to) {     \
        for (size_t i = 0; i < n; i++) to[i] = from[i];                                                               \
    }

GLANCE_BY(, )
#if HAVE_X86
GLANCE_BY(AVX2, _avx2)
#define GLANCE_IN_USE(name) (vector_code ? name##_avx2 : name)
#else
#define GLANCE_IN_USE(name) name
#endif

static const double *glance_side(const Kind *kind, const unsigned char *bytes, size_t n, size_t padded, double *room,
                                 Scratch *scratch) {
    const void *wide = widened(kind, bytes, n, scratch);
    if (kind->width != TO_FLOAT && n == padded && (uintptr_t)wide % sizeof *room == 0) return wide;
    if (kind->width == TO_FLOAT)
        GLANCE_IN_USE(floats_to_doubles)(wide, n, room);
    else
        memcpy(room, wide, n * sizeof *room);
    for (size_t i = n; i < padded; i++) room[i] = 0;
    return room;
}

/* Whether all values are finite; only then the figures mean something. */
static int glance_at(const int64_t *row, Glance *out) {
    const Kind *kind_a = &kinds[row[3]], *kind_b = &kinds[row[4]];
    const unsigned char *a = (const unsigned char *)(intptr_t)row[0], *b = (const unsigned char *)(intptr_t)row[1];
    const size_t values = (size_t)row[2] * kind_a->parts;
    if (row[3] == row[4] && !memcmp(a, b, values * kind_a->value_size)) { /* nothing differs, finite or not */
        memset(out, 0, sizeof *out);
        return 1;
    }
    double room[2][GLANCE];
    Scratch scratch[2];
    GlanceSums sums;
    memset(&sums, 0, sizeof sums);
    for (size_t start = 0; start < values; start += GLANCE) {
        const size_t n = values - start < GLANCE ? values - start : GLANCE;
        const size_t padded = (n + GLANCE_LANES - 1) / GLANCE_LANES * GLANCE_LANES;
        const double *x = glance_side(kind_a, a + start * kind_a->value_size, n, padded, room[0], &scratch[0]);
        const double *y = glance_side(kind_b, b + start * kind_b->value_size, n, padded, room[1], &scratch[1]);
        GLANCE_IN_USE(glance_values)(x, y, padded, &sums);
    }
    double figures[GLANCE_FIELDS];
    for (int k = 0; k < GLANCE_FIELDS; k++) {
        figures[k] = sums.lanes[k][0];
        for (int lane = 1; lane < GLANCE_LANES; lane++) {
            const double other = sums.lanes[k][lane];
            if (k == 4 || k == 5)
                figures[k] = other > figures[k] ? other : figures[k];
            else
                figures[k] += other;
        }
    }
    memcpy(out, figures, sizeof figures);
    /* A NaN or an infinity on either side shows in one of these; so do squares beyond what a double holds. */
    return IS_FINITE(out->squares_a) && IS_FINITE(out->squares_d);
}

#endif
