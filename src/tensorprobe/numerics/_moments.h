/* The figures of one tensor, (max, min, mean, norm, nan, inf), in one pass over its blocks.
 *
 * Maximum and minimum pass over NaN, mean and norm are of the finite values, a figure of nothing is NaN. The order of
 * summation is fixed, so that twin.py gives the same bits: value i of a block goes to lane i % LANES of that block, the
 * lanes of the blocks are added up in order, and the lanes are folded in halves at the end.
 *
 * The fast scan of a block knows nothing of NaN and infinity; both show in its sum of squares, and then the sums
 * are made again from a cleaned copy. Sums are in double: lanes of float lose digits that mean and norm need.
 */

#ifndef TENSORPROBE_MOMENTS_H
#define TENSORPROBE_MOMENTS_H

#include "_blocks.h"

#define LANES 16

#define HUGE_SCALE 0x1p-600
#define TINY_SCALE 0x1p+600
#define TINY_SQUARES 0x1p-960 /* below it, single squares of doubles may have been lost to underflow */

typedef struct {
    double sum[LANES], squares[LANES];
    double min, max;
    int64_t nan, inf;
} Tally;

static void start_tally(Tally *tally) {
    memset(tally, 0, sizeof *tally);
    tally->min = INFINITY;
    tally->max = -INFINITY;
}

/* The fast scan of `rows` rows of LANES values. Its figures hold if the sum of squares comes out finite. */
#define SCAN_ROWS(name, value_type)                                                                                   \
    static void name(const value_type *x, size_t rows, Tally *tally) {                                                \
        value_type min[LANES], max[LANES];                                                                            \
        double sum[LANES] = {0}, squares[LANES] = {0};                                                                \
        for (int lane = 0; lane < LANES; lane++) min[lane] = (value_type)INFINITY, max[lane] = (value_type)-INFINITY; \
        for (; rows; rows--, x += LANES) {                                                                            \
            for (int lane = 0; lane < LANES; lane++) {                                                                \
                const double value = x[lane];                                                                         \
                sum[lane] += value;                                                                                   \
                squares[lane] += value * value;                                                                       \
            }                                                                                                         \
            for (int lane = 0; lane < LANES; lane++) {                                                                \
                min[lane] = x[lane] < min[lane] ? x[lane] : min[lane];                                                \
                max[lane] = x[lane] > max[lane] ? x[lane] : max[lane];                                                \
            }                                                                                                         \
        }                                                                                                             \
        for (int lane = 0; lane < LANES; lane++) {                                                                    \
            tally->sum[lane] = sum[lane];                                                                             \
            tally->squares[lane] = squares[lane];                                                                     \
            if (min[lane] < tally->min) tally->min = min[lane];                                                       \
            if (max[lane] > tally->max) tally->max = max[lane];                                                       \
        }                                                                                                             \
    }

SCAN_ROWS(scan_float_rows, float)
SCAN_ROWS(scan_double_rows, double)

#if HAVE_X86
/* Written out, because compilers make a third of this speed from the loops above. No fused multiply-add: it would round
 * once where the twin rounds twice. */
AVX2 static void scan_float_rows_avx2(const float *x, size_t rows, Tally *tally) {
    __m256d sum[4], squares[4];
    __m256 min[2], max[2];
    for (int k = 0; k < 4; k++) sum[k] = squares[k] = _mm256_setzero_pd();
    for (int k = 0; k < 2; k++) min[k] = _mm256_set1_ps(INFINITY), max[k] = _mm256_set1_ps(-INFINITY);
    for (; rows; rows--, x += LANES) {
        _mm_prefetch((const char *)x + 4096, _MM_HINT_T0);
        for (int k = 0; k < 2; k++) {
            const __m256 values = _mm256_loadu_ps(x + 8 * k);
            min[k] = _mm256_min_ps(values, min[k]);
            max[k] = _mm256_max_ps(values, max[k]);
        }
        for (int k = 0; k < 4; k++) {
            const __m256d values = _mm256_cvtps_pd(_mm_loadu_ps(x + 4 * k));
            sum[k] = _mm256_add_pd(sum[k], values);
            squares[k] = _mm256_add_pd(squares[k], _mm256_mul_pd(values, values));
        }
    }
    float least[8], greatest[8];
    _mm256_storeu_ps(least, _mm256_min_ps(min[0], min[1]));
    _mm256_storeu_ps(greatest, _mm256_max_ps(max[0], max[1]));
    for (int k = 0; k < 8; k++) {
        if (least[k] < tally->min) tally->min = least[k];
        if (greatest[k] > tally->max) tally->max = greatest[k];
    }
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_pd(tally->sum + 4 * k, sum[k]);
        _mm256_storeu_pd(tally->squares + 4 * k, squares[k]);
    }
}

/* Two loops over the block, the second one from the cache: all sixteen accumulators at once would not fit. */
AVX2 static void scan_double_rows_avx2(const double *x, size_t rows, Tally *tally) {
    __m256d sum[4], squares[4], min[4], max[4];
    for (int k = 0; k < 4; k++) {
        sum[k] = squares[k] = _mm256_setzero_pd();
        min[k] = _mm256_set1_pd(INFINITY), max[k] = _mm256_set1_pd(-INFINITY);
    }
    for (size_t row = 0; row < rows; row++)
        for (int k = 0; k < 4; k++) {
            const __m256d values = _mm256_loadu_pd(x + LANES * row + 4 * k);
            sum[k] = _mm256_add_pd(sum[k], values);
            squares[k] = _mm256_add_pd(squares[k], _mm256_mul_pd(values, values));
        }
    for (size_t row = 0; row < rows; row++)
        for (int k = 0; k < 4; k++) {
            const __m256d values = _mm256_loadu_pd(x + LANES * row + 4 * k);
            min[k] = _mm256_min_pd(values, min[k]);
            max[k] = _mm256_max_pd(values, max[k]);
        }
    double least[4], greatest[4];
    _mm256_storeu_pd(least, _mm256_min_pd(_mm256_min_pd(min[0], min[1]), _mm256_min_pd(min[2], min[3])));
    _mm256_storeu_pd(greatest, _mm256_max_pd(_mm256_max_pd(max[0], max[1]), _mm256_max_pd(max[2], max[3])));
    for (int k = 0; k < 4; k++) {
        if (least[k] < tally->min) tally->min = least[k];
        if (greatest[k] > tally->max) tally->max = greatest[k];
        _mm256_storeu_pd(tally->sum + 4 * k, sum[k]);
        _mm256_storeu_pd(tally->squares + 4 * k, squares[k]);
    }
}
#endif

static void (*scan_floats)(const float *, size_t, Tally *) = scan_float_rows;
static void (*scan_doubles)(const double *, size_t, Tally *) = scan_double_rows;

static inline void tally_value(Tally *tally, int lane, double value) {
    tally->sum[lane] += value;
    tally->squares[lane] += value * value;
    if (value < tally->min) tally->min = value;
    if (value > tally->max) tally->max = value;
}

/* Whole rows by the scan, the rest one by one into the same lanes. */
static void scan_fast(Width width, const void *values, size_t n, Tally *tally) {
    const size_t rows = n / LANES, done = rows * LANES;
    if (width == TO_FLOAT) {
        scan_floats(values, rows, tally);
        for (size_t i = done; i < n; i++) tally_value(tally, (int)(i - done), ((const float *)values)[i]);
    } else {
        scan_doubles(values, rows, tally);
        for (size_t i = done; i < n; i++) tally_value(tally, (int)(i - done), ((const double *)values)[i]);
    }
}

static int squares_are_finite(const Tally *tally) {
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += tally->squares[lane];
    return total - total == 0;
}

/* Counts what is not finite and writes zero in its place; the rest is multiplied by `scale`, a power of two. */
#define CLEAN(name, value_type, count_type)                                                                           \
    static void name(const value_type *restrict x, size_t n, value_type scale, value_type *restrict clean, Tally *tally) { \
        count_type nan = 0, finite = 0;                                                                               \
        for (size_t i = 0; i < n; i++) {                                                                              \
            const value_type value = x[i];                                                                            \
            const int is_finite = value - value == 0;                                                                 \
            nan += value != value;                                                                                    \
            finite += is_finite;                                                                                      \
            clean[i] = is_finite ? value * scale : 0;                                                                 \
        }                                                                                                             \
        tally->nan = nan;                                                                                             \
        tally->inf = (int64_t)n - nan - finite;                                                                       \
    }

CLEAN(clean_floats, float, int32_t)
CLEAN(clean_doubles, double, int64_t)

static void add_tally(Tally *total, const Tally *block) {
    for (int lane = 0; lane < LANES; lane++) {
        total->sum[lane] += block->sum[lane];
        total->squares[lane] += block->squares[lane];
    }
    if (block->min < total->min) total->min = block->min;
    if (block->max > total->max) total->max = block->max;
    total->nan += block->nan;
    total->inf += block->inf;
}

/* The scan of a block for every case. Minimum and maximum of the fast scan hold even where its sums do not, because a
 * comparison with NaN is false; so only the sums are made again, from a copy without the values that spoil them. */
static void scan_block(Width width, const void *values, size_t n, double scale, Tally *tally) {
    Wide clean;
    start_tally(tally);
    scan_fast(width, values, n, tally);
    if (scale == 1 && squares_are_finite(tally)) return;
    const double min = tally->min, max = tally->max;
    if (width == TO_FLOAT)
        clean_floats(values, n, (float)scale, clean.floats, tally);
    else
        clean_doubles(values, n, scale, clean.doubles, tally);
    const int64_t nan = tally->nan, inf = tally->inf;
    start_tally(tally);
    scan_fast(width, &clean, n, tally);
    tally->min = min, tally->max = max;
    tally->nan = nan, tally->inf = inf;
}

static void tally_tensor(const Kind *kind, const unsigned char *bytes, size_t count, double scale, Tally *total) {
    Scratch scratch;
    start_tally(total);
    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t n = count - start < BLOCK ? count - start : BLOCK;
        const void *values = widened(kind, bytes + start * kind->value_size, n, &scratch);
        Tally block;
        scan_block(kind->width, values, n, scale, &block);
        add_tally(total, &block);
    }
}

static double fold(const double *lanes) {
    double folded[LANES];
    memcpy(folded, lanes, sizeof folded);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) folded[lane] += folded[lane + width];
    return folded[0];
}

/* By what doubles must be multiplied so that their squares neither overflow nor vanish; 1 for nearly every tensor. */
static double rescue_scale(const Kind *kind, const Tally *total, double squares) {
    if (kind->width != TO_DOUBLE || kind->widen[0] || (total->min == 0 && total->max == 0)) return 1;
    if (squares == INFINITY) return HUGE_SCALE;
    return squares < TINY_SQUARES ? TINY_SCALE : 1;
}

typedef struct { /* also what summarize_many writes for each row */
    double max, min, mean, norm;
    int64_t nan, inf;
} Figures;

static Figures summarize_tensor(const Kind *kind, const void *bytes, int64_t elements) {
    const int64_t count = elements * kind->parts;
    Tally total;
    tally_tensor(kind, bytes, (size_t)count, 1, &total);
    Figures figures = {NAN, NAN, NAN, NAN, total.nan, total.inf};
    const int64_t finite = count - total.nan - total.inf;
    if (count > total.nan) { /* adding zero makes -0.0 a plain zero: which of two zeros is found depends on the order */
        figures.max = total.max + 0.0;
        figures.min = total.min + 0.0;
    }
    if (!finite) return figures;
    const double sum = fold(total.sum), squares = fold(total.squares), scale = rescue_scale(kind, &total, squares);
    figures.mean = sum / (double)finite + 0.0;
    figures.norm = sqrt(squares);
    if (scale == 1) return figures;
    tally_tensor(kind, bytes, (size_t)count, scale, &total);
    figures.norm = sqrt(fold(total.squares)) / scale;
    if (sum - sum != 0) figures.mean = fold(total.sum) / (double)finite / scale + 0.0;
    return figures;
}

#if HAVE_X86
#define FLUSH_BITS 0x8040u /* of MXCSR: treat subnormal operands, and results, as zero */
static unsigned keep_subnormals(void) {
    const unsigned before = _mm_getcsr();
    if (before & FLUSH_BITS) _mm_setcsr(before & ~FLUSH_BITS);
    return before;
}
static void restore_subnormals(unsigned before) {
    if (before & FLUSH_BITS) _mm_setcsr(before);
}
#else
static unsigned keep_subnormals(void) { return 0; }
static void restore_subnormals(unsigned before) { (void)before; }
#endif

/* The same figures also where the program has subnormal numbers treated as zero. */
static Figures summarize_exactly(const Kind *kind, const void *bytes, int64_t elements) {
    const unsigned before = keep_subnormals();
    const Figures figures = summarize_tensor(kind, bytes, elements);
    restore_subnormals(before);
    return figures;
}

static void prepare_moments(int has_avx2) {
#if HAVE_X86
    if (has_avx2) {
        scan_floats = scan_float_rows_avx2;
        scan_doubles = scan_double_rows_avx2;
    }
#else
    (void)has_avx2;
#endif
}

#endif
