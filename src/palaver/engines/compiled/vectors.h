/* Vectors of 16 numbers in the compilers' own notation: AVX-512, AVX2 and others from the same source. */

#include <math.h>
#include <stdint.h>
#if defined(__F16C__) || defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#include <arm_neon.h>
#endif

#define LANES 16 /* numbers in a SIMD vector */
#define HALF (LANES / 2)
#define ALIGNMENT 64
#define ALWAYS static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

ALWAYS vec all(float x) { return (vec){0} + x; }
ALWAYS ints all_ints(int32_t x) { return (ints){0} + x; }
ALWAYS vec load(const float *from) { return *(const loose *)from; }
ALWAYS void store(float *to, vec x) { *(loose *)to = x; }

ALWAYS vec either(ints which, vec yes, vec no) { return (vec)(((ints)yes & which) | ((ints)no & ~which)); }
/* b where one of them is no number. */
ALWAYS vec larger(vec a, vec b) { return either(a > b, a, b); }
ALWAYS vec smaller(vec a, vec b) { return either(a < b, a, b); }

#ifdef __clang__
#define PICKED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICKED(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Sums of neighbours: first those of a, then those of b. */
ALWAYS vec neighbours(vec a, vec b) {
    vec even = PICKED(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vec odd = PICKED(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return even + odd;
}

/* The same with fewer instructions: in each quarter of the result, first those of a, then those of b. */
ALWAYS vec pairs(vec a, vec b) {
    vec even = PICKED(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
    vec odd = PICKED(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    return even + odd;
}

/* Sums of neighbouring quarters: first those of a, then those of b. */
ALWAYS vec quarters(vec a, vec b) {
    vec even = PICKED(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    vec odd = PICKED(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    return even + odd;
}

/* The sum of each of LANES vectors. */
ALWAYS vec totals(const vec *of) {
    vec fours[4];
    for (int k = 0; k < 4; k++) fours[k] = pairs(pairs(of[4 * k], of[4 * k + 1]), pairs(of[4 * k + 2], of[4 * k + 3]));
    return quarters(quarters(fours[0], fours[1]), quarters(fours[2], fours[3]));
}

ALWAYS float sum(vec a) {
    a = neighbours(a, a);
    a = neighbours(a, a);
    a = neighbours(a, a);
    return a[0] + a[1];
}

ALWAYS float largest(vec a) {
    float most = a[0];
    for (int i = 1; i < LANES; i++) most = a[i] > most ? a[i] : most;
    return most;
}

/* e to the x, to about one unit in the last place; NaN of NaN. */
ALWAYS vec exponential(vec x) {
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    const float magic = 12582912.0f; /* added and taken off again, it rounds */
    vec n = (x * 1.44269504088896341f + magic) - magic;
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * (vec)power;
}

ALWAYS vec tanh_of(vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

/* Asks for what is needed soon. */
ALWAYS void fetch(const void *from, int64_t size) {
    for (int64_t at = 0; at < size; at += ALIGNMENT) __builtin_prefetch((const char *)from + at);
}

/* A vector of bfloat16 numbers. */
ALWAYS vec widened_brains(const void *from) {
    typedef uint16_t brains __attribute__((vector_size(32), aligned(2), may_alias));
    return (vec)(__builtin_convertvector(*(const brains *)from, words) << 16);
}

/* A vector of float16 numbers. */
ALWAYS vec widened_halves(const void *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif defined(__F16C__)
    union { __m256 parts[2]; vec whole; } out;
    for (int part = 0; part < 2; part++) out.parts[part] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + part));
    return out.whole;
#else
    typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));
    words bits = __builtin_convertvector(*(const halves *)from, words), sign = (bits & 0x8000u) << 16;
    vec size = (vec)((bits & 0x7fffu) << 13) * 0x1p112f; /* of another exponent: subnormal numbers become right, too */
    words special = (words)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (vec)((words)size | special | sign);
#endif
}

/* Adds the products of the small numbers in each word of two vectors, with exact sums. They are unsigned and signed bytes,
   or unsigned and signed numbers of 16 bits. */
#if defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS
ALWAYS ints products_added(ints to, words a, ints b) {
    return (ints)_mm512_dpbusd_epi32((__m512i)to, (__m512i)a, (__m512i)b);
}
#elif !defined(__AVX512F__) && defined(__AVX2__)
typedef union {
    ints whole;
    __m256i parts[2];
} halved_ints;
#ifdef __AVXVNNI__
#define HAS_BYTE_PRODUCTS
#define PRODUCTS_ADDED(to, a, b) _mm256_dpbusd_avx_epi32(to, a, b)
#else
#define PRODUCTS_ADDED(to, a, b) _mm256_add_epi32(to, _mm256_madd_epi16(a, b))
#endif
ALWAYS ints products_added(ints to, words a, ints b) {
    halved_ints sums = {.whole = to}, x = {.whole = (ints)a}, y = {.whole = b};
    for (int part = 0; part < 2; part++) sums.parts[part] = PRODUCTS_ADDED(sums.parts[part], x.parts[part], y.parts[part]);
    return sums.whole;
}
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_BYTE_PRODUCTS
ALWAYS ints products_added(ints to, words a, ints b) {
    union {
        ints whole;
        int32x4_t parts[4];
    } sums = {.whole = to}, x = {.whole = (ints)a}, y = {.whole = b};
    for (int part = 0; part < 4; part++)
        sums.parts[part] = vusdotq_s32(sums.parts[part], (uint8x16_t)x.parts[part], (int8x16_t)y.parts[part]);
    return sums.whole;
}
#elif defined(__AVX512BW__)
ALWAYS ints products_added(ints to, words a, ints b) { return to + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
ALWAYS ints products_added(ints to, words a, ints b) {
    return to + (ints)(a & 0xffffu) * ((ints)((words)b << 16) >> 16) + (ints)(a >> 16) * (b >> 16);
}
#endif
