/* Weights in panels of 64 outputs: how they are packed and read.

   Floats are stored as [input][64]. Two vectors of bfloat16 are interleaved: the first in the lower halves of 32-bit
   words, the second in the upper ones, so that a shift and a mask widen them.

   A block of quantised weights is stored as its scales, and then 64 * bits bytes for every eight inputs. A weight is
   scale * q + offset, of a number q >= 0: exact but for the rounding of the sum, which is ggml's. Each output has a
   32-bit word for four inputs: a byte of it has a number of 8 bits, or the lower 4 bits of the numbers of an input and of
   the fourth one after it. Upper bits follow, with those of all outputs of a lane in a word. Four vectors of small scales
   share 32-bit words: vector k has byte k. */

#include <stddef.h>
#include <string.h>

#include "vectors.h"

#define WIDE 4 /* vectors side by side in a panel */
#define PANEL (LANES * WIDE)
#define AHEAD 2048 /* bytes of weights fetched ahead; the processor itself stops at the end of a page */
#define QUAD 4      /* inputs whose numbers of an output lie in a word */
#define OCTET 8     /* inputs whose quantised weights lie together */
#define MAX_BLOCK 256

enum dtype { FLOAT32, BFLOAT16, FLOAT16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, DTYPES };

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
    [MXFP4] = {32, 17, 5, HALVES, 12},
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

/* Of whole blocks. */
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

/* Vector k of four that share words. */
ALWAYS vec bytes_of(words all_four, int k) { return __builtin_convertvector((ints)(all_four >> 8 * k & 255), vec); }

ALWAYS words shifted(words x, int by) { return by < 0 ? x >> -by : x << by; }

/* The numbers of vector k for the first or the second four inputs of an octet: a byte each. */
ALWAYS words quad_of(int bits, const words *octet, int second, int k) {
    if (bits == 8) return octet[WIDE * second + k];
    words lower = octet[k] >> 4 * second & 0x0f0f0f0fu;
    if (bits == 5) return lower | (shifted(octet[WIDE], 4 - 2 * k - second) & 0x10101010u);
    if (bits == 6) return lower | (shifted(octet[WIDE + second], 4 - 2 * k) & 0x30303030u);
    return lower;
}

/* The numbers of a block by which those of its groups are multiplied, of vector k. */
typedef struct {
    vec scale, minimum;
} block_scale;

ALWAYS block_scale read_block_scale(int64_t dtype, const char *block, int k) {
    const char *at = block + 2 * k * LANES;
    if (dtype == MXFP4) return (block_scale){widened_brains(at), all(0)};
    return (block_scale){widened_halves(at), LAYOUTS[dtype].zero < 0 ? widened_halves(at + HALVES) : all(0)};
}

/* The scale and the offset of vector k in a group of a block: weight = number * scale + offset. */
ALWAYS void group_scale(int64_t dtype, const char *block, block_scale of, int64_t group, int k, vec *scale, vec *offset) {
    *scale = of.scale, *offset = of.minimum;
    if (dtype == Q6_K) *scale *= bytes_of(*(const words *)(block + HALVES + group * PANEL), k) - 128.0f;
    if (dtype == Q4_K || dtype == Q5_K) {
        const words *both = (const words *)(block + 2 * HALVES + group * 2 * PANEL);
        *scale *= bytes_of(both[0], k);
        *offset *= -bytes_of(both[1], k);
    }
    if (LAYOUTS[dtype].zero >= 0) *offset = *scale * (float)-LAYOUTS[dtype].zero;
}

/* Inputs that share a scale. */
ALWAYS int group_inputs(int bits) { return bits == 6 ? 16 : 32; }

ALWAYS const words *quants_of(int64_t dtype, const char *block) {
    return (const words *)(block + LAYOUTS[dtype].scale_bytes);
}

ALWAYS int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }
ALWAYS int64_t at_least(int64_t count, int64_t limit) { return count > limit ? count : limit; }

ALWAYS void read_floats(int dtype, const char *panel, int64_t output, int64_t inputs, float *y) {
    for (int64_t i = 0; i < inputs; i++, panel += PANEL * LAYOUTS[dtype].bits / 8)
        y[i] = widened(dtype, panel, output / LANES)[output % LANES];
}

ALWAYS void read_quantised(int64_t dtype, const char *block, int64_t output, int64_t inputs, float *y) {
    const int64_t k = output / LANES, lane = output % LANES, bits = LAYOUTS[dtype].bits, size = LAYOUTS[dtype].inputs;
    for (int64_t from = 0; from < inputs; from += size, block += block_bytes(dtype))
        for (int64_t i = 0; i < size; i += QUAD) {
            vec scale, offset;
            group_scale(dtype, block, read_block_scale(dtype, block, k), i / group_inputs(bits), k, &scale, &offset);
            uint32_t four = quad_of(bits, quants_of(dtype, block) + i / OCTET * bits, i / QUAD % 2, k)[lane];
            for (int n = 0; n < QUAD; n++) y[from + i + n] = (four >> 8 * n & 255) * scale[lane] + offset[lane];
        }
}

/* The weights of one output, as float32. */
static void read_output(const matrix *by, int64_t output, float *y) {
    const char *panel = panel_of(by, output / PANEL);
    output %= PANEL;
    switch (by->dtype) {
        case FLOAT32: read_floats(FLOAT32, panel, output, by->inputs, y); break;
        case BFLOAT16: read_floats(BFLOAT16, panel, output, by->inputs, y); break;
        case FLOAT16: read_floats(FLOAT16, panel, output, by->inputs, y); break;
        default: read_quantised(by->dtype, panel, output, by->inputs, y);
    }
}

/* packing */

/* A block of one output, taken apart: what each number of it takes in a panel. */
typedef struct {
    uint16_t scale, minimum; /* float16; the scale of MXFP4 is bfloat16, which has all of its powers of two */
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

/* Numbers of four bits that are floats, doubled: whole numbers, here from 0 to 24. */
static void unpack_mxfp4(const uint8_t *from, unpacked *to) {
    static const uint8_t numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    unpack_nibbles(from + 1, NULL, to);
    for (int j = 0; j < 32; j++) to->quants[j] = numbers[to->quants[j]];
    to->scale = from[0] < 2 ? 0x20 << from[0] : (from[0] - 1) << 7; /* half of 2^(from[0] - 127) */
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
        case MXFP4: unpack_mxfp4(from, to); break;
    }
}

/* The numbers of eight inputs of a panel. Its upper bits must be zeros. */
static void join_octet(int bits, const unpacked *outputs, int64_t input, uint32_t *to) {
    uint32_t *upper = to + PANEL;
    for (int output = 0, k = 0; output < PANEL; output++, k = output / LANES) {
        uint32_t first, second;
        memcpy(&first, outputs[output].quants + input, QUAD);
        memcpy(&second, outputs[output].quants + input + QUAD, QUAD);
        if (bits == 8) {
            to[output] = first, to[PANEL + output] = second;
            continue;
        }
        to[output] = (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4;
        first = first >> 4 & 0x03030303u, second = second >> 4 & 0x03030303u;
        if (bits == 5) upper[output % LANES] |= (first | second << 1) << 2 * k;
        if (bits == 6) upper[output % LANES] |= first << 2 * k, upper[LANES + output % LANES] |= second << 2 * k;
    }
}

/* A small number of each output: vector k has byte k. */
ALWAYS void join_bytes(const unpacked *outputs, int64_t offset, uint32_t *to) {
    for (int output = 0; output < PANEL; output++)
        to[output % LANES] |= (uint32_t)((const uint8_t *)(outputs + output))[offset] << 8 * (output / LANES);
}

/* One panel of quantised weights, of `outputs` outputs; the others get weights of 0. */
static void pack_quantised(int64_t dtype, const uint8_t *from, int64_t outputs, int64_t inputs, char *to) {
    const layout *l = LAYOUTS + dtype;
    int64_t row_bytes = inputs / l->inputs * l->file_bytes;
    int groups = l->inputs == MAX_BLOCK ? MAX_BLOCK / group_inputs(l->bits) : 0;
    unpacked all[PANEL] = {{0}};
    for (int64_t block = 0; block < inputs / l->inputs; block++) {
        for (int output = 0; output < outputs; output++)
            unpack(dtype, from + output * row_bytes + block * l->file_bytes, all + output);
        for (int output = 0; output < PANEL; output++) ((uint16_t *)to)[output] = all[output].scale;
        to += HALVES;
        for (int output = 0; l->zero < 0 && output < PANEL; output++) ((uint16_t *)to)[output] = all[output].minimum;
        if (l->zero < 0) to += HALVES;
        for (int group = 0; group < groups; group++) {
            join_bytes(all, offsetof(unpacked, group_scales) + group, (uint32_t *)to), to += PANEL;
            if (l->zero < 0) join_bytes(all, offsetof(unpacked, group_minimums) + group, (uint32_t *)to), to += PANEL;
        }
        for (int64_t input = 0; input < l->inputs; input += OCTET, to += PANEL * l->bits)
            join_octet(l->bits, all, input, (uint32_t *)to);
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
