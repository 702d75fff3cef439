/* Products of rows of numbers with weights in panels: tile[rows][PANEL].

   With floats, the products of one output are added in the order of the inputs, with the float32 number that a weight
   stands for. With quantised weights, each 32 numbers of a row are rounded to integers of 16 bits that share a scale. The
   products of a group of inputs are summed as integers, which loses nothing, and such sums are added in the order of the
   groups. So an output's bits depend neither on the number of rows nor on the processor's instructions for integers. */

#include "panels.h"

#define UNROLLED _Pragma("GCC unroll 8")
#define DEEP 256 /* inputs multiplied before the next rows: their weights stay in the cache */
#define LARGEST 32512 /* of the rounded numbers: 127 * 256 */

#ifdef __AVX512F__
#define SUMS 16 /* vectors of sums that fit into registers */
#define ROWS 4  /* rows multiplied at once: with all vectors of a panel, whose weights are widened once */
#define EACH_ROW_COUNT(DO, form) DO(form, 1) DO(form, 2) DO(form, 3) DO(form, 4)
#define INTEGER_SUMS 8 /* the same for rounded rows, which have two sums for each vector */
#define INTEGER_ROWS 4
#define INTEGER_UNROLLED UNROLLED /* elsewhere it only takes the compiler longer */
#define EACH_INTEGER_ROW_COUNT EACH_ROW_COUNT
#define KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define SUMS 6
#define ROWS 8
#define EACH_ROW_COUNT(DO, form) \
    DO(form, 1) DO(form, 2) DO(form, 3) DO(form, 4) DO(form, 5) DO(form, 6) DO(form, 7) DO(form, 8)
#define INTEGER_SUMS 2
#define INTEGER_ROWS 2
#define INTEGER_UNROLLED
#define EACH_INTEGER_ROW_COUNT(DO, form) DO(form, 1) DO(form, 2)
#define KEEP_IN_REGISTER(x) (void)(x)
#endif

/* rounded rows */

#define ROUNDED 32 /* numbers that share a scale */

/* Numbers of a row: for each four of them, two words that `add_products` takes. */
typedef struct {
    int32_t first[ROUNDED / QUAD], second[ROUNDED / QUAD];
    float scale, sum;  /* sum: of the numbers that the integers stand for */
    int32_t totals[2]; /* of the integers of each half */
} rounded_group;

ALWAYS int64_t rounded_groups(int64_t inputs) { return (inputs + ROUNDED - 1) / ROUNDED; }

/* Integers of 16 bits are divided into bytes, the upper ones first, or into those with even and odd numbers. */
ALWAYS void divide(ints x, int32_t *first, int32_t *second) {
#ifdef HAS_BYTE_PRODUCTS
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    ints lower = (ints)((words)x << 24) >> 24;
    bytes upper_bytes = __builtin_convertvector((x - lower) >> 8, bytes);
    bytes lower_bytes = __builtin_convertvector(lower, bytes);
    memcpy(first, &upper_bytes, sizeof upper_bytes), memcpy(second, &lower_bytes, sizeof lower_bytes);
#else
    for (int n = 0; n < LANES / QUAD; n++) {
        first[n] = (int32_t)((uint32_t)x[QUAD * n + 2] << 16 | (uint16_t)x[QUAD * n]);
        second[n] = (int32_t)((uint32_t)x[QUAD * n + 3] << 16 | (uint16_t)x[QUAD * n + 1]);
    }
#endif
}

/* The 32 numbers of x as integers. The scale is NaN where one of them is no finite number. */
static void round_group(const float *x, rounded_group *to) {
    vec each[2] = {load(x), load(x + LANES)};
    const vec zeros = each[0] * 0.0f + each[1] * 0.0f; /* or NaN */
    for (int half = 0; half < 2; half++) each[half] = either(zeros == zeros, each[half], all(0));
    float most = largest(larger(larger(each[0], -each[0]), larger(each[1], -each[1])));
    float factor = most > 1e-30f ? LARGEST / most : 0.0f;
    const float magic = 12582912.0f; /* added and taken off again, it rounds */
    to->scale = most / LARGEST + sum(zeros);
    for (int half = 0; half < 2; half++) {
        ints integers = __builtin_convertvector((each[half] * factor + magic) - magic, ints);
        divide(integers, to->first + half * LANES / QUAD, to->second + half * LANES / QUAD);
        to->totals[half] = 0;
        for (int i = 0; i < LANES; i++) to->totals[half] += integers[i];
    }
    to->sum = to->scale * (float)(to->totals[0] + to->totals[1]);
}

static void round_row(const float *x, int64_t inputs, rounded_group *to) {
    for (int64_t i = 0; i < inputs; i += ROUNDED) round_group(x + i, to++);
}

/* products of floats */

/* `rows` rows of x times `wide` vectors of a panel of floats, from the vector `first` on, onto tile[rows][PANEL]. */
ALWAYS void multiply_floats(int dtype, int rows, int wide, const char *weights, int64_t in, int first, const float *x,
                            int64_t apart, float *tile) {
    const int64_t row_bytes = PANEL * LAYOUTS[dtype].bits / 8;
    vec sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) sums[r][k] = load(tile + r * PANEL + (first + k) * LANES);
    for (int64_t i = 0; i < in; i++) {
        vec column[WIDE];
        const char *row = weights + i * row_bytes;
        fetch(row + AHEAD, wide * row_bytes / WIDE);
        for (int k = 0; k < wide; k++) {
            column[k] = widened(dtype, row, first + k);
            if (dtype == FLOAT32) KEEP_IN_REGISTER(column[k]);
        }
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < wide; k++) sums[r][k] += column[k] * x[r * apart + i];
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) store(tile + r * PANEL + (first + k) * LANES, sums[r][k]);
}

/* Some rows of x times `in` inputs of a panel of floats, onto the tile. */
typedef void float_product(const char *weights, int64_t in, const float *x, int64_t apart, float *tile);

/* A function for each form of weights and number of rows: compilers take much longer for one large function. */
#define FLOAT_PRODUCT(form, rows) \
    static void multiply_##form##_##rows(const char *weights, int64_t in, const float *x, int64_t apart, float *tile) { \
        const int wide = rows * WIDE <= SUMS ? WIDE : rows * 2 <= SUMS ? 2 : 1; \
        for (int first = 0; first < WIDE; first += wide) \
            multiply_floats(form, rows, wide, weights, in, first, x, apart, tile); \
    }
EACH_ROW_COUNT(FLOAT_PRODUCT, FLOAT32)
EACH_ROW_COUNT(FLOAT_PRODUCT, BFLOAT16)
EACH_ROW_COUNT(FLOAT_PRODUCT, FLOAT16)

#define ENTRY(form, rows) [rows] = multiply_##form##_##rows,
static float_product *const FLOAT_PRODUCTS[FLOAT16 + 1][ROWS + 1] = {
    [FLOAT32] = {EACH_ROW_COUNT(ENTRY, FLOAT32)},
    [BFLOAT16] = {EACH_ROW_COUNT(ENTRY, BFLOAT16)},
    [FLOAT16] = {EACH_ROW_COUNT(ENTRY, FLOAT16)},
};

/* products of integers */

/* Bytes of weights as `add_products` takes them, and sums of products, whose meaning is that of `total`. */
typedef struct {
    words even, odd;
} quad;
typedef struct {
    ints first, second;
} integer_sums;

#ifdef HAS_BYTE_PRODUCTS
ALWAYS quad split(words bytes) { return (quad){bytes, bytes}; }
ALWAYS ints total(integer_sums of) { return (ints)((words)of.first << 8) + of.second; }
#else
ALWAYS quad split(words bytes) { return (quad){bytes & 0x00ff00ffu, bytes >> 8 & 0x00ff00ffu}; }
ALWAYS ints total(integer_sums of) { return of.first + of.second; }
#endif

ALWAYS void add_products(quad weights, ints first, ints second, integer_sums *to) {
    to->first = products_added(to->first, weights.even, first);
    to->second = products_added(to->second, weights.odd, second);
}

/* `rows` rounded rows times `wide` vectors of a panel, from the block on and from the vector `start` on, onto
   tile[rows][PANEL]. Fetches what lies so many bytes ahead, unless that is 0. */
ALWAYS void multiply_integers(int64_t dtype, int rows, int wide, const char *block, int64_t inputs, int start,
                              const rounded_group *x, int64_t apart, int64_t ahead, float *tile) {
    const int bits = LAYOUTS[dtype].bits, size = group_inputs(bits), part = PANEL * bits / WIDE;
    const int32_t zero = at_least(LAYOUTS[dtype].zero, 0);
    vec results[INTEGER_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) results[r][k] = load(tile + r * PANEL + (start + k) * LANES);
    for (const rounded_group *stop = x + inputs / ROUNDED; x < stop; block += block_bytes(dtype)) {
        const words *quants = quants_of(dtype, block);
        block_scale scales[WIDE];
        for (int k = 0; k < wide; k++) scales[k] = read_block_scale(dtype, block, start + k);
        for (int i = 0; i < LAYOUTS[dtype].inputs; i += size) {
            const int from = i % ROUNDED / QUAD, half = i % ROUNDED / LANES;
            integer_sums sums[INTEGER_ROWS][WIDE];
            for (int r = 0; r < rows; r++) {
                const rounded_group *group = x + r * apart;
                int32_t totals = size == ROUNDED ? group->totals[0] + group->totals[1] : group->totals[half];
                for (int k = 0; k < wide; k++) sums[r][k] = (integer_sums){(ints){0}, all_ints(-zero * totals)};
            }
            UNROLLED for (int n = 0; n < size / QUAD; n++) {
                if (n % 2 == 0 && ahead) fetch((const char *)quants + ahead + start * part, wide * part);
                quad weights[WIDE];
                for (int k = 0; k < wide; k++) weights[k] = split(quad_of(bits, quants, n % 2, start + k));
                for (int r = 0; r < rows; r++) {
                    const ints first = all_ints(x[r * apart].first[from + n]);
                    const ints second = all_ints(x[r * apart].second[from + n]);
                    for (int k = 0; k < wide; k++) add_products(weights[k], first, second, &sums[r][k]);
                }
                quants += n % 2 * bits;
            }
            for (int k = 0; k < wide; k++) {
                vec scale, offset;
                group_scale(dtype, block, scales[k], i / size, start + k, &scale, &offset);
                for (int r = 0; r < rows; r++) {
                    results[r][k] += __builtin_convertvector(total(sums[r][k]), vec) * (scale * x[r * apart].scale);
                    if (LAYOUTS[dtype].zero < 0) results[r][k] += offset * x[r * apart].sum;
                }
            }
            if ((i + size) % ROUNDED == 0) x++;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) store(tile + r * PANEL + (start + k) * LANES, results[r][k]);
}

/* Some rounded rows times the blocks of `in` inputs of a panel, onto the tile. `fetches`: what comes behind them. */
typedef void integer_product(const char *block, int64_t in, const rounded_group *x, int64_t apart, int fetches, float *tile);

#define INTEGER_PRODUCT(form, rows) \
    static void multiply_##form##_##rows(const char *block, int64_t in, const rounded_group *x, int64_t apart, int fetches, \
                                         float *tile) { \
        const int wide = rows * WIDE <= INTEGER_SUMS ? WIDE : rows * 2 <= INTEGER_SUMS ? 2 : 1; \
        const int64_t ahead = fetches ? panel_bytes(form, DEEP) : 0; \
        INTEGER_UNROLLED for (int start = 0; start < WIDE; start += wide) \
            multiply_integers(form, rows, wide, block, in, start, x, apart, ahead, tile); \
    }
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q8_0)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q4_0)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q4_1)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q5_0)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q5_1)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q4_K)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q5_K)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, Q6_K)
EACH_INTEGER_ROW_COUNT(INTEGER_PRODUCT, MXFP4)

static integer_product *const INTEGER_PRODUCTS[DTYPES][INTEGER_ROWS + 1] = {
    [Q8_0] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q8_0)}, [Q4_0] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q4_0)},
    [Q4_1] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q4_1)}, [Q5_0] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q5_0)},
    [Q5_1] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q5_1)}, [Q4_K] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q4_K)},
    [Q5_K] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q5_K)}, [Q6_K] = {EACH_INTEGER_ROW_COUNT(ENTRY, Q6_K)},
    [MXFP4] = {EACH_INTEGER_ROW_COUNT(ENTRY, MXFP4)},
};

/* Rows that are multiplied: as they are, and rounded where any of the matrices is quantised. */
typedef struct {
    const float *floats;
    int64_t apart;
    const rounded_group *integers; /* rounded_groups(inputs) of each row */
} row_numbers;

/* x times a panel: tile[rows][PANEL]. Many rows are multiplied with some inputs after the other. */
static void multiply_panel(const matrix *by, int64_t panel, int64_t rows, const row_numbers *x, float *tile) {
    const int integers = is_quantised(by->dtype);
    const int64_t at_once = integers ? INTEGER_ROWS : ROWS, groups = rounded_groups(by->inputs);
    const int64_t deep = rows > (integers ? INTEGER_SUMS / WIDE : ROWS) ? DEEP : by->inputs;
    for (int64_t k = 0; k < rows * PANEL; k += LANES) store(tile + k, all(0));
    for (int64_t from = 0; from < by->inputs; from += deep) {
        const char *weights = panel_of(by, panel) + panel_bytes(by->dtype, from);
        const int64_t in = at_most(by->inputs - from, deep);
        for (int64_t r = 0; r < rows; r += at_once) {
            const int64_t count = at_most(rows - r, at_once);
            if (integers)
                INTEGER_PRODUCTS[by->dtype][count](weights, in, x->integers + r * groups + from / ROUNDED, groups, !r,
                                                   tile + r * PANEL);
            else
                FLOAT_PRODUCTS[by->dtype][count](weights, in, x->floats + r * x->apart + from, x->apart,
                                                 tile + r * PANEL);
        }
    }
}
