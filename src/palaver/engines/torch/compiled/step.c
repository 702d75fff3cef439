/* The next token of several sequences through a plain decoder, in one call.

   A row is a sequence with one new token. What is computed for a row doesn't depend on the other rows, nor on the
   number of threads: the order of every sum is the same. Weights lie in panels of 64 outputs, [panel][input][64], in the
   narrowest type that holds them without loss; all arithmetic is done in float. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define LANES 16 /* numbers in a vector */
#define WIDE 4   /* vectors side by side in a panel */
#define PANEL (LANES * WIDE)
#define ROWS 8 /* rows multiplied at once */
#define QUERIES 8 /* heads of one key attended for at once */
#define ALIGNMENT 64
#define AHEAD 2048 /* bytes of weights fetched ahead; the processor itself stops at the end of a page */

#ifdef __AVX512F__
#define SUMS 16 /* vectors of sums that fit into registers */
#else
#define SUMS 6
#endif

#define ALWAYS static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4), may_alias)); /* anywhere in memory */
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32), aligned(2), may_alias));

enum kind { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *weights;
    const float *bias; /* or NULL */
    int64_t in, out;
    int64_t kind;
} matrix;

typedef struct {
    const float *weight;
    float epsilon;
} norm;

typedef struct {
    norm before, after, queries_keys; /* the last with a row for each head, or NULL */
    matrix project, output, gate_up, down;
} layer;

typedef struct {
    const layer *layers;
    const float *embedding;
    norm norm;
    matrix logits;
    int64_t depth, hidden, heads, shared, size, inner;
    float scale;
    int64_t rows, context; /* the most there may be of each */
    int64_t threads;
} model;

/* Where a row's keys and values are. Those of one layer lie `member` apart, key first; heads `head` apart. */
typedef struct {
    float *lane;
    int64_t member, head;
    int64_t token, position;
} row;

typedef struct {
    model m;
    float *x, *mixed, *seen, *inner; /* [rows][...] */
    float **own;                     /* of each thread: normed rows, then queries, then scores */
} decoder;

typedef struct {
    const decoder *d;
    const row *rows;
    const float *turns; /* [position][size / 2][2]: cosine and sine */
    float *logits;
    int64_t count, thread, threads;
    float *normed, *queries, *scores;
} work;

/* numbers */

ALWAYS vec all(float x) { return (vec){0} + x; }
ALWAYS vec load(const float *from) { return *(const loose *)from; }
ALWAYS void store(float *to, vec x) { *(loose *)to = x; }

ALWAYS vec either(ints which, vec yes, vec no) { return (vec)(((ints)yes & which) | ((ints)no & ~which)); }
ALWAYS vec larger(vec a, vec b) { return either(a > b, a, b); }
ALWAYS vec smaller(vec a, vec b) { return either(a < b, a, b); }

/* Sums of neighbours: first those of a, then those of b. */
ALWAYS vec neighbours(vec a, vec b) {
    vec even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    vec odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
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

ALWAYS int64_t bytes(int kind) { return kind == FLOAT32 ? 4 : 2; }

/* Asks for what is needed soon. */
ALWAYS void fetch(const void *from, int64_t size) {
    for (int64_t at = 0; at < size; at += ALIGNMENT) __builtin_prefetch((const char *)from + at);
}

ALWAYS vec widened(int kind, const void *weights, int64_t at) {
    if (kind == BFLOAT16) {
        words wide = __builtin_convertvector(*(const shorts *)((const uint16_t *)weights + at), words);
        return (vec)(wide << 16);
    }
#ifdef __FLT16_MAX__
    if (kind == FLOAT16) {
        typedef _Float16 halves __attribute__((vector_size(32), aligned(2), may_alias));
        return __builtin_convertvector(*(const halves *)((const _Float16 *)weights + at), vec);
    }
#endif
    return load((const float *)weights + at);
}

/* `rows` rows of x times `wide` vectors of a panel, from the vector `from` on, into tile[rows][PANEL]. */
ALWAYS void block(int kind, int rows, int wide, const void *weights, int64_t in, int from, const float *x,
                  int64_t apart, float *tile) {
    vec sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) sums[r][k] = all(0);
    for (int64_t i = 0; i < in; i++) {
        vec column[WIDE];
        fetch((const char *)weights + i * PANEL * bytes(kind) + AHEAD, wide * LANES * bytes(kind));
        for (int k = 0; k < wide; k++) column[k] = widened(kind, weights, i * PANEL + (from + k) * LANES);
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < wide; k++) sums[r][k] += column[k] * x[r * apart + i];
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) store(tile + r * PANEL + (from + k) * LANES, sums[r][k]);
}

ALWAYS void rows_of_panel(int kind, int rows, const void *weights, int64_t in, const float *x, int64_t apart,
                          float *tile) {
    const int wide = rows * WIDE <= SUMS ? WIDE : rows * 2 <= SUMS ? 2 : 1;
    for (int from = 0; from < WIDE; from += wide) block(kind, rows, wide, weights, in, from, x, apart, tile);
}

ALWAYS void panel_of_kind(int kind, int64_t rows, const void *weights, int64_t in, const float *x, int64_t apart,
                          float *tile) {
#define CASE(n) \
    case n: \
        rows_of_panel(kind, n, weights, in, x, apart, tile); \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
}

/* Up to ROWS rows of x times one panel. */
static void times_panel(const matrix *by, int64_t panel, int64_t rows, const float *x, int64_t apart, float *tile) {
    int64_t at = panel * by->in * PANEL;
    if (by->kind == BFLOAT16)
        panel_of_kind(BFLOAT16, rows, (const uint16_t *)by->weights + at, by->in, x, apart, tile);
    else if (by->kind == FLOAT16)
        panel_of_kind(FLOAT16, rows, (const uint16_t *)by->weights + at, by->in, x, apart, tile);
    else
        panel_of_kind(FLOAT32, rows, (const float *)by->weights + at, by->in, x, apart, tile);
}

ALWAYS int64_t first_of(int64_t count, int64_t thread, int64_t threads) { return count * thread / threads; }

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
    int64_t count = by->out - out < PANEL ? by->out - out : PANEL;
    for (int64_t k = 0; k < count; k++) {
        float value = tile[k] + (by->bias ? by->bias[out + k] : 0.0f);
        y[out + k] = ending == ADD ? y[out + k] + value : value;
    }
}

/* This thread's share of y = x * weights, or onto y, or gated. */
static void multiply(const work *w, const matrix *by, const float *x, int64_t apart, float *y, int64_t y_apart,
                     enum ending ending) {
    float tile[ROWS * PANEL] __attribute__((aligned(ALIGNMENT)));
    int64_t panels = (by->out + PANEL - 1) / PANEL, width = ending == GATED ? PANEL / 2 : PANEL;
    int64_t stop = first_of(panels, w->thread + 1, w->threads);
    for (int64_t panel = first_of(panels, w->thread, w->threads); panel < stop; panel++)
        for (int64_t start = 0; start < w->count; start += ROWS) {
            int64_t rows = w->count - start < ROWS ? w->count - start : ROWS;
            times_panel(by, panel, rows, x + start * apart, apart, tile);
            for (int64_t r = 0; r < rows; r++)
                finish(ending, by, tile + r * PANEL, panel * width, y + (start + r) * y_apart);
        }
}

/* norms and turns */

static void norm_to(const norm *by, const float *x, int64_t size, float *y) {
    vec squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / size + by->epsilon);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(by->weight + i));
}

static const float *normed(const work *w, const norm *by, const float *x) {
    int64_t hidden = w->d->m.hidden;
    for (int64_t r = 0; r < w->count; r++) norm_to(by, x + r * hidden, hidden, w->normed + r * hidden);
    return w->normed;
}

/* Turned by the position; the two halves of a head come out in pairs. */
static void turn(const work *w, const layer *l, const float *x, int64_t head, int64_t position, float scale, float *y) {
    int64_t size = w->d->m.size, half = size / 2;
    float even[size] __attribute__((aligned(ALIGNMENT)));
    if (l->queries_keys.weight) {
        norm by = {l->queries_keys.weight + head * size, l->queries_keys.epsilon};
        norm_to(&by, x, size, even);
        x = even;
    }
    const float *turns = w->turns + position * size;
    for (int64_t j = 0; j < half; j++) {
        float cosine = turns[2 * j], sine = turns[2 * j + 1];
        y[2 * j] = (x[j] * cosine - x[j + half] * sine) * scale;
        y[2 * j + 1] = (x[j + half] * cosine + x[j] * sine) * scale;
    }
}

/* attention */

/* The scores of `count` queries and LANES keys from `at` on. */
ALWAYS void score(int count, const float *queries, const float *keys, int64_t size, int64_t apart, float *scores) {
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
        store(scores + g * apart, sums[0]);
    }
}

/* From scores to weights whose sum is told, not yet made one. */
static float weigh(float *scores, int64_t length) {
    ints place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec most = all(-INFINITY), total = all(0);
    for (int64_t t = 0; t < length; t += LANES) {
        ints within = place < (int32_t)(length - t);
        vec these = either(within, load(scores + t), all(-INFINITY));
        store(scores + t, these);
        most = larger(these, most);
    }
    float peak = largest(most);
    for (int64_t t = 0; t < length; t += LANES) {
        ints within = place < (int32_t)(length - t);
        vec weights = either(within, exponential(load(scores + t) - peak), all(0));
        store(scores + t, weights);
        total += weights;
    }
    return sum(total);
}

ALWAYS void blend(int count, const float *weights, int64_t apart, const float *values, int64_t size, int64_t length,
                  const float *totals, float *out) {
    for (int64_t i = 0; i < size; i += LANES) {
        vec sums[QUERIES];
        for (int g = 0; g < count; g++) sums[g] = all(0);
        for (int64_t t = 0; t < length; t++) {
            vec value = load(values + t * size + i);
            __builtin_prefetch(values + (t + 2 * LANES) * size + i);
            for (int g = 0; g < count; g++) sums[g] += value * weights[g * apart + t];
        }
        for (int g = 0; g < count; g++) store(out + g * size + i, sums[g] / totals[g]);
    }
}

ALWAYS void attend_some(int count, const work *w, const float *queries, const float *keys, const float *values,
                        int64_t length, float *out) {
    int64_t size = w->d->m.size, apart = w->d->m.context;
    float totals[QUERIES];
    for (int64_t t = 0; t < length; t += LANES) score(count, queries, keys + t * size, size, apart, w->scores + t);
    for (int g = 0; g < count; g++) totals[g] = weigh(w->scores + g * apart, length);
    blend(count, w->scores, apart, values, size, length, totals, out);
}

static void attend(const work *w, int64_t count, const float *queries, const float *keys, const float *values,
                   int64_t length, float *out) {
#define CASE(n) \
    case n: \
        attend_some(n, w, queries, keys, values, length, out); \
        break;
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
}

/* One row and one key's heads: its key and value are written, its queries look at all up to itself. */
static void attend_head(const work *w, const layer *l, int64_t depth, int64_t r, int64_t head) {
    const model *m = &w->d->m;
    const row *at = w->rows + r;
    int64_t size = m->size, group = m->heads / m->shared, position = at->position;
    const float *mixed = w->d->mixed + r * (m->heads + 2 * m->shared) * size;
    float *keys = at->lane + 2 * depth * at->member + head * at->head, *values = keys + at->member;
    turn(w, l, mixed + (m->heads + head) * size, m->heads + head, position, 1.0f, keys + position * size);
    for (int64_t i = 0; i < size; i++) values[position * size + i] = mixed[(m->heads + m->shared + head) * size + i];
    for (int64_t start = 0; start < group; start += QUERIES) {
        int64_t first = head * group + start, count = group - start < QUERIES ? group - start : QUERIES;
        for (int64_t g = 0; g < count; g++)
            turn(w, l, mixed + (first + g) * size, first + g, position, m->scale, w->queries + g * size);
        attend(w, count, w->queries, keys, values, position + 1, w->d->seen + (r * m->heads + first) * size);
    }
}

static void attend_all(const work *w, const layer *l, int64_t depth) {
    int64_t shared = w->d->m.shared, tasks = w->count * shared;
    int64_t stop = first_of(tasks, w->thread + 1, w->threads);
    for (int64_t task = first_of(tasks, w->thread, w->threads); task < stop; task++)
        attend_head(w, l, depth, task / shared, task % shared);
}

/* the pass */

#ifdef _OPENMP
#define TOGETHER _Pragma("omp barrier")
#else
#define TOGETHER
#endif

static void pass(const work *w) {
    const decoder *d = w->d;
    const model *m = &d->m;
    int64_t hidden = m->hidden, mixed = (m->heads + 2 * m->shared) * m->size, seen = m->heads * m->size;
    if (w->thread == 0)
        for (int64_t r = 0; r < w->count; r++)
            for (int64_t i = 0; i < hidden; i++) d->x[r * hidden + i] = m->embedding[w->rows[r].token * hidden + i];
    TOGETHER
    for (int64_t depth = 0; depth < m->depth; depth++) {
        const layer *l = m->layers + depth;
        multiply(w, &l->project, normed(w, &l->before, d->x), hidden, d->mixed, mixed, SET);
        TOGETHER
        attend_all(w, l, depth);
        TOGETHER
        multiply(w, &l->output, d->seen, seen, d->x, hidden, ADD);
        TOGETHER
        multiply(w, &l->gate_up, normed(w, &l->after, d->x), hidden, d->inner, m->inner, GATED);
        TOGETHER
        multiply(w, &l->down, d->inner, m->inner, d->x, hidden, ADD);
        TOGETHER
    }
    multiply(w, &m->logits, normed(w, &m->norm, d->x), hidden, w->logits, m->logits.out, SET);
}

static void share(const decoder *d, const row *rows, int64_t count, const float *turns, float *logits, int64_t thread,
                  int64_t threads) {
    float *normed = d->own[thread], *queries = normed + d->m.rows * d->m.hidden;
    work w = {d, rows, turns, logits, count, thread, threads, normed, queries, queries + QUERIES * d->m.size};
    pass(&w);
}

/* `count` rows, their logits into [count][outputs]. */
void palaver_step(const decoder *d, const row *rows, int64_t count, const float *turns, float *logits) {
#ifdef _OPENMP
    if (d->m.threads > 1) {
#pragma omp parallel num_threads((int)d->m.threads)
        share(d, rows, count, turns, logits, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    share(d, rows, count, turns, logits, 0, 1);
}

static float *numbers(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return aligned_alloc(ALIGNMENT, bytes);
}

void palaver_free(decoder *d) {
    if (!d) return;
    for (int64_t t = 0; d->own && t < d->m.threads; t++) free(d->own[t]);
    free(d->own), free(d->x), free(d->mixed), free(d->seen), free(d->inner), free(d);
}

/* NULL where there is no memory for it. What the model points to must stay where it is. */
decoder *palaver_new(const model *m) {
    decoder *d = calloc(1, sizeof(decoder));
    if (!d) return NULL;
    d->m = *m;
    d->x = numbers(m->rows * m->hidden);
    d->mixed = numbers(m->rows * (m->heads + 2 * m->shared) * m->size);
    d->seen = numbers(m->rows * m->heads * m->size);
    d->inner = numbers(m->rows * m->inner);
    d->own = calloc(m->threads, sizeof(float *));
    int whole = d->x && d->mixed && d->seen && d->inner && d->own;
    for (int64_t t = 0; whole && t < m->threads; t++) {
        d->own[t] = numbers(m->rows * m->hidden + QUERIES * (m->size + m->context));
        whole = d->own[t] != NULL;
    }
    if (whole) return d;
    palaver_free(d);
    return NULL;
}

/* Whether weights can be kept as halves: not every compiler has them. */
int palaver_halves(void) {
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;
#endif
}
