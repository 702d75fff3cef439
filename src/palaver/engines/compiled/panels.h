/* Weights in panels of 64 outputs: how they are packed, and their products with rows of numbers.

   Every product takes the float32 number that a weight stands for, and adds the products of one output in the order of
   the inputs: all dtypes, numbers of rows and ways of computing give the bits that panels of float32 numbers give.

   Floats are stored as [input][64]. Two vectors of bfloat16 are interleaved: the first in the lower halves of 32-bit
   words, the second in the upper ones, so that a shift and a mask widen them.

   A block of quantised weights is stored as its scales, and then 64 * bits bytes for every eight inputs. A weight is
   scale * q + offset, of a number q >= 0: exact but for the rounding of the sum, which is ggml's. Four vectors of small
   numbers share 32-bit words, vector k has byte k. A byte has a number of 8 bits, or the lower 4 bits of the numbers of
   two inputs; upper bits follow, a bit or two of each input in a byte. Scales smaller than 16 bits are stored likewise. */

#include <string.h>

#include "vectors.h"

#define WIDE 4 /* vectors side by side in a panel */
#define PANEL (LANES * WIDE)
#define DEEP 256 /* inputs multiplied before the next rows: their weights stay in the cache */
#define SHALLOW 64 /* the same, for weights that are expanded to float32 before */
#define AHEAD 2048 /* bytes of weights fetched ahead; the processor itself stops at the end of a page */
#define OCTET 8    /* inputs whose quantised weights lie together */
#define MAX_BLOCK 256

#ifdef __AVX512F__
#define SUMS 16 /* vectors of sums that fit into registers */
#define ROWS 4  /* rows multiplied at once: with all vectors of a panel, whose weights are widened once */
#define EACH_ROW_COUNT EACH_QUANTISED_ROW_COUNT
#define QUANTISED_SUMS 16
#define KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define SUMS 6
#define ROWS 8
#define EACH_ROW_COUNT(DO, form) \
    EACH_QUANTISED_ROW_COUNT(DO, form) DO(form, 5) DO(form, 6) DO(form, 7) DO(form, 8)
#define QUANTISED_SUMS 4
#define KEEP_IN_REGISTER(x) (void)(x)
#endif
#define QUANTISED_ROWS 4
#define EXPANDED_ROWS 8 /* more rows than this are multiplied with weights that are expanded once */
#define EACH_QUANTISED_ROW_COUNT(DO, form) DO(form, 1) DO(form, 2) DO(form, 3) DO(form, 4)

enum dtype { FLOAT32, BFLOAT16, FLOAT16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, DTYPES };

typedef struct {
    int inputs, file_bytes; /* of a block of one output, as in a file */
    int bits;               /* of a weight in a panel */
    int scale_bytes;        /* of a block in a panel */
    int zero;               /* the q that stands for 0; -1 where blocks have offsets of their own */
} layout;

#define HALVES (2 * PANEL) /* bytes of a float16 number for each output */
static const layout LAYOUTS[DTYPES] = {
    [FLOAT32] = {1, 4, 32, 0, 0},
    [BFLOAT16] = {1, 2, 16, 0, 0},
    [FLOAT16] = {1, 2, 16, 0, 0},
    [Q8_0] = {32, 34, 8, HALVES, 128},
    [Q4_0] = {32, 18, 4, HALVES, 8},
    [Q4_1] = {32, 20, 4, 2 * HALVES, -1},
    [Q5_0] = {32, 22, 5, HALVES, 16},
    [Q5_1] = {32, 24, 5, 2 * HALVES, -1},
    [Q4_K] = {256, 144, 4, 2 * HALVES + 8 * 2 * PANEL, -1},
    [Q5_K] = {256, 176, 5, 2 * HALVES + 8 * 2 * PANEL, -1},
    [Q6_K] = {256, 210, 6, HALVES + 16 * PANEL, 32},
};

typedef struct {
    const void *weights;
    const float *bias; /* or NULL */
    int64_t inputs, outputs;
    int64_t dtype; /* of the weights */
} matrix;

ALWAYS int is_quantised(int64_t dtype) { return dtype > FLOAT16; }
ALWAYS int64_t panel_count(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

ALWAYS int64_t block_bytes(int64_t dtype) {
    return LAYOUTS[dtype].scale_bytes + LAYOUTS[dtype].inputs * PANEL * LAYOUTS[dtype].bits / 8;
}

ALWAYS int64_t panel_bytes(int64_t dtype, int64_t inputs) { return inputs / LAYOUTS[dtype].inputs * block_bytes(dtype); }

ALWAYS const char *panel_of(const matrix *by, int64_t panel) {
    return (const char *)by->weights + panel * panel_bytes(by->dtype, by->inputs);
}

/* weights as float32 */

/* The vector `k` of a panel's row of floats. */
ALWAYS vec widened(int dtype, const void *row, int k) {
    if (dtype == BFLOAT16) {
        words both = *(const words *)((const uint16_t *)row + k / 2 * 2 * LANES);
        return k % 2 ? (vec)(both & 0xffff0000u) : (vec)(both << 16);
    }
    if (dtype == FLOAT16) return widened_halves((const uint16_t *)row + k * LANES);
    return load((const float *)row + k * LANES);
}

/* The numbers of vector k in the words of an input: 256 to the k times them, but for the last vector. */
ALWAYS vec numbers(words all_four, int bits, int k) {
    const uint32_t mask = (1u << bits) - 1;
    if (k == WIDE - 1) return __builtin_convertvector((ints)(all_four >> 24 & mask), vec);
    return __builtin_convertvector((ints)(all_four & mask << 8 * k), vec);
}

/* What undoes the factor of `numbers`. */
ALWAYS float unscaled(int k) { return k == WIDE - 1 ? 1.0f : k == 2 ? 0x1p-16f : k == 1 ? 0x1p-8f : 1.0f; }

ALWAYS words shifted(words x, int by) { return by < 0 ? x >> -by : x << by; }

/* Inputs of an octet that are computed by the same code, with shifts that the compiler knows. */
ALWAYS int inputs_of_step(int bits) { return bits == 4 || bits == 8 ? 2 : 4; }

/* The words of input j of a step, which begins at the input `start`. Numbers of four bits have others above them. */
ALWAYS words words_of(int bits, const words *octet, int64_t start, int j) {
    if (bits == 8) return octet[start + j];
    words lower = octet[start / 2 + j / 2] >> 4 * (j % 2);
    if (bits == 4) return lower;
    if (bits == 5) return (lower & 0x0f0f0f0fu) | (octet[4] << (uint32_t)start >> j & 0x10101010u);
    return (lower & 0x0f0f0f0fu) | (shifted(octet[4 + start / 4], 4 - 2 * j) & 0x30303030u);
}

/* The scale and the offset of vector k in a group of a block: weight = numbers * scale + offset. */
ALWAYS void group_scale(int64_t dtype, const char *block, int64_t group, int k, vec *scale, vec *offset) {
    const int at = 2 * k * LANES;
    vec factor = widened_halves(block + at);
    if (dtype == Q6_K) {
        words sixteen = *(const words *)(block + HALVES + group * PANEL);
        factor *= numbers(sixteen, 8, k) * unscaled(k) - 128.0f;
    }
    if (dtype == Q4_K || dtype == Q5_K) {
        const words *both = (const words *)(block + 2 * HALVES + group * 2 * PANEL);
        factor *= numbers(both[0], 8, k) * unscaled(k);
        *offset = -(widened_halves(block + HALVES + at) * (numbers(both[1], 8, k) * unscaled(k)));
    } else if (dtype == Q4_1 || dtype == Q5_1)
        *offset = widened_halves(block + HALVES + at);
    else
        *offset = factor * (float)-LAYOUTS[dtype].zero;
    *scale = factor * unscaled(k);
}

/* Inputs that share a scale. */
ALWAYS int group_inputs(int bits) { return bits == 6 ? 16 : 32; }

/* A group of inputs of a quantised panel. */
typedef struct {
    const char *block;
    int64_t index; /* in the block */
    const words *quants;
} group_place;

ALWAYS group_place find_group(int64_t dtype, int bits, const char *panel, uint64_t input) {
    const int large = LAYOUTS[dtype].inputs == 256; /* spelled out: compilers divide by constants much faster */
    uint64_t block = large ? input / 256 : input / 32, in_block = large ? input % 256 : input % 32;
    const char *at = panel + block * block_bytes(dtype);
    const char *quants = at + LAYOUTS[dtype].scale_bytes + in_block * PANEL * bits / 8;
    return (group_place){at, in_block / group_inputs(bits), (const words *)quants};
}

#define UNROLLED _Pragma("GCC unroll 4")

ALWAYS void expand_quantised(int bits, int64_t dtype, const char *panel, int64_t from, int64_t in, float *out) {
    for (int64_t i = 0; i < in; i += group_inputs(bits)) {
        group_place at = find_group(dtype, bits, panel, from + i);
        vec scale[WIDE], offset[WIDE];
        for (int k = 0; k < WIDE; k++) group_scale(dtype, at.block, at.index, k, scale + k, offset + k);
        for (int64_t octet = 0; octet < group_inputs(bits); octet += OCTET, at.quants += bits) {
            fetch(at.quants + SHALLOW / OCTET * bits, PANEL * bits); /* what is expanded next */
            for (int64_t start = 0; start < OCTET; start += inputs_of_step(bits))
                UNROLLED for (int j = 0; j < inputs_of_step(bits); j++) {
                    words all_four = words_of(bits, at.quants, start, j);
                    for (int k = 0; k < WIDE; k++, out += LANES)
                        store(out, numbers(all_four, bits, k) * scale[k] + offset[k]);
                }
        }
    }
}

ALWAYS void expand_floats(int dtype, const char *panel, int64_t from, int64_t in, float *out) {
    const char *row = panel + from * PANEL * LAYOUTS[dtype].bits / 8;
    for (int64_t i = 0; i < in; i++, row += PANEL * LAYOUTS[dtype].bits / 8)
        for (int k = 0; k < WIDE; k++) store(out + i * PANEL + k * LANES, widened(dtype, row, k));
}

/* The weights of `in` inputs of a panel, from the input `from` on, as out[in][PANEL]. */
static void expand(int64_t dtype, const char *panel, int64_t from, int64_t in, float *out) {
    switch (dtype) {
        case FLOAT32: expand_floats(FLOAT32, panel, from, in, out); break;
        case BFLOAT16: expand_floats(BFLOAT16, panel, from, in, out); break;
        case FLOAT16: expand_floats(FLOAT16, panel, from, in, out); break;
        case Q8_0: expand_quantised(8, Q8_0, panel, from, in, out); break;
        case Q6_K: expand_quantised(6, Q6_K, panel, from, in, out); break;
        default:
            if (LAYOUTS[dtype].bits == 4) expand_quantised(4, dtype, panel, from, in, out);
            else expand_quantised(5, dtype, panel, from, in, out);
    }
}

/* products */

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

/* The same with quantised weights, from the input `from` on. */
ALWAYS void multiply_quantised(int bits, int64_t dtype, int rows, int wide, const char *panel, int64_t from, int64_t in,
                               int first, const float *x, int64_t apart, float *tile) {
    vec sums[QUANTISED_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) sums[r][k] = load(tile + r * PANEL + (first + k) * LANES);
    for (int64_t i = 0; i < in; i += group_inputs(bits)) {
        group_place at = find_group(dtype, bits, panel, from + i);
        vec scale[WIDE], offset[WIDE];
        for (int k = 0; k < wide; k++) group_scale(dtype, at.block, at.index, first + k, scale + k, offset + k);
        for (int64_t octet = 0; octet < group_inputs(bits); octet += OCTET, at.quants += bits) {
            fetch((const char *)at.quants + AHEAD, wide * PANEL * bits / WIDE);
            for (int64_t start = 0; start < OCTET; start += inputs_of_step(bits))
                UNROLLED for (int j = 0; j < inputs_of_step(bits); j++) {
                    vec column[WIDE];
                    words all_four = words_of(bits, at.quants, start, j);
                    for (int k = 0; k < wide; k++) column[k] = numbers(all_four, bits, first + k) * scale[k] + offset[k];
                    for (int r = 0; r < rows; r++)
                        for (int k = 0; k < wide; k++) sums[r][k] += column[k] * x[r * apart + i + octet + start + j];
                }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) store(tile + r * PANEL + (first + k) * LANES, sums[r][k]);
}

/* Some rows of x times `in` inputs of a panel, from the input `from` on, onto the tile. */
typedef void product(int64_t dtype, const char *panel, int64_t from, int64_t in, const float *x, int64_t apart,
                     float *tile);

/* A function for each form of weights and number of rows: compilers take much longer for one large function. */
#define FLOAT_PRODUCT(form, rows) \
    static void multiply_##form##_##rows(int64_t dtype, const char *panel, int64_t from, int64_t in, const float *x, \
                                         int64_t apart, float *tile) { \
        const int wide = rows * WIDE <= SUMS ? WIDE : rows * 2 <= SUMS ? 2 : 1; \
        const char *weights = panel + from * PANEL * LAYOUTS[dtype].bits / 8; \
        for (int first = 0; first < WIDE; first += wide) \
            multiply_floats(form, rows, wide, weights, in, first, x, apart, tile); \
    }
#define QUANTISED_PRODUCT(form, rows) \
    static void multiply_##form##_##rows(int64_t dtype, const char *panel, int64_t from, int64_t in, const float *x, \
                                         int64_t apart, float *tile) { \
        const int wide = rows * WIDE <= QUANTISED_SUMS ? WIDE : rows * 2 <= QUANTISED_SUMS ? 2 : 1; \
        UNROLLED for (int first = 0; first < WIDE; first += wide) \
            multiply_quantised(LAYOUTS[form].bits, dtype, rows, wide, panel, from, in, first, x, apart, tile); \
    }
EACH_ROW_COUNT(FLOAT_PRODUCT, FLOAT32)
EACH_ROW_COUNT(FLOAT_PRODUCT, BFLOAT16)
EACH_ROW_COUNT(FLOAT_PRODUCT, FLOAT16)
EACH_QUANTISED_ROW_COUNT(QUANTISED_PRODUCT, Q8_0)
EACH_QUANTISED_ROW_COUNT(QUANTISED_PRODUCT, Q4_0)
EACH_QUANTISED_ROW_COUNT(QUANTISED_PRODUCT, Q5_0)
EACH_QUANTISED_ROW_COUNT(QUANTISED_PRODUCT, Q6_K)

#define ENTRY(form, rows) [rows] = multiply_##form##_##rows,
static product *const PRODUCTS[DTYPES][ROWS + 1] = {
    [FLOAT32] = {EACH_ROW_COUNT(ENTRY, FLOAT32)},
    [BFLOAT16] = {EACH_ROW_COUNT(ENTRY, BFLOAT16)},
    [FLOAT16] = {EACH_ROW_COUNT(ENTRY, FLOAT16)},
    [Q8_0] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q8_0)},
    [Q4_0] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q4_0)},
    [Q4_1] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q4_0)},
    [Q5_0] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q5_0)},
    [Q5_1] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q5_0)},
    [Q4_K] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q4_0)},
    [Q5_K] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q5_0)},
    [Q6_K] = {EACH_QUANTISED_ROW_COUNT(ENTRY, Q6_K)},
};

ALWAYS int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }

/* x times a panel: tile[rows][PANEL]. `expanded` has room for SHALLOW inputs of a panel. */
static void multiply_panel(const matrix *by, int64_t panel, int64_t rows, const float *x, int64_t apart, float *tile,
                           float *expanded) {
    const int expands = is_quantised(by->dtype) && rows > EXPANDED_ROWS;
    const int64_t dtype = expands ? FLOAT32 : by->dtype, at_once = is_quantised(dtype) ? QUANTISED_ROWS : ROWS;
    const int64_t deep = expands ? SHALLOW : rows > at_once ? DEEP : by->inputs;
    const char *weights = expands ? (const char *)expanded : panel_of(by, panel);
    for (int64_t k = 0; k < rows * PANEL; k += LANES) store(tile + k, all(0));
    for (int64_t from = 0; from < by->inputs; from += deep) {
        int64_t in = at_most(by->inputs - from, deep);
        if (expands) expand(by->dtype, panel_of(by, panel), from, in, expanded);
        for (int64_t r = 0; r < rows; r += at_once) {
            product *multiply = PRODUCTS[dtype][at_most(rows - r, at_once)];
            multiply(dtype, weights, expands ? 0 : from, in, x + r * apart + from, apart, tile + r * PANEL);
        }
    }
}

/* The weights of one output, as float32. */
static void read_output(const matrix *by, int64_t output, float *y, float *expanded) {
    for (int64_t from = 0; from < by->inputs; from += SHALLOW) {
        int64_t in = at_most(by->inputs - from, SHALLOW);
        expand(by->dtype, panel_of(by, output / PANEL), from, in, expanded);
        for (int64_t i = 0; i < in; i++) y[from + i] = expanded[i * PANEL + output % PANEL];
    }
}

/* packing */

/* A block of one output, taken apart: what each number of it takes in a panel. */
typedef struct {
    uint16_t scale, minimum; /* float16 */
    uint8_t group_scales[16], group_minimums[16];
    uint8_t quants[MAX_BLOCK];
} unpacked;

/* 32 numbers of four bits, and of five where `upper` is not NULL. */
ALWAYS void unpack_nibbles(const uint8_t *lower, const uint8_t *upper, unpacked *to) {
    uint32_t bits = 0;
    if (upper) memcpy(&bits, upper, 4);
    for (int j = 0; j < 16; j++) to->quants[j] = (lower[j] & 15) | (bits >> j & 1) << 4;
    for (int j = 0; j < 16; j++) to->quants[j + 16] = lower[j] >> 4 | (bits >> (j + 16) & 1) << 4;
}

/* 8 scales and 8 minimums of six bits in 12 bytes. */
ALWAYS void unpack_six_bits(const uint8_t *from, unpacked *to) {
    for (int j = 0; j < 4; j++) {
        to->group_scales[j] = from[j] & 63, to->group_minimums[j] = from[j + 4] & 63;
        to->group_scales[j + 4] = (from[j + 8] & 15) | from[j] >> 6 << 4;
        to->group_minimums[j + 4] = from[j + 8] >> 4 | from[j + 4] >> 6 << 4;
    }
}

/* 256 numbers of four bits, and of five where `upper` is not NULL. */
ALWAYS void unpack_k(const uint8_t *lower, const uint8_t *upper, unpacked *to) {
    for (int part = 0; part < 4; part++)
        for (int j = 0; j < 32; j++) {
            uint8_t byte = lower[32 * part + j], high = upper ? upper[j] >> 2 * part : 0;
            to->quants[64 * part + j] = (byte & 15) | (high & 1) << 4;
            to->quants[64 * part + 32 + j] = byte >> 4 | (high & 2) << 3;
        }
}

ALWAYS void unpack_q6_k(const uint8_t *lower, const uint8_t *upper, const uint8_t *scales, unpacked *to) {
    for (int half = 0; half < 2; half++, lower += 64, upper += 32)
        for (int j = 0; j < 32; j++) {
            uint8_t *quants = to->quants + 128 * half + j;
            quants[0] = (lower[j] & 15) | (upper[j] & 3) << 4;
            quants[32] = (lower[j + 32] & 15) | (upper[j] >> 2 & 3) << 4;
            quants[64] = lower[j] >> 4 | (upper[j] >> 4 & 3) << 4;
            quants[96] = lower[j + 32] >> 4 | upper[j] >> 6 << 4;
        }
    for (int j = 0; j < 16; j++) to->group_scales[j] = scales[j] ^ 128; /* from -128..127 to 0..255 */
}

/* A block as it lies in a GGUF file. */
static void unpack(int64_t dtype, const uint8_t *from, unpacked *to) {
    memcpy(&to->scale, from + (dtype == Q6_K ? 208 : 0), 2);
    memcpy(&to->minimum, from + 2, 2);
    switch (dtype) {
        case Q8_0:
            for (int j = 0; j < 32; j++) to->quants[j] = from[2 + j] ^ 128;
            break;
        case Q4_0: unpack_nibbles(from + 2, NULL, to); break;
        case Q4_1: unpack_nibbles(from + 4, NULL, to); break;
        case Q5_0: unpack_nibbles(from + 6, from + 2, to); break;
        case Q5_1: unpack_nibbles(from + 8, from + 4, to); break;
        case Q4_K: unpack_six_bits(from + 4, to), unpack_k(from + 16, NULL, to); break;
        case Q5_K: unpack_six_bits(from + 4, to), unpack_k(from + 48, from + 16, to); break;
        case Q6_K: unpack_q6_k(from, from + 128, from + 192, to); break;
    }
}

/* The numbers of eight inputs as `bits` bytes. */
ALWAYS void join_octet(int bits, const uint8_t *from, uint8_t *to) {
    uint64_t eight;
    memcpy(&eight, from, OCTET);
    if (bits == 8) memcpy(to, &eight, OCTET);
    if (bits == 8) return;
    uint64_t lower = eight & 0x0f0f0f0f0f0f0f0f, upper = eight >> 4 & 0x0303030303030303;
    lower = (lower | lower >> 4) & 0x00ff00ff00ff00ff; /* two numbers a byte, in every second byte */
    lower = (lower | lower >> 8) & 0x0000ffff0000ffff;
    lower |= lower >> 16;
    memcpy(to, &lower, 4);
    if (bits == 5) {
        uint8_t all_bits = upper * 0x0102040810204080 >> 56; /* that of number j is bit j */
        to[4] = all_bits << 4 | all_bits >> 4;
    }
    if (bits == 6) {
        upper = (upper | upper >> 6) & 0x000f000f000f000f;
        upper |= upper >> 12;
        to[4] = upper, to[5] = upper >> 32;
    }
}

ALWAYS void join_octets(int bits, int inputs, const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < inputs; i += OCTET, to += bits) join_octet(bits, from + i, to);
}

#define MAX_BYTES (32 + MAX_BLOCK) /* of one output: scales and minimums of groups, and numbers */

/* What a block of one output takes in a panel behind its scale and minimum. Returns the number of bytes. */
static int join_block(int64_t dtype, const unpacked *from, uint8_t *to) {
    const layout *l = LAYOUTS + dtype;
    uint8_t *start = to;
    for (int group = 0; l->inputs == 256 && group < 256 / group_inputs(l->bits); group++) {
        *to++ = from->group_scales[group];
        if (l->zero < 0) *to++ = from->group_minimums[group];
    }
    switch (l->bits) {
        case 4: join_octets(4, l->inputs, from->quants, to); break;
        case 5: join_octets(5, l->inputs, from->quants, to); break;
        case 6: join_octets(6, l->inputs, from->quants, to); break;
        default: join_octets(8, l->inputs, from->quants, to);
    }
    return (int)(to - start) + l->inputs * l->bits / 8;
}

/* One panel of quantised weights, of `outputs` outputs; the others get weights of 0. */
static void pack_quantised(int64_t dtype, const uint8_t *from, int64_t outputs, int64_t inputs, char *to) {
    const layout *l = LAYOUTS + dtype;
    int64_t row_bytes = inputs / l->inputs * l->file_bytes;
    uint16_t scales[PANEL] = {0}, minimums[PANEL] = {0};
    uint8_t bytes[PANEL][MAX_BYTES] = {{0}};
    unpacked one = {0};
    for (int64_t block = 0; block < inputs / l->inputs; block++) {
        int count = 0;
        for (int output = 0; output < outputs; output++) {
            unpack(dtype, from + output * row_bytes + block * l->file_bytes, &one);
            scales[output] = one.scale, minimums[output] = one.minimum;
            count = join_block(dtype, &one, bytes[output]);
        }
        memcpy(to, scales, HALVES), to += HALVES;
        if (l->zero < 0) memcpy(to, minimums, HALVES), to += HALVES;
        for (int at = 0; at < count; at++, to += PANEL) {
            uint32_t *word = (uint32_t *)to; /* vector k has byte k */
            for (int lane = 0; lane < LANES; lane++)
                word[lane] = bytes[lane][at] | (uint32_t)bytes[LANES + lane][at] << 8 |
                             (uint32_t)bytes[2 * LANES + lane][at] << 16 | (uint32_t)bytes[3 * LANES + lane][at] << 24;
        }
    }
}

static void pack_float32(const float *from, int64_t outputs, int64_t inputs, float *to) {
    for (int64_t start = 0; start < inputs; start += PANEL) /* both sides of this part stay in the cache */
        for (int64_t output = 0; output < outputs; output++)
            for (int64_t i = start, stop = at_most(inputs, start + PANEL); i < stop; i++)
                to[i * PANEL + output] = from[output * inputs + i];
}

/* Two outputs share a word: neighbours, or those in the same lane of two vectors. */
static void pack_16_bits(int interleaves, const uint16_t *from, int64_t outputs, int64_t inputs, uint32_t *to) {
    for (int64_t start = 0; start < inputs; start += PANEL)
        for (int64_t word = 0; word < PANEL / 2; word++) {
            int64_t first = interleaves ? word / LANES * 2 * LANES + word % LANES : 2 * word;
            int64_t second = interleaves ? first + LANES : first + 1;
            for (int64_t i = start, stop = at_most(inputs, start + PANEL); i < stop; i++) {
                uint32_t lower = first < outputs ? from[first * inputs + i] : 0;
                uint32_t upper = second < outputs ? from[second * inputs + i] : 0;
                to[i * PANEL / 2 + word] = lower | upper << 16;
            }
        }
}

/* The bytes of a matrix in panels. */
int64_t palaver_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs) {
    return panel_count(outputs) * panel_bytes(dtype, inputs);
}

/* Packs a matrix from rows of weights, one for each output, as they lie in a file. `to` must be zeros. */
void palaver_pack(int64_t dtype, const void *from, int64_t outputs, int64_t inputs, void *to) {
    int64_t row_bytes = inputs / LAYOUTS[dtype].inputs * LAYOUTS[dtype].file_bytes;
    for (int64_t panel = 0; panel < panel_count(outputs); panel++) {
        const char *rows = (const char *)from + panel * PANEL * row_bytes;
        char *packed = (char *)to + panel * panel_bytes(dtype, inputs);
        int64_t count = at_most(outputs - panel * PANEL, PANEL);
        if (is_quantised(dtype)) pack_quantised(dtype, (const uint8_t *)rows, count, inputs, packed);
        else if (dtype == FLOAT32) pack_float32((const float *)rows, count, inputs, (float *)packed);
        else pack_16_bits(dtype == BFLOAT16, (const uint16_t *)rows, count, inputs, (uint32_t *)packed);
    }
}
