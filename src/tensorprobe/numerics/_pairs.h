/* The figures of a pair of tensors, baseline `a` and candidate `b`, in one pass: PairFigures.
 *
 * d = b - a, in double, of the values that are finite on both sides; all figures but the counts of NaN and infinity are of
 * those. A difference too great for a double is given as the greatest double. Complex numbers are taken as their parts; a
 * real tensor beside a complex one has imaginary parts of zero. How distances (ULP) are defined stands in _distance.h.
 *
 * The order of summation is that of _moments.h, so that twin_pairs.py gives the same bits: lanes within a block of 2048
 * values, the lanes of the blocks in order, the lanes folded at the end; distances are folded for each block. A block is
 * worked off in pieces of PIECE values, which stand in the first-level cache for all the loops of _scans.h, as floats or as
 * doubles; that changes nothing in the order. The loops know nothing of NaN and infinity: both show in the sums of squares, and then the
 * piece is made again with zeros in their place. Of a piece whose bytes are equal only the squares are made.
 */

#ifndef TENSORPROBE_PAIRS_H
#define TENSORPROBE_PAIRS_H

#include "_distance.h"
#include "_scans.h"

#define PIECE 512
#define TINY_PAIR 0x1p-600 /* below it, squares of differences of doubles may be lost to underflow */

typedef struct { /* what measure_pairs writes for each row; tensorprobe/numerics/pairs.py names the fields in this order */
    double sums[SUMS], max_abs, max_rel, ulp_max, ulp_sum;
    double scale; /* by which the values were multiplied before the sums: a power of two, 1 for nearly every pair */
    int64_t max_abs_index, finite, different, within[TOLERANCES], ulp_over_1, ulp_over_4;
    int64_t nonfinite_different, nonfinite_index, nan_a, nan_b, inf_a, inf_b, bit_identical;
} PairFigures;

typedef enum { BY_WORDS, BY_ORDINALS, BY_DIFFERENCE } UlpWay;

typedef struct { /* a pair, and how it is to be measured */
    Side a, b;
    size_t parts, values;
    UlpWay way;        /* BY_WORDS: all loops are over floats; else they are over doubles */
    int whole_numbers; /* differences must be made of integers, not of doubles */
    int word_shift;
    Ruler ruler;
} Pair;

typedef struct { /* a piece of a pair; rows are filled up with zeros */
    size_t start, n, padded;
    const float *floats_a, *floats_b; /* in the tensor itself where that will do, else in the room below */
    const uint32_t *words_a, *words_b;
    float float_room[2][PIECE];
    uint32_t word_room[2][PIECE];
    double a[PIECE], b[PIECE], d[PIECE], ulps[PIECE];
    Scratch scratch;
} Piece;

typedef struct {
    Given total, block; /* of the blocks so far, of the block so far: in the room below, or no_sums */
    Sums total_room, block_room[2];
    Errors errors;
    WordDistances words; /* its sum is that of the block */
    UlpDistances ulps;   /* likewise */
    PairFigures figures;
} Gauge;

/* Where the next sums of the block may be written: those before are still needed if the new ones turn out to be spoiled. */
static double (*other_sums(Gauge *gauge))[LANES] {
    return gauge->block_room[gauge->block == (Given)gauge->block_room[0]];
}

static Pair pair_of(const int64_t *row) {
    const Side a = {(const unsigned char *)(intptr_t)row[0], (int)row[3]};
    const Side b = {(const unsigned char *)(intptr_t)row[1], (int)row[4]};
    Pair pair = {a, b, 0, 0, BY_ORDINALS, 0, 0, {0, 0, 0, 0}};
    const Kind *kind_a = &kinds[pair.a.code], *kind_b = &kinds[pair.b.code];
    const Format *p = &formats[pair.a.code], *q = &formats[pair.b.code], *coarse;
    pair.parts = kind_a->parts > kind_b->parts ? kind_a->parts : kind_b->parts;
    pair.values = (size_t)row[2] * pair.parts;
    if (p->mantissa_bits == INTEGRAL || q->mantissa_bits == INTEGRAL)
        coarse = p->mantissa_bits == INTEGRAL ? q : p;
    else if (p->mantissa_bits != q->mantissa_bits)
        coarse = p->mantissa_bits < q->mantissa_bits ? p : q;
    else
        coarse = p->least_exponent > q->least_exponent ? p : q;
    if (coarse->mantissa_bits == INTEGRAL) {
        pair.way = BY_DIFFERENCE;
        pair.whole_numbers = kind_a->value_size == 8 || kind_b->value_size == 8;
        return pair;
    }
    const int one_format = p->mantissa_bits == q->mantissa_bits && p->least_exponent == q->least_exponent;
    const int float32_words = p->least_exponent == -126 && q->least_exponent == -126;
    pair.word_shift = coarse->word_shift;
    if ((one_format || float32_words) && coarse->word_shift >= 0 && kind_a->parts == kind_b->parts) pair.way = BY_WORDS;
    pair.ruler = ruler_of(coarse);
    return pair;
}

/* Where the first value of the piece is stored. */
static const unsigned char *bytes_of(const Pair *pair, Side side, const Piece *piece) {
    const Kind *kind = &kinds[side.code];
    return side.bytes + piece->start / pair->parts * kind->parts * kind->value_size;
}

#define WIDEN_FLOATS(attributes, name)                                                                                 \
    attributes static void name(const float *restrict floats, size_t n, double *restrict doubles) {                   \
        for (size_t i = 0; i < n; i++) doubles[i] = floats[i];                                                        \
    }

#define SUBTRACT(attributes, name)                                                                                     \
    attributes static void name(const double *restrict a, const double *restrict b, size_t n, double *restrict d) {   \
        for (size_t i = 0; i < n; i++) {                                                                              \
            double difference = b[i] - a[i];                                                                          \
            difference = difference > DBL_MAX ? DBL_MAX : difference;                                                 \
            d[i] = difference < -DBL_MAX ? -DBL_MAX : difference;                                                     \
        }                                                                                                             \
    }

WIDEN_FLOATS(, widen_floats)
SUBTRACT(, subtract)
#if HAVE_X86
WIDEN_FLOATS(AVX2, widen_floats_avx2)
SUBTRACT(AVX2, subtract_avx2)
#define IN_USE(name) (vector_code ? name##_avx2 : name)
#else
#define IN_USE(name) name
#endif

/* One side (0 is the baseline) as floats, and as words: float32 is left where it is. */
static void load_floats(const Pair *pair, int number, Piece *piece) {
    const Side side = number ? pair->b : pair->a;
    const Kind *kind = &kinds[side.code];
    const void *stored = bytes_of(pair, side, piece);
    const int aligned = (uintptr_t)stored % kind->value_size == 0, whole = piece->n == piece->padded;
    const float *floats = stored;
    if (!aligned) stored = memcpy(&piece->scratch.stored, stored, piece->n * kind->value_size);
    if (kind->widen[0] || !aligned || !whole) {
        float *room = piece->float_room[number];
        if (kind->widen[0])
            kind->widen[vector_code](stored, room, piece->n);
        else
            memcpy(room, stored, piece->n * sizeof *room);
        for (size_t i = piece->n; i < piece->padded; i++) room[i] = 0;
        floats = room;
    }
    const uint32_t *words = (const uint32_t *)(const void *)floats;
    if (formats[side.code].least_exponent != -126) {
        uint32_t *room = piece->word_room[number];
        make_words(&formats[side.code], stored, room, piece->n);
        for (size_t i = piece->n; i < piece->padded; i++) room[i] = 0;
        words = room;
    }
    *(number ? &piece->floats_b : &piece->floats_a) = floats;
    *(number ? &piece->words_b : &piece->words_a) = words;
}

static void load_doubles(const Pair *pair, Side side, Piece *piece, double *values) {
    const Kind *kind = &kinds[side.code];
    const size_t stored = piece->n / pair->parts * kind->parts;
    const void *wide = widened(kind, bytes_of(pair, side, piece), stored, &piece->scratch);
    if (kind->width == TO_FLOAT)
        IN_USE(widen_floats)(wide, stored, values);
    else
        memcpy(values, wide, stored * sizeof *values);
    if (stored < piece->n)
        for (size_t i = stored; i--;) values[2 * i] = values[i], values[2 * i + 1] = 0;
    for (size_t i = piece->n; i < piece->padded; i++) values[i] = 0;
}

static void load_difference(const Pair *pair, Piece *piece) {
    if (!pair->whole_numbers) {
        IN_USE(subtract)(piece->a, piece->b, piece->padded, piece->d);
        return;
    }
    const Side a = {bytes_of(pair, pair->a, piece), pair->a.code}, b = {bytes_of(pair, pair->b, piece), pair->b.code};
    subtract_integers(a, b, piece->n, piece->d);
    for (size_t i = piece->n; i < piece->padded; i++) piece->d[i] = 0;
}

/* Whether both are finite; if not, they are counted. */
static int note_values(const Pair *pair, double a, double b, size_t number, PairFigures *figures) {
    if (IS_FINITE(a) && IS_FINITE(b)) return 1;
    figures->nan_a += a != a;
    figures->nan_b += b != b;
    figures->inf_a += isinf(a) != 0;
    figures->inf_b += isinf(b) != 0;
    if (a != b && !(a != a && b != b)) {
        figures->nonfinite_different++;
        if (figures->nonfinite_index < 0) figures->nonfinite_index = (int64_t)(number / pair->parts);
    }
    return 0;
}

/* Zeros in the place of every value that is not finite on both sides; returns their number. */
static int64_t clean_floats_of(const Pair *pair, Piece *piece, PairFigures *figures) {
    const size_t nbytes = piece->padded * sizeof(float);
    int64_t dropped = 0;
    float *a = memmove(piece->float_room[0], piece->floats_a, nbytes);
    float *b = memmove(piece->float_room[1], piece->floats_b, nbytes);
    uint32_t *words_a = memmove(piece->word_room[0], piece->words_a, nbytes);
    uint32_t *words_b = memmove(piece->word_room[1], piece->words_b, nbytes);
    for (size_t i = 0; i < piece->n; i++) {
        if (note_values(pair, a[i], b[i], piece->start + i, figures)) continue;
        a[i] = b[i] = 0;
        words_a[i] = words_b[i] = 0;
        dropped++;
    }
    piece->floats_a = a, piece->floats_b = b;
    piece->words_a = words_a, piece->words_b = words_b;
    return dropped;
}

static int64_t clean_doubles_of(const Pair *pair, Piece *piece, PairFigures *figures) {
    int64_t dropped = 0;
    for (size_t i = 0; i < piece->n; i++) {
        if (note_values(pair, piece->a[i], piece->b[i], piece->start + i, figures)) continue;
        piece->a[i] = piece->b[i] = piece->d[i] = 0;
        dropped++;
    }
    return dropped;
}

/* Adds the piece to everything but the figures that are of all values; returns how many values were dropped. */
static int64_t measure_floats(const Pair *pair, Piece *piece, Gauge *gauge) {
    double (*to)[LANES] = other_sums(gauge);
    int64_t dropped = 0;
    load_floats(pair, 0, piece);
    load_floats(pair, 1, piece);
    if (!scan.float_products(piece->floats_a, piece->floats_b, NULL, piece->padded, gauge->block, to)) {
        dropped = clean_floats_of(pair, piece, &gauge->figures);
        scan.float_products(piece->floats_a, piece->floats_b, NULL, piece->padded, gauge->block, to);
    }
    gauge->block = (Given)to;
    scan.float_errors(piece->floats_a, piece->floats_b, piece->padded, &gauge->errors);
    scan.words(piece->words_a, piece->words_b, piece->padded, pair->word_shift, &gauge->words);
    return dropped;
}

static int64_t measure_doubles(const Pair *pair, Piece *piece, Gauge *gauge) {
    double (*to)[LANES] = other_sums(gauge);
    int64_t dropped = 0;
    load_doubles(pair, pair->a, piece, piece->a);
    load_doubles(pair, pair->b, piece, piece->b);
    load_difference(pair, piece);
    if (!scan.double_products(piece->a, piece->b, piece->d, piece->padded, gauge->block, to)) {
        dropped = clean_doubles_of(pair, piece, &gauge->figures);
        scan.double_products(piece->a, piece->b, piece->d, piece->padded, gauge->block, to);
    }
    gauge->block = (Given)to;
    scan.double_errors(piece->a, piece->d, piece->padded, &gauge->errors);
    if (pair->way == BY_ORDINALS)
        IN_USE(ulps_by_ordinal)(piece->a, piece->b, piece->padded, &pair->ruler, piece->ulps);
    else
        for (size_t i = 0; i < piece->padded; i++) piece->ulps[i] = fabs(piece->d[i]);
    scan.ulps(piece->ulps, piece->padded, &gauge->ulps);
    return dropped;
}

/* Whether the piece has equal bytes and nothing in it but finite values; then it is done. */
static int measure_equal(const Pair *pair, Piece *piece, Gauge *gauge) {
    if (pair->a.code != pair->b.code) return 0;
    const size_t size = piece->n * kinds[pair->a.code].value_size;
    if (memcmp(bytes_of(pair, pair->a, piece), bytes_of(pair, pair->b, piece), size)) {
        gauge->figures.bit_identical = 0;
        return 0;
    }
    double (*to)[LANES] = other_sums(gauge);
    int finite;
    if (pair->way == BY_WORDS) {
        load_floats(pair, 0, piece);
        finite = scan.float_squares(piece->floats_a, piece->padded, gauge->block, to);
    } else {
        load_doubles(pair, pair->a, piece, piece->a);
        finite = scan.double_squares(piece->a, piece->padded, gauge->block, to);
    }
    if (finite) gauge->block = (Given)to;
    return finite;
}

/* The loops find the piece after this one in the cache. */
static void fetch_ahead(const Pair *pair, const Piece *piece) {
#if HAVE_X86
    const size_t size_a = piece->n * kinds[pair->a.code].value_size, size_b = piece->n * kinds[pair->b.code].value_size;
    const char *a = (const char *)bytes_of(pair, pair->a, piece) + size_a;
    const char *b = (const char *)bytes_of(pair, pair->b, piece) + size_b;
    for (size_t i = 0; i < size_a; i += 64) _mm_prefetch(a + i, _MM_HINT_T0);
    for (size_t i = 0; i < size_b; i += 64) _mm_prefetch(b + i, _MM_HINT_T0);
#else
    (void)pair, (void)piece;
#endif
}

static void measure_piece(const Pair *pair, Piece *piece, Gauge *gauge) {
    const double max_abs = gauge->errors.max_abs;
    int64_t finite = (int64_t)piece->n, unreal;
    if (measure_equal(pair, piece, gauge)) {
        unreal = -finite;
    } else {
        const int64_t dropped = (pair->way == BY_WORDS ? measure_floats : measure_doubles)(pair, piece, gauge);
        finite -= dropped;
        unreal = dropped + (int64_t)(piece->padded - piece->n); /* in the loops, they counted as 0 against 0 */
    }
    gauge->figures.finite += finite;
    for (int k = 0; k < TOLERANCES; k++) gauge->errors.within[k] -= unreal;
    if (gauge->errors.max_abs > max_abs)
        gauge->figures.max_abs_index = (int64_t)((piece->start + gauge->errors.max_abs_at) / pair->parts);
}

/* The sums alone, of values multiplied by `scale`. */
static void sum_scaled(const Pair *pair, Piece *piece, double scale, Gauge *gauge) {
    PairFigures counted_before = gauge->figures;
    load_doubles(pair, pair->a, piece, piece->a);
    load_doubles(pair, pair->b, piece, piece->b);
    clean_doubles_of(pair, piece, &counted_before);
    for (size_t i = 0; i < piece->padded; i++) piece->a[i] *= scale, piece->b[i] *= scale;
    IN_USE(subtract)(piece->a, piece->b, piece->padded, piece->d);
    double (*to)[LANES] = other_sums(gauge);
    scan.double_products(piece->a, piece->b, piece->d, piece->padded, gauge->block, to);
    gauge->block = (Given)to;
}

static void end_block(const Pair *pair, Gauge *gauge) {
    for (int k = 0; k < SUMS; k++)
        for (int lane = 0; lane < LANES; lane++) gauge->total_room[k][lane] = gauge->total[k][lane] + gauge->block[k][lane];
    gauge->total = (Given)gauge->total_room;
    gauge->block = no_sums;
    if (pair->way == BY_WORDS) {
        gauge->figures.ulp_sum += (double)gauge->words.sum;
        gauge->words.sum = 0;
    } else {
        gauge->figures.ulp_sum += fold_lanes(gauge->ulps.sum);
        memset(gauge->ulps.sum, 0, sizeof gauge->ulps.sum);
    }
}

static void walk_pair(const Pair *pair, double scale, Gauge *gauge) {
    Piece piece;
    for (piece.start = 0; piece.start < pair->values; piece.start += PIECE) {
        const size_t left = pair->values - piece.start;
        piece.n = left < PIECE ? left : PIECE;
        piece.padded = (piece.n + LANES - 1) / LANES * LANES;
        if (left > PIECE) fetch_ahead(pair, &piece);
        if (scale == 1)
            measure_piece(pair, &piece, gauge);
        else
            sum_scaled(pair, &piece, scale, gauge);
        if (left <= PIECE || (piece.start + PIECE) % BLOCK == 0) end_block(pair, gauge);
    }
}

static void fold_sums(const Gauge *gauge, PairFigures *figures) {
    for (int sum = 0; sum < SUMS; sum++) figures->sums[sum] = fold_lanes(gauge->total[sum]);
}

/* By what the values must be multiplied so that no square overflows and none that matters vanishes. */
static double pair_scale(const Pair *pair, const PairFigures *figures) {
    if (formats[pair->a.code].mantissa_bits != 52 && formats[pair->b.code].mantissa_bits != 52) return 1;
    const double a = figures->sums[SQUARES_A], b = figures->sums[SQUARES_B];
    const double total = a + b + figures->sums[SQUARES_D] + fabs(figures->sums[D_TIMES_SUM]);
    if (total - total != 0) return HUGE_SCALE;
    return a < TINY_PAIR && b < TINY_PAIR ? TINY_SCALE : 1;
}

static PairFigures measure_pair(const int64_t *row) {
    const Pair pair = pair_of(row);
    Gauge gauge;
    memset(&gauge.errors, 0, sizeof gauge - offsetof(Gauge, errors));
    gauge.total = gauge.block = no_sums;
    gauge.figures.max_abs_index = gauge.figures.nonfinite_index = -1;
    gauge.figures.bit_identical = pair.a.code == pair.b.code;
    walk_pair(&pair, 1, &gauge);
    PairFigures figures = gauge.figures;
    figures.max_abs = gauge.errors.max_abs;
    figures.max_rel = gauge.errors.max_rel;
    figures.different = gauge.errors.different + figures.nonfinite_different;
    memcpy(figures.within, gauge.errors.within, sizeof figures.within);
    const double unit = ldexp(1, -pair.word_shift);
    figures.ulp_max = pair.way == BY_WORDS ? (double)gauge.words.max * unit : gauge.ulps.max;
    if (pair.way == BY_WORDS) figures.ulp_sum *= unit;
    figures.ulp_over_1 = gauge.words.over_1 + gauge.ulps.over_1;
    figures.ulp_over_4 = gauge.words.over_4 + gauge.ulps.over_4;
    figures.scale = 1;
    fold_sums(&gauge, &figures);
    const double scale = pair_scale(&pair, &figures);
    if (scale == 1 || !figures.finite) return figures;
    gauge.total = no_sums;
    walk_pair(&pair, scale, &gauge);
    fold_sums(&gauge, &figures);
    if (figures.sums[SQUARES_A] != 0 || figures.sums[SQUARES_B] != 0) figures.scale = scale; /* else there is nothing but zeros */
    return figures;
}

#endif
