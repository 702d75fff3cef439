/* A forward pass of a plain decoder over new tokens of several sequences.

   A row is a new token of a sequence. Its bits depend on the tokens before it in its sequence and on nothing else: not
   on the other rows, the chunk size or the number of threads, because the order of every sum is fixed. Weights are
   stored in panels of 64 outputs, [panel][input][64], in the narrowest type that holds them without loss; all
   arithmetic is done in float. Two vectors of bfloat16 are interleaved: the first in the lower halves of 32-bit words,
   the second in the upper ones, so that a shift and a mask widen them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define LANES 16 /* numbers in a SIMD vector */
#define WIDE 4   /* vectors side by side in a panel */
#define PANEL (LANES * WIDE)
#define DEEP 256 /* inputs multiplied before the next rows: their weights stay in the cache */
#define QUERIES 8 /* queries of one KV head that are attended for at once */
#define KEYS 128 /* keys scored before their values are added */
#define ALIGNMENT 64
#define AHEAD 2048 /* bytes of weights fetched ahead; the processor itself stops at the end of a page */

#ifdef __AVX512F__
#define SUMS 16 /* vectors of sums that fit into registers */
#define ROWS 4  /* rows multiplied at once: with all vectors of a panel, whose weights are widened once */
#define EACH_ROW_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#else
#define SUMS 6
#define ROWS 8
#define EACH_ROW_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif

#define ALWAYS static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

enum dtype { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *weights;
    const float *bias; /* or NULL */
    int64_t inputs, outputs;
    int64_t dtype; /* of the weights */
} matrix;

typedef struct {
    const float *weight;
    float epsilon;
} norm;

typedef struct {
    norm input_norm, post_attention_norm, qk_norm; /* qk_norm: a row of weights for each head, or NULL */
    matrix qkv_proj, o_proj, gate_up_proj, down_proj;
} layer;

typedef struct {
    const layer *layers;
    const float *embedding;
    norm norm;
    matrix lm_head;
    int64_t num_layers, hidden_size, num_heads;
    int64_t num_kv_heads, head_dim, intermediate_size;
    float scale;
    int64_t max_rows, max_threads;
} model;

/* `slot` holds the keys and values of the row's sequence: members 2 * layer (keys) and 2 * layer + 1 (values). A row that
   stands for media has an embedding of its own instead of its token's, and may have rotations of its own. */
typedef struct {
    float *slot;
    int64_t member_stride, head_stride; /* in floats */
    int64_t token, position;
    int64_t needs_logits;
    int64_t rotary_position;
    const float *embedding, *rotations; /* or NULL */
} row;

/* Rows that are attended for at once: consecutive tokens of one sequence. */
typedef struct {
    int64_t first, count;
} span;

typedef struct {
    model m;
    float *x, *normed, *qkv, *attended, *intermediate; /* [rows][...] */
    span *spans;
    float **scratch; /* of each thread: queries, their weighted values so far, scores, tiles */
} decoder;

typedef struct {
    const decoder *d;
    const row *rows;
    const float *rotations; /* [position][head_dim / 2][2]: cosine and sine */
    float *logits;
    int64_t count, spans, logit_rows, thread, threads;
    float *queries, *blended, *scores, *tiles;
} work;

/* numbers */

ALWAYS vec all(float x) { return (vec){0} + x; }
ALWAYS vec load(const float *from) { return *(const loose *)from; }
ALWAYS void store(float *to, vec x) { *(loose *)to = x; }

ALWAYS vec either(ints which, vec yes, vec no) { return (vec)(((ints)yes & which) | ((ints)no & ~which)); }
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

/* e to the x, to about one unit in the last place. */
ALWAYS vec exponential(vec x) {
    x = smaller(larger(x, all(-87.0f)), all(88.0f));
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

/* matrices */

ALWAYS int64_t bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* Asks for what is needed soon. */
ALWAYS void fetch(const void *from, int64_t size) {
    for (int64_t at = 0; at < size; at += ALIGNMENT) __builtin_prefetch((const char *)from + at);
}

/* A vector of halves. */
ALWAYS vec widened_halves(const void *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif defined(__F16C__)
    union { __m256 parts[2]; vec whole; } out;
    for (int part = 0; part < 2; part++) out.parts[part] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + part));
    return out.whole;
#elif defined(__FLT16_MAX__)
    typedef _Float16 halves __attribute__((vector_size(32), aligned(2), may_alias));
    return __builtin_convertvector(*(const halves *)from, vec);
#else
    (void)from;
    return all(NAN);
#endif
}

/* The vector `k` of a panel's row. */
ALWAYS vec widened(int dtype, const void *row, int k) {
    if (dtype == BFLOAT16) {
        words both = *(const words *)((const uint16_t *)row + k / 2 * 2 * LANES);
        return k % 2 ? (vec)(both & 0xffff0000u) : (vec)(both << 16);
    }
    if (dtype == FLOAT16) return widened_halves((const uint16_t *)row + k * LANES);
    return load((const float *)row + k * LANES);
}

/* `rows` rows of x times `wide` vectors of a panel, from the vector `from` on, onto tile[rows][PANEL]. */
ALWAYS void block(int dtype, int rows, int wide, const void *weights, int64_t in, int from, const float *x,
                  int64_t apart, float *tile) {
    vec sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) sums[r][k] = load(tile + r * PANEL + (from + k) * LANES);
    for (int64_t i = 0; i < in; i++) {
        vec column[WIDE];
        const char *row = (const char *)weights + i * PANEL * bytes(dtype);
        fetch(row + AHEAD, wide * LANES * bytes(dtype));
        for (int k = 0; k < wide; k++) column[k] = widened(dtype, row, from + k);
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < wide; k++) sums[r][k] += column[k] * x[r * apart + i];
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) store(tile + r * PANEL + (from + k) * LANES, sums[r][k]);
}

ALWAYS void rows_of_panel(int dtype, int rows, const void *weights, int64_t in, const float *x, int64_t apart,
                          float *tile) {
    const int wide = rows * WIDE <= SUMS ? WIDE : rows * 2 <= SUMS ? 2 : 1;
    for (int from = 0; from < WIDE; from += wide) block(dtype, rows, wide, weights, in, from, x, apart, tile);
}

ALWAYS void panel_of_dtype(int dtype, int64_t rows, const void *weights, int64_t in, const float *x, int64_t apart,
                          float *tile) {
#define CASE(n) \
    case n: \
        rows_of_panel(dtype, n, weights, in, x, apart, tile); \
        break;
    switch (rows) {
        EACH_ROW_COUNT(CASE)
    }
#undef CASE
}

/* Up to ROWS rows of x times `in` inputs of a panel, from the input `from` on, onto the tile. */
static void times_panel(const matrix *by, int64_t panel, int64_t from, int64_t in, int64_t rows, const float *x,
                        int64_t apart, float *tile) {
    int64_t at = (panel * by->inputs + from) * PANEL;
    if (by->dtype == BFLOAT16)
        panel_of_dtype(BFLOAT16, rows, (const uint16_t *)by->weights + at, in, x + from, apart, tile);
    else if (by->dtype == FLOAT16)
        panel_of_dtype(FLOAT16, rows, (const uint16_t *)by->weights + at, in, x + from, apart, tile);
    else
        panel_of_dtype(FLOAT32, rows, (const float *)by->weights + at, in, x + from, apart, tile);
}

ALWAYS int64_t share_start(int64_t count, int64_t thread, int64_t threads) { return count * thread / threads; }

enum ending { SET, ADD, GATED };

ALWAYS void finish(enum ending ending, const matrix *by, const float *tile, int64_t out, float *y) {
    if (ending == GATED) { /* half a panel of gates, then half a panel of what they let through */
        for (int64_t k = 0; k < PANEL / 2; k += LANES) {
            vec gate = load(tile + k), up = load(tile + PANEL / 2 + k);
            if (by->bias) gate += load(by->bias + 2 * out + k), up += load(by->bias + 2 * out + PANEL / 2 + k);
            store(y + out + k, gate / (1.0f + exponential(-gate)) * up);
        }
        return;
    }
    int64_t count = by->outputs - out < PANEL ? by->outputs - out : PANEL;
    for (int64_t k = 0; k < count; k++) {
        float value = tile[k] + (by->bias ? by->bias[out + k] : 0.0f);
        y[out + k] = ending == ADD ? y[out + k] + value : value;
    }
}

/* This thread's share of y = x * weights, or onto y, or gated, for so many rows. */
static void multiply(const work *w, const matrix *by, int64_t rows, const float *x, int64_t apart, float *y,
                     int64_t y_apart, enum ending ending) {
    int64_t panels = (by->outputs + PANEL - 1) / PANEL, width = ending == GATED ? PANEL / 2 : PANEL;
    int64_t stop = share_start(panels, w->thread + 1, w->threads), deep = rows > ROWS ? DEEP : by->inputs;
    for (int64_t panel = share_start(panels, w->thread, w->threads); panel < stop; panel++) {
        for (int64_t k = 0; k < rows * PANEL; k += LANES) store(w->tiles + k, all(0));
        for (int64_t from = 0; from < by->inputs; from += deep) {
            int64_t in = by->inputs - from < deep ? by->inputs - from : deep;
            for (int64_t r = 0; r < rows; r += ROWS)
                times_panel(by, panel, from, in, rows - r < ROWS ? rows - r : ROWS, x + r * apart, apart,
                            w->tiles + r * PANEL);
        }
        for (int64_t r = 0; r < rows; r++)
            finish(ending, by, w->tiles + r * PANEL, panel * width, y + r * y_apart);
    }
}

/* norms and rotary embeddings */

static void norm_to(const norm *by, const float *x, int64_t size, float *y) {
    vec squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / size + by->epsilon);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(by->weight + i));
}

/* This thread's share of the rows, normed. */
static void norm_rows(const work *w, const norm *by) {
    int64_t hidden = w->d->m.hidden_size, stop = share_start(w->count, w->thread + 1, w->threads);
    for (int64_t r = share_start(w->count, w->thread, w->threads); r < stop; r++)
        norm_to(by, w->d->x + r * hidden, hidden, w->d->normed + r * hidden);
}

/* Rotates by the row's position; the two halves of a head come out interleaved. */
static void rotate(const work *w, const layer *l, const float *x, int64_t head, int64_t r, float scale, float *y) {
    int64_t size = w->d->m.head_dim, half = size / 2;
    float even[size] __attribute__((aligned(ALIGNMENT)));
    if (l->qk_norm.weight) {
        norm by = {l->qk_norm.weight + head * size, l->qk_norm.epsilon};
        norm_to(&by, x, size, even);
        x = even;
    }
    const row *at = w->rows + r;
    const float *rotations = at->rotations ? at->rotations : w->rotations + at->rotary_position * size;
    for (int64_t j = 0; j < half; j++) {
        float cosine = rotations[2 * j], sine = rotations[2 * j + 1];
        y[2 * j] = (x[j] * cosine - x[j + half] * sine) * scale;
        y[2 * j + 1] = (x[j + half] * cosine + x[j] * sine) * scale;
    }
}

/* attention */

/* The scores of `count` queries and LANES keys. */
ALWAYS void score(int count, const float *queries, const float *keys, int64_t size, float *scores) {
    fetch(keys + 2 * LANES * size, LANES * size * 4);
    for (int g = 0; g < count; g++) {
        vec sums[LANES];
        for (int t = 0; t < LANES; t++) sums[t] = all(0);
        for (int64_t i = 0; i < size; i += LANES) {
            vec query = load(queries + g * size + i);
            for (int t = 0; t < LANES; t++) sums[t] += query * load(keys + t * size + i);
        }
        for (int left = LANES / 2; left >= 1; left /= 2)
            for (int t = 0; t < left; t++) sums[t] = neighbours(sums[2 * t], sums[2 * t + 1]);
        store(scores + g * KEYS, sums[0]);
    }
}

/* The online softmax of a query: its largest score so far, and the sum of its weights relative to that. */
typedef struct {
    float max, total;
} softmax;

/* Turns the scores of up to KEYS keys, of which the query sees `length`, into weights. Returns the factor by which the
   weights of earlier keys shrink. */
static float weigh(float *scores, int64_t length, int64_t end, softmax *so_far) {
    const ints place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec most = all(so_far->max), total = all(0);
    for (int64_t t = 0; t < end; t += LANES)
        most = larger(either(place < (int32_t)(length - t), load(scores + t), most), most);
    float peak = largest(most);
    for (int64_t t = 0; t < end; t += LANES) {
        vec weights = either(place < (int32_t)(length - t), exponential(load(scores + t) - peak), all(0));
        store(scores + t, weights);
        total += weights;
    }
    float shrink = exponential(all(so_far->max - peak))[0];
    *so_far = (softmax){peak, so_far->total * shrink + sum(total)};
    return shrink;
}

/* Adds the weighted values of up to KEYS keys to those of the keys before. */
ALWAYS void blend(int count, const float *weights, const float *values, int64_t size, int64_t end, const float *shrink,
                  float *out) {
    for (int64_t i = 0; i < size; i += LANES) {
        vec sums[QUERIES];
        for (int g = 0; g < count; g++) sums[g] = load(out + g * size + i) * shrink[g];
        for (int64_t t = 0; t < end; t++) {
            vec value = load(values + t * size + i);
            __builtin_prefetch(values + (t + 2 * LANES) * size + i);
            for (int g = 0; g < count; g++) sums[g] += value * weights[g * KEYS + t];
        }
        for (int g = 0; g < count; g++) store(out + g * size + i, sums[g]);
    }
}

/* `count` queries, `group` of them for each row; the first row sees `length` keys, each further one sees one more. */
ALWAYS void attend_some(int count, const work *w, int64_t group, const float *keys, const float *values,
                        int64_t length) {
    int64_t size = w->d->m.head_dim, all_keys = length + (count - 1) / group;
    softmax so_far[QUERIES];
    float shrink[QUERIES];
    for (int g = 0; g < count; g++) so_far[g] = (softmax){-INFINITY, 0};
    for (int64_t i = 0; i < count * size; i += LANES) store(w->blended + i, all(0));
    for (int64_t from = 0; from < all_keys; from += KEYS) {
        int64_t end = all_keys - from < KEYS ? all_keys - from : KEYS;
        for (int64_t t = 0; t < end; t += LANES) score(count, w->queries, keys + (from + t) * size, size, w->scores + t);
        for (int g = 0; g < count; g++)
            shrink[g] = weigh(w->scores + g * KEYS, length + g / group - from, end, so_far + g);
        blend(count, w->scores, values + from * size, size, end, shrink, w->blended);
    }
    for (int g = 0; g < count; g++)
        for (int64_t i = 0; i < size; i += LANES)
            store(w->blended + g * size + i, load(w->blended + g * size + i) / so_far[g].total);
}

static void attend(const work *w, int64_t count, int64_t group, const float *keys, const float *values,
                   int64_t length) {
#define CASE(n) \
    case n: \
        attend_some(n, w, group, keys, values, length); \
        break;
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
}

ALWAYS float *keys_of(const work *w, int64_t r, int64_t depth, int64_t head) {
    return w->rows[r].slot + 2 * depth * w->rows[r].member_stride + head * w->rows[r].head_stride;
}

ALWAYS const float *qkv_of(const work *w, int64_t r, int64_t head) {
    const model *m = &w->d->m;
    return w->d->qkv + (r * (m->num_heads + 2 * m->num_kv_heads) + head) * m->head_dim;
}

/* Stores this thread's share of the rows' keys and values in their slots. */
static void write_rows(const work *w, const layer *l, int64_t depth) {
    const model *m = &w->d->m;
    int64_t size = m->head_dim, tasks = w->count * m->num_kv_heads;
    int64_t stop = share_start(tasks, w->thread + 1, w->threads);
    for (int64_t task = share_start(tasks, w->thread, w->threads); task < stop; task++) {
        int64_t r = task / m->num_kv_heads, head = task % m->num_kv_heads, position = w->rows[r].position;
        float *key = keys_of(w, r, depth, head) + position * size, *value = key + w->rows[r].member_stride;
        const float *new = qkv_of(w, r, m->num_heads + m->num_kv_heads + head);
        rotate(w, l, qkv_of(w, r, m->num_heads + head), m->num_heads + head, r, 1.0f, key);
        for (int64_t i = 0; i < size; i++) value[i] = new[i];
    }
}

/* Attends for the queries of one span that share a KV head, `count` of each row from `start` on. */
static void attend_span(const work *w, const layer *l, int64_t depth, const span *at, int64_t head, int64_t start,
                       int64_t count) {
    const model *m = &w->d->m;
    int64_t size = m->head_dim, first = head * (m->num_heads / m->num_kv_heads) + start;
    for (int64_t n = 0; n < at->count; n++)
        for (int64_t g = 0; g < count; g++)
            rotate(w, l, qkv_of(w, at->first + n, first + g), first + g, at->first + n, m->scale,
                   w->queries + (n * count + g) * size);
    const float *keys = keys_of(w, at->first, depth, head);
    attend(w, at->count * count, count, keys, keys + w->rows[at->first].member_stride, w->rows[at->first].position + 1);
    for (int64_t n = 0; n < at->count; n++)
        for (int64_t i = 0; i < count * size; i++)
            w->d->attended[((at->first + n) * m->num_heads + first) * size + i] = w->blended[n * count * size + i];
}

static int needs_logits(const work *w, const span *at) {
    for (int64_t r = at->first; r < at->first + at->count; r++)
        if (w->rows[r].needs_logits) return 1;
    return 0;
}

static void attend_rows(const work *w, const layer *l, int64_t depth) {
    const model *m = &w->d->m;
    int64_t group = m->num_heads / m->num_kv_heads, tasks = w->spans * m->num_kv_heads;
    int64_t stop = share_start(tasks, w->thread + 1, w->threads);
    for (int64_t task = share_start(tasks, w->thread, w->threads); task < stop; task++) {
        const span *at = w->d->spans + task / m->num_kv_heads;
        if (depth + 1 == m->num_layers && !needs_logits(w, at)) continue;
        for (int64_t start = 0; start < group; start += QUERIES)
            attend_span(w, l, depth, at, task % m->num_kv_heads, start,
                        group - start < QUERIES ? group - start : QUERIES);
    }
}

/* Moves the rows that need logits to the front: the others are finished. */
static void gather(const work *w) {
    const decoder *d = w->d;
    int64_t hidden = d->m.hidden_size, attended = d->m.num_heads * d->m.head_dim, found = 0;
    for (int64_t r = 0; r < w->count; r++) {
        if (!w->rows[r].needs_logits) continue;
        for (int64_t i = 0; i < hidden; i++) d->x[found * hidden + i] = d->x[r * hidden + i];
        for (int64_t i = 0; i < attended; i++) d->attended[found * attended + i] = d->attended[r * attended + i];
        found++;
    }
}

/* the pass */

#ifdef _OPENMP
#define BARRIER _Pragma("omp barrier")
#else
#define BARRIER
#endif

static void pass(work w) {
    const decoder *d = w.d;
    const model *m = &d->m;
    int64_t hidden = m->hidden_size, attended = m->num_heads * m->head_dim;
    int64_t qkv = (m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
    for (int64_t depth = 0; depth < m->num_layers; depth++) {
        const layer *l = m->layers + depth;
        norm_rows(&w, &l->input_norm);
        BARRIER
        multiply(&w, &l->qkv_proj, w.count, d->normed, hidden, d->qkv, qkv, SET);
        BARRIER
        write_rows(&w, l, depth);
        if (!w.logit_rows && depth + 1 == m->num_layers) return; /* the rest is needed for logits only */
        BARRIER
        attend_rows(&w, l, depth);
        BARRIER
        if (depth + 1 == m->num_layers && w.logit_rows < w.count) {
            if (w.thread == 0) gather(&w);
            w.count = w.logit_rows;
            BARRIER
        }
        multiply(&w, &l->o_proj, w.count, d->attended, attended, d->x, hidden, ADD);
        BARRIER
        norm_rows(&w, &l->post_attention_norm);
        BARRIER
        multiply(&w, &l->gate_up_proj, w.count, d->normed, hidden, d->intermediate, m->intermediate_size, GATED);
        BARRIER
        multiply(&w, &l->down_proj, w.count, d->intermediate, m->intermediate_size, d->x, hidden, ADD);
        BARRIER
    }
    norm_rows(&w, &m->norm);
    BARRIER
    multiply(&w, &m->lm_head, w.count, d->normed, hidden, w.logits, m->lm_head.outputs, SET);
}

/* Groups rows into spans. Returns the number of spans. */
static int64_t build_spans(const decoder *d, const row *rows, int64_t count) {
    int64_t group = d->m.num_heads / d->m.num_kv_heads, max_rows = group < QUERIES ? QUERIES / group : 1, spans = 0;
    for (int64_t r = 0; r < count; r++) {
        span *last = d->spans + spans - 1;
        int next = r && rows[r].slot == rows[r - 1].slot && rows[r].position == rows[r - 1].position + 1;
        if (next && last->count < max_rows)
            last->count++;
        else
            d->spans[spans++] = (span){r, 1};
    }
    return spans;
}

static void run_thread(work w, int64_t thread, int64_t threads) {
    w.thread = thread, w.threads = threads;
    w.queries = w.d->scratch[thread];
    w.blended = w.queries + QUERIES * w.d->m.head_dim;
    w.scores = w.blended + QUERIES * w.d->m.head_dim;
    w.tiles = w.scores + QUERIES * KEYS;
    pass(w);
}

/* Computes `count` rows; writes the logits of those that need them, [logit rows][outputs]. The rows of a sequence must
   come in order. */
void palaver_step(const decoder *d, const row *rows, int64_t count, const float *rotations, float *logits,
                  int64_t threads) {
    work w = {.d = d, .rows = rows, .rotations = rotations, .logits = logits, .count = count};
    w.spans = build_spans(d, rows, count);
    int64_t hidden = d->m.hidden_size;
    for (int64_t r = 0; r < count; r++) {
        w.logit_rows += rows[r].needs_logits;
        const float *embedding = rows[r].embedding ? rows[r].embedding : d->m.embedding + rows[r].token * hidden;
        for (int64_t i = 0; i < hidden; i++) d->x[r * hidden + i] = embedding[i];
    }
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads((int)(threads < d->m.max_threads ? threads : d->m.max_threads))
        run_thread(w, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    run_thread(w, 0, 1);
}

static float *allocate_floats(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return aligned_alloc(ALIGNMENT, bytes);
}

void palaver_free(decoder *d) {
    if (!d) return;
    for (int64_t t = 0; d->scratch && t < d->m.max_threads; t++) free(d->scratch[t]);
    free(d->scratch), free(d->spans);
    free(d->x), free(d->normed), free(d->qkv), free(d->attended), free(d->intermediate), free(d);
}

/* Returns NULL where there is no memory. The memory that the model points to must outlive the decoder. */
decoder *palaver_new(const model *m) {
    decoder *d = calloc(1, sizeof(decoder));
    if (!d) return NULL;
    d->m = *m;
    d->x = allocate_floats(m->max_rows * m->hidden_size);
    d->normed = allocate_floats(m->max_rows * m->hidden_size);
    d->spans = calloc(m->max_rows, sizeof(span));
    d->qkv = allocate_floats(m->max_rows * (m->num_heads + 2 * m->num_kv_heads) * m->head_dim);
    d->attended = allocate_floats(m->max_rows * m->num_heads * m->head_dim);
    d->intermediate = allocate_floats(m->max_rows * m->intermediate_size);
    d->scratch = calloc(m->max_threads, sizeof(float *));
    int complete = d->x && d->normed && d->qkv && d->attended && d->intermediate && d->spans && d->scratch;
    for (int64_t t = 0; complete && t < m->max_threads; t++) {
        d->scratch[t] = allocate_floats(QUERIES * (2 * m->head_dim + KEYS) + m->max_rows * PANEL);
        complete = d->scratch[t] != NULL;
    }
    if (complete) return d;
    palaver_free(d);
    return NULL;
}

/* Whether weights can be stored as float16: not every compiler supports it. */
int palaver_has_float16(void) {
#if defined(__AVX512F__) || defined(__F16C__) || defined(__FLT16_MAX__)
    return 1;
#else
    return 0;
#endif
}

/* The self-check, on a random model: rows computed together, in two threads, must give what each gives alone. It uses
   every dtype of weights, so that code for another processor, or a damaged file, ends the check and not the engine. */

enum { DEPTH = 2, HIDDEN = 32, HEADS = 4, SIZE = 16, INNER = 64, TOKENS = 20, OUTPUTS = PANEL, CHECK_ROWS = 17 };

static uint32_t next_number(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* Weights of about -0.5 to 0.5, each of them exact in its dtype. */
static matrix random_matrix(int dtype, int64_t in, int64_t out, uint32_t *state) {
    int64_t count = in * ((out + PANEL - 1) / PANEL) * PANEL;
    void *weights = allocate_floats(count);
    for (int64_t i = 0; weights && i < count; i++) {
        uint32_t drawn = next_number(state) >> 16, sign = drawn & 0x8000;
        if (dtype == FLOAT32) ((float *)weights)[i] = ((float)drawn - 32768.0f) / 65536.0f;
        if (dtype == BFLOAT16) ((uint16_t *)weights)[i] = sign | 0x3e00 | (drawn & 0x7f);
        if (dtype == FLOAT16) ((uint16_t *)weights)[i] = sign | 0x3000 | (drawn & 0x3ff);
    }
    return (matrix){weights, NULL, in, out, dtype};
}

static int same(const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(a[i] == b[i])) return 0; /* NaN is no answer either */
    return 1;
}

static int check_dtype(int dtype) {
    uint32_t state = 1;
    int64_t norm_size = 3 * HEADS * SIZE / 2, slot_size = 2 * DEPTH * HEADS / 2 * TOKENS * SIZE, right = 0;
    float *ones = allocate_floats(norm_size), *embedding = allocate_floats(TOKENS * HIDDEN);
    float *rotations = allocate_floats(TOKENS * SIZE);
    float *cache = calloc(2 * slot_size, sizeof(float)), *alone = allocate_floats(OUTPUTS);
    float *together = allocate_floats(CHECK_ROWS * OUTPUTS);
    layer layers[DEPTH] = {0};
    for (int64_t i = 0; ones && i < norm_size; i++) ones[i] = 1.0f;
    for (int64_t i = 0; embedding && i < TOKENS * HIDDEN; i++) embedding[i] = (next_number(&state) >> 24) / 256.0f;
    for (int64_t i = 0; rotations && i < TOKENS * SIZE; i++) rotations[i] = i % 2 ? 0.6f : 0.8f;
    for (int64_t depth = 0; depth < DEPTH; depth++)
        layers[depth] = (layer){.input_norm = {ones, 1e-6f},
                                .post_attention_norm = {ones, 1e-6f},
                                .qk_norm = {ones, 1e-6f},
                                .qkv_proj = random_matrix(dtype, HIDDEN, 2 * HEADS * SIZE, &state),
                                .o_proj = random_matrix(dtype, HEADS * SIZE, HIDDEN, &state),
                                .gate_up_proj = random_matrix(dtype, HIDDEN, 2 * INNER, &state),
                                .down_proj = random_matrix(dtype, INNER, HIDDEN, &state)};
    model m = {layers, embedding, {ones, 1e-6f}, random_matrix(dtype, HIDDEN, OUTPUTS, &state),
               DEPTH, HIDDEN, HEADS, HEADS / 2, SIZE, INNER, 0.25f, CHECK_ROWS, 2};
    decoder *d = palaver_new(&m);
    if (d && ones && embedding && rotations && cache && together && alone) {
        row rows[CHECK_ROWS];
        for (int64_t r = 0; r < CHECK_ROWS; r++)
            rows[r] = (row){cache, HEADS / 2 * TOKENS * SIZE, TOKENS * SIZE, r * 7 % TOKENS, r, 1, r, NULL, NULL};
        palaver_step(d, rows, CHECK_ROWS, rotations, together, 2);
        for (int64_t r = 0; r < CHECK_ROWS; r++) {
            rows[r].slot = cache + slot_size;
            palaver_step(d, rows + r, 1, rotations, alone, 1);
            right += same(alone, together + r * OUTPUTS, OUTPUTS);
        }
    }
    for (int64_t depth = 0; depth < DEPTH; depth++) {
        layer *l = layers + depth;
        free((void *)l->qkv_proj.weights), free((void *)l->o_proj.weights);
        free((void *)l->gate_up_proj.weights), free((void *)l->down_proj.weights);
    }
    free((void *)m.lm_head.weights), free(ones), free(embedding), free(rotations);
    free(cache), free(together), free(alone);
    palaver_free(d);
    return right == CHECK_ROWS;
}

/* Returns 0 where all checks pass. */
int palaver_check(void) {
    return !(check_dtype(FLOAT32) && check_dtype(BFLOAT16) && (!palaver_has_float16() || check_dtype(FLOAT16)));
}
