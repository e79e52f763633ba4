/* The loops over one piece of a pair: sums, errors and distances of arrays that stand in the first-level cache.
 *
 * Every loop takes a whole number of rows of LANES values, adds value i to lane i % LANES, and exists twice: plain C, and
 * AVX2 written out, four lanes at a time, because one loop over all lanes and all sums would need more registers than there
 * are. No fused multiply-add: it would round once where the twin rounds twice. `prepare_scans` must have run once.
 *
 * Loops over floats make differences, sums and quotients in double too; only the tests against the tolerances are made in
 * float, twice as fast: |d| <= t |a| with d and the product rounded to float.
 */

#ifndef TENSORPROBE_SCANS_H
#define TENSORPROBE_SCANS_H

#include <float.h>

#include "_moments.h"

enum { SQUARES_A, SQUARES_B, SQUARES_D, D_TIMES_SUM, ABS_D, SUM_D, SUMS };
typedef double Sums[SUMS][LANES];
typedef const double (*Given)[LANES]; /* sums that are read */
static const Sums no_sums;

#define TOLERANCES 4
static const double tolerances[TOLERANCES] = {1e-4, 1e-3, 5e-3, 1e-2};

typedef struct {
    double max_abs, max_rel; /* in and out: of all pieces so far */
    size_t max_abs_at;       /* out: its first place in the piece, if the piece has raised it */
    int64_t within[TOLERANCES], different;
} Errors;

typedef struct {
    uint64_t sum; /* in and out, as the two below */
    uint32_t max;
    int64_t over_1, over_4;
} WordDistances;

typedef struct {
    double sum[LANES], max; /* in and out, as the two below */
    int64_t over_1, over_4;
} UlpDistances;

/* The fold of _moments.h, without its loop of changing width: small pairs are many. */
static double fold_lanes(const double *lanes) {
    double eight[8], four[4];
    for (int lane = 0; lane < 8; lane++) eight[lane] = lanes[lane] + lanes[lane + 8];
    for (int lane = 0; lane < 4; lane++) four[lane] = eight[lane] + eight[lane + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

#define IS_FINITE(value) ((value) - (value) == 0)

static int squares_finite(Given sums) {
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sums[SQUARES_A][lane] + sums[SQUARES_B][lane];
    return IS_FINITE(total);
}

/* `to` is `from` and the products; returns whether the sums of squares are finite. `d` is not looked at for floats. */
#define ADD_PRODUCTS(name, value_type, difference_at)                                                                 \
    static int name(const value_type *a, const value_type *b, const double *d, size_t n, Given from, Sums to) {       \
        (void)d;                                                                                                      \
        memcpy(to, from, sizeof(Sums));                                                                               \
        for (size_t i = 0; i < n; i++) {                                                                              \
            const double x = a[i], y = b[i], difference = difference_at;                                              \
            const size_t lane = i % LANES;                                                                            \
            to[SQUARES_A][lane] += x * x;                                                                             \
            to[SQUARES_B][lane] += y * y;                                                                             \
            to[SQUARES_D][lane] += difference * difference;                                                           \
            to[D_TIMES_SUM][lane] += difference * (x + y);                                                            \
            to[ABS_D][lane] += fabs(difference);                                                                      \
            to[SUM_D][lane] += difference;                                                                            \
        }                                                                                                             \
        return squares_finite((Given)to);                                                                             \
    }

/* The same where both sides are equal. A sum that is not zero then is made here too; the others keep what `from` has. */
#define ADD_SQUARES(name, value_type)                                                                                 \
    static int name(const value_type *a, size_t n, Given from, Sums to) {                                             \
        memcpy(to, from, sizeof(Sums));                                                                               \
        for (size_t i = 0; i < n; i++) {                                                                              \
            const double square = (double)a[i] * (double)a[i];                                                        \
            to[SQUARES_A][i % LANES] += square;                                                                       \
            to[SQUARES_B][i % LANES] += square;                                                                       \
        }                                                                                                             \
        return squares_finite((Given)to);                                                                             \
    }

ADD_PRODUCTS(add_float_products, float, y - x)
ADD_PRODUCTS(add_double_products, double, d[i])
ADD_SQUARES(add_float_squares, float)
ADD_SQUARES(add_double_squares, double)

/* A quotient is made only where it can be a new maximum. The product that tells is rounded, but never past the error. */
static inline void note_error(double size, double error, size_t i, Errors *errors) {
    if (error > errors->max_abs) errors->max_abs = error, errors->max_abs_at = i;
    errors->different += error != 0;
    if (error != 0 && size != 0 && error >= errors->max_rel * size && error / size > errors->max_rel)
        errors->max_rel = error / size;
}

static void measure_float_errors(const float *a, const float *b, size_t n, Errors *errors) {
    for (size_t i = 0; i < n; i++) {
        const float size = fabsf(a[i]), error = fabsf(b[i] - a[i]);
        for (int k = 0; k < TOLERANCES; k++) errors->within[k] += error <= (float)tolerances[k] * size;
        note_error(size, fabs((double)b[i] - (double)a[i]), i, errors);
    }
}

static void measure_double_errors(const double *a, const double *d, size_t n, Errors *errors) {
    for (size_t i = 0; i < n; i++) {
        const double size = fabs(a[i]), error = fabs(d[i]);
        for (int k = 0; k < TOLERANCES; k++) errors->within[k] += error <= tolerances[k] * size;
        note_error(size, error, i, errors);
    }
}

/* Distances of sign-and-magnitude words, in units of 1 << shift. */
static void add_words(const uint32_t *a, const uint32_t *b, size_t n, int shift, WordDistances *words) {
    for (size_t i = 0; i < n; i++) {
        const int64_t p = a[i] & 0x7fffffffu, q = b[i] & 0x7fffffffu;
        const int64_t difference = (a[i] >> 31 ? -p : p) - (b[i] >> 31 ? -q : q);
        const uint32_t distance = (uint32_t)(difference < 0 ? -difference : difference);
        words->sum += distance;
        if (distance > words->max) words->max = distance;
        words->over_1 += distance > UINT32_C(1) << shift;
        words->over_4 += distance > UINT32_C(4) << shift;
    }
}

static void add_ulps(const double *ulps, size_t n, UlpDistances *distances) {
    for (size_t i = 0; i < n; i++) {
        distances->sum[i % LANES] += ulps[i];
        if (ulps[i] > distances->max) distances->max = ulps[i];
        distances->over_1 += ulps[i] > 1;
        distances->over_4 += ulps[i] > 4;
    }
}

#if HAVE_X86
AVX2 static inline double greatest_of(__m256d values) {
    double lanes[4], greatest;
    _mm256_storeu_pd(lanes, values);
    greatest = lanes[0];
    for (int k = 1; k < 4; k++) greatest = lanes[k] > greatest ? lanes[k] : greatest;
    return greatest;
}

AVX2 static inline int64_t sum_of(__m256i counts) {
    int64_t lanes[4];
    _mm256_storeu_si256((__m256i *)(void *)lanes, counts);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

AVX2 static inline int all_finite(__m256d total) {
    const __m256d zero = _mm256_sub_pd(total, total);
    return _mm256_movemask_pd(_mm256_cmp_pd(zero, _mm256_setzero_pd(), _CMP_EQ_OQ)) == 15;
}

AVX2 static inline __m256d magnitude(__m256d value) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), value); }

AVX2 static inline int64_t sum_of_words(__m256i counts) {
    const __m256i low = _mm256_set1_epi64x(0xffffffff);
    return sum_of(_mm256_add_epi64(_mm256_and_si256(counts, low), _mm256_srli_epi64(counts, 32)));
}

/* A comparison gives -1 where it holds. */
AVX2 static inline __m256i count(__m256i counts, __m256d holds) {
    return _mm256_sub_epi64(counts, _mm256_castpd_si256(holds));
}

AVX2 static inline __m256i count_words(__m256i counts, __m256 holds) {
    return _mm256_sub_epi32(counts, _mm256_castps_si256(holds));
}

/* The greatest float that is not above the value, which is not negative. */
static inline float float_below(double value) {
    const float nearest = value > FLT_MAX ? FLT_MAX : (float)value;
    uint32_t bits;
    memcpy(&bits, &nearest, sizeof bits);
    return float_of_bits(nearest > value ? bits - 1 : bits);
}

/* The exact quotients of eight floats; the maximum of each of four is enough. */
AVX2 static void raise_quotient(const float *a, const float *b, Errors *errors) {
    __m256d max_rel = _mm256_set1_pd(errors->max_rel);
    for (int k = 0; k < 8; k += 4) {
        const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(a + k)), y = _mm256_cvtps_pd(_mm_loadu_ps(b + k));
        const __m256d quotient = _mm256_div_pd(magnitude(_mm256_sub_pd(y, x)), magnitude(x));
        const __m256d divisible = _mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_NEQ_OQ);
        max_rel = _mm256_max_pd(max_rel, _mm256_and_pd(divisible, quotient));
    }
    errors->max_rel = greatest_of(max_rel);
}

/* The exact greatest error of a piece, if it is above that of the pieces before. */
AVX2 static void raise_error(const float *a, const float *b, size_t n, Errors *errors) {
    __m256d max = _mm256_setzero_pd();
    for (size_t i = 0; i < n; i += 4) {
        const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(a + i)), y = _mm256_cvtps_pd(_mm_loadu_ps(b + i));
        max = _mm256_max_pd(max, magnitude(_mm256_sub_pd(y, x)));
    }
    const double greatest = greatest_of(max);
    if (greatest <= errors->max_abs) return;
    errors->max_abs = greatest;
    errors->max_abs_at = 0;
    while (fabs((double)b[errors->max_abs_at] - (double)a[errors->max_abs_at]) != greatest) errors->max_abs_at++;
}

#define ADD_PRODUCTS_AVX2(name, value_type, load, difference_at)                                                      \
    AVX2 static int name(const value_type *a, const value_type *b, const double *d, size_t n, Given from, Sums to) {  \
        __m256d total = _mm256_setzero_pd();                                                                          \
        (void)d;                                                                                                      \
        for (int lane = 0; lane < LANES; lane += 4) {                                                                 \
            __m256d sum[SUMS];                                                                                        \
            for (int k = 0; k < SUMS; k++) sum[k] = _mm256_loadu_pd(from[k] + lane);                                  \
            for (size_t i = (size_t)lane; i < n; i += LANES) {                                                        \
                const __m256d x = load(a + i), y = load(b + i), difference = difference_at;                           \
                sum[SQUARES_A] = _mm256_add_pd(sum[SQUARES_A], _mm256_mul_pd(x, x));                                  \
                sum[SQUARES_B] = _mm256_add_pd(sum[SQUARES_B], _mm256_mul_pd(y, y));                                  \
                sum[SQUARES_D] = _mm256_add_pd(sum[SQUARES_D], _mm256_mul_pd(difference, difference));                \
                sum[D_TIMES_SUM] = _mm256_add_pd(sum[D_TIMES_SUM], _mm256_mul_pd(difference, _mm256_add_pd(x, y)));   \
                sum[ABS_D] = _mm256_add_pd(sum[ABS_D], magnitude(difference));                                        \
                sum[SUM_D] = _mm256_add_pd(sum[SUM_D], difference);                                                   \
            }                                                                                                         \
            for (int k = 0; k < SUMS; k++) _mm256_storeu_pd(to[k] + lane, sum[k]);                                    \
            total = _mm256_add_pd(total, _mm256_add_pd(sum[SQUARES_A], sum[SQUARES_B]));                              \
        }                                                                                                             \
        return all_finite(total);                                                                                     \
    }

#define ADD_SQUARES_AVX2(name, value_type, load)                                                                      \
    AVX2 static int name(const value_type *a, size_t n, Given from, Sums to) {                                        \
        __m256d total = _mm256_setzero_pd(), left[4], right[4];                                                       \
        for (int k = 0; k < 4; k++) {                                                                                 \
            left[k] = _mm256_loadu_pd(from[SQUARES_A] + 4 * k);                                                       \
            right[k] = _mm256_loadu_pd(from[SQUARES_B] + 4 * k);                                                      \
        }                                                                                                             \
        for (size_t i = 0; i < n; i += LANES)                                                                         \
            for (int k = 0; k < 4; k++) {                                                                             \
                const __m256d x = load(a + i + 4 * k), square = _mm256_mul_pd(x, x);                                  \
                left[k] = _mm256_add_pd(left[k], square);                                                             \
                right[k] = _mm256_add_pd(right[k], square);                                                           \
            }                                                                                                         \
        for (int k = 0; k < 4; k++) {                                                                                 \
            _mm256_storeu_pd(to[SQUARES_A] + 4 * k, left[k]);                                                         \
            _mm256_storeu_pd(to[SQUARES_B] + 4 * k, right[k]);                                                        \
            for (int row = SQUARES_D; row < SUMS; row++)                                                              \
                _mm256_storeu_pd(to[row] + 4 * k, _mm256_loadu_pd(from[row] + 4 * k));                                \
            total = _mm256_add_pd(total, _mm256_add_pd(left[k], right[k]));                                           \
        }                                                                                                             \
        return all_finite(total);                                                                                     \
    }

AVX2 static inline __m256d four_floats(const float *x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
AVX2 static inline __m256d four_doubles(const double *x) { return _mm256_loadu_pd(x); }

ADD_PRODUCTS_AVX2(add_float_products_avx2, float, four_floats, _mm256_sub_pd(y, x))
ADD_PRODUCTS_AVX2(add_double_products_avx2, double, four_doubles, _mm256_loadu_pd(d + i))
ADD_SQUARES_AVX2(add_float_squares_avx2, float, four_floats)
ADD_SQUARES_AVX2(add_double_squares_avx2, double, four_doubles)

/* Greatest error and greatest quotient are looked for in float, rounded so that nothing greater can be missed; where one
 * may have been found, it is made in double. */
AVX2 static void measure_float_errors_avx2(const float *a, const float *b, size_t n, Errors *errors) {
    const __m256 zero = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    __m256 max = zero, max_rel = _mm256_set1_ps(float_below(errors->max_rel));
    __m256i within[TOLERANCES], different = _mm256_setzero_si256();
    for (int k = 0; k < TOLERANCES; k++) within[k] = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 8) {
        const __m256 x = _mm256_loadu_ps(a + i), size = _mm256_andnot_ps(sign, x);
        const __m256 error = _mm256_andnot_ps(sign, _mm256_sub_ps(_mm256_loadu_ps(b + i), x));
        const __m256 differs = _mm256_cmp_ps(error, zero, _CMP_NEQ_OQ);
        max = _mm256_max_ps(max, error);
        different = count_words(different, differs);
        for (int k = 0; k < TOLERANCES; k++) {
            const __m256 allowed = _mm256_mul_ps(_mm256_set1_ps((float)tolerances[k]), size);
            within[k] = count_words(within[k], _mm256_cmp_ps(error, allowed, _CMP_LE_OQ));
        }
        const __m256 reaches = _mm256_cmp_ps(error, _mm256_mul_ps(max_rel, size), _CMP_GE_OQ);
        if (_mm256_movemask_ps(_mm256_and_ps(differs, reaches))) {
            raise_quotient(a + i, b + i, errors);
            max_rel = _mm256_set1_ps(float_below(errors->max_rel));
        }
    }
    for (int k = 0; k < TOLERANCES; k++) errors->within[k] += sum_of_words(within[k]);
    errors->different += sum_of_words(different);
    float greatest[8], found = 0;
    _mm256_storeu_ps(greatest, max);
    for (int k = 0; k < 8; k++) found = greatest[k] > found ? greatest[k] : found;
    if (found != 0 && found >= (float)errors->max_abs) raise_error(a, b, n, errors);
}

AVX2 static void measure_double_errors_avx2(const double *a, const double *d, size_t n, Errors *errors) {
    const __m256d zero = _mm256_setzero_pd();
    __m256d max_abs = zero, max_rel = _mm256_set1_pd(errors->max_rel);
    __m256i within[TOLERANCES], different = _mm256_setzero_si256();
    for (int k = 0; k < TOLERANCES; k++) within[k] = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i += 4) {
        const __m256d size = magnitude(_mm256_loadu_pd(a + i)), error = magnitude(_mm256_loadu_pd(d + i));
        const __m256d differs = _mm256_cmp_pd(error, zero, _CMP_NEQ_OQ);
        max_abs = _mm256_max_pd(max_abs, error);
        different = count(different, differs);
        for (int k = 0; k < TOLERANCES; k++) {
            const __m256d allowed = _mm256_mul_pd(_mm256_set1_pd(tolerances[k]), size);
            within[k] = count(within[k], _mm256_cmp_pd(error, allowed, _CMP_LE_OQ));
        }
        const __m256d reaches = _mm256_cmp_pd(error, _mm256_mul_pd(max_rel, size), _CMP_GE_OQ);
        const __m256d candidate = _mm256_and_pd(differs, reaches);
        if (_mm256_movemask_pd(candidate)) {
            const __m256d divisible = _mm256_and_pd(candidate, _mm256_cmp_pd(size, zero, _CMP_NEQ_OQ));
            max_rel = _mm256_max_pd(max_rel, _mm256_and_pd(divisible, _mm256_div_pd(error, size)));
        }
    }
    errors->max_rel = greatest_of(max_rel);
    for (int k = 0; k < TOLERANCES; k++) errors->within[k] += sum_of(within[k]);
    errors->different += sum_of(different);
    const double greatest = greatest_of(max_abs);
    if (greatest <= errors->max_abs) return;
    errors->max_abs = greatest;
    for (errors->max_abs_at = 0; fabs(d[errors->max_abs_at]) != greatest;) errors->max_abs_at++;
}

AVX2 static inline __m256i signed_of_word(__m256i word) {
    return _mm256_sign_epi32(_mm256_and_si256(word, _mm256_set1_epi32(0x7fffffff)), word);
}

AVX2 static void add_words_avx2(const uint32_t *a, const uint32_t *b, size_t n, int shift, WordDistances *words) {
    const __m256i zero = _mm256_setzero_si256(), low = _mm256_set1_epi64x(0xffffffff);
    const __m256i two = _mm256_set1_epi32((1 << shift) + 1), five = _mm256_set1_epi32((4 << shift) + 1);
    __m256i sum[2] = {zero, zero}, max = zero, over_1 = zero, over_4 = zero;
    for (size_t i = 0; i < n; i += 8) {
        const __m256i p = signed_of_word(_mm256_loadu_si256((const __m256i *)(const void *)(a + i)));
        const __m256i q = signed_of_word(_mm256_loadu_si256((const __m256i *)(const void *)(b + i)));
        const __m256i distance = _mm256_sub_epi32(_mm256_max_epi32(p, q), _mm256_min_epi32(p, q));
        sum[0] = _mm256_add_epi64(sum[0], _mm256_and_si256(distance, low));
        sum[1] = _mm256_add_epi64(sum[1], _mm256_srli_epi64(distance, 32));
        max = _mm256_max_epu32(max, distance);
        over_1 = _mm256_sub_epi32(over_1, _mm256_cmpeq_epi32(_mm256_max_epu32(distance, two), distance));
        over_4 = _mm256_sub_epi32(over_4, _mm256_cmpeq_epi32(_mm256_max_epu32(distance, five), distance));
    }
    uint32_t greatest[8];
    _mm256_storeu_si256((__m256i *)(void *)greatest, max);
    for (int k = 0; k < 8; k++) words->max = greatest[k] > words->max ? greatest[k] : words->max;
    words->sum += (uint64_t)sum_of(_mm256_add_epi64(sum[0], sum[1]));
    words->over_1 += sum_of_words(over_1);
    words->over_4 += sum_of_words(over_4);
}

AVX2 static void add_ulps_avx2(const double *ulps, size_t n, UlpDistances *distances) {
    const __m256d one = _mm256_set1_pd(1), four = _mm256_set1_pd(4);
    __m256d sum[4], max = _mm256_setzero_pd();
    __m256i over_1 = _mm256_setzero_si256(), over_4 = _mm256_setzero_si256();
    for (int k = 0; k < 4; k++) sum[k] = _mm256_loadu_pd(distances->sum + 4 * k);
    for (size_t i = 0; i < n; i += LANES)
        for (int k = 0; k < 4; k++) {
            const __m256d values = _mm256_loadu_pd(ulps + i + 4 * k);
            sum[k] = _mm256_add_pd(sum[k], values);
            max = _mm256_max_pd(max, values);
            over_1 = count(over_1, _mm256_cmp_pd(values, one, _CMP_GT_OQ));
            over_4 = count(over_4, _mm256_cmp_pd(values, four, _CMP_GT_OQ));
        }
    for (int k = 0; k < 4; k++) _mm256_storeu_pd(distances->sum + 4 * k, sum[k]);
    const double greatest = greatest_of(max);
    if (greatest > distances->max) distances->max = greatest;
    distances->over_1 += sum_of(over_1);
    distances->over_4 += sum_of(over_4);
}
#endif

static struct { /* the loops in use */
    int (*float_products)(const float *, const float *, const double *, size_t, Given, Sums);
    int (*double_products)(const double *, const double *, const double *, size_t, Given, Sums);
    int (*float_squares)(const float *, size_t, Given, Sums);
    int (*double_squares)(const double *, size_t, Given, Sums);
    void (*float_errors)(const float *, const float *, size_t, Errors *);
    void (*double_errors)(const double *, const double *, size_t, Errors *);
    void (*words)(const uint32_t *, const uint32_t *, size_t, int, WordDistances *);
    void (*ulps)(const double *, size_t, UlpDistances *);
} scan = {add_float_products,   add_double_products,   add_float_squares, add_double_squares,
          measure_float_errors, measure_double_errors, add_words,         add_ulps};

static void prepare_scans(int has_avx2) {
#if HAVE_X86
    if (has_avx2) {
        scan.float_products = add_float_products_avx2;
        scan.double_products = add_double_products_avx2;
        scan.float_squares = add_float_squares_avx2;
        scan.double_squares = add_double_squares_avx2;
        scan.float_errors = measure_float_errors_avx2;
        scan.double_errors = measure_double_errors_avx2;
        scan.words = add_words_avx2;
        scan.ulps = add_ulps_avx2;
    }
#else
    (void)has_avx2;
#endif
}

#endif
