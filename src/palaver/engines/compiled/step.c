/* New tokens of several sequences through a plain decoder, in one call.

   A row is a new token of a sequence. What is computed for a row depends on the tokens before it in its sequence and on
   nothing else: not on the other rows, nor on how many were computed at once, nor on the number of threads, for the order
   of every sum is the same. Weights lie in panels of 64 outputs, [panel][input][64], in the narrowest type that holds
   them without loss; all arithmetic is done in float. Of bfloat16 two vectors lie in one: the first in the lower halves of
   its words, the second in the upper ones, so that a shift or a mask widens them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define LANES 16 /* numbers in a vector */
#define WIDE 4   /* vectors side by side in a panel */
#define PANEL (LANES * WIDE)
#define ROWS 8 /* rows multiplied at once */
#define DEEP 256 /* inputs multiplied before the next rows' turn: their weights stay close by */
#define QUERIES 8 /* queries of one head's keys attended for at once */
#define KEYS 128 /* keys looked at before their values are */
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
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

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
    int64_t rows, threads; /* the most there may be of each */
} model;

/* Where a row's keys and values are. Those of one layer lie `member` apart, key first; heads `head` apart. */
typedef struct {
    float *lane;
    int64_t member, head;
    int64_t token, position;
    int64_t asked; /* whether its logits are wanted */
} row;

/* Rows that are attended for at once: next to each other in one sequence. */
typedef struct {
    int64_t first, count;
} run;

typedef struct {
    model m;
    float *x, *normed, *mixed, *seen, *inner; /* [rows][...] */
    run *runs;
    float **own; /* of each thread: queries, then what they have seen so far, then scores, then tiles */
} decoder;

typedef struct {
    const decoder *d;
    const row *rows;
    const float *turns; /* [position][size / 2][2]: cosine and sine */
    float *logits;
    int64_t count, runs, asked, thread, threads;
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

ALWAYS int64_t bytes(int kind) { return kind == FLOAT32 ? 4 : 2; }

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
ALWAYS vec widened(int kind, const void *row, int k) {
    if (kind == BFLOAT16) {
        words both = *(const words *)((const uint16_t *)row + k / 2 * 2 * LANES);
        return k % 2 ? (vec)(both & 0xffff0000u) : (vec)(both << 16);
    }
    if (kind == FLOAT16) return widened_halves((const uint16_t *)row + k * LANES);
    return load((const float *)row + k * LANES);
}

/* `rows` rows of x times `wide` vectors of a panel, from the vector `from` on, onto tile[rows][PANEL]. */
ALWAYS void block(int kind, int rows, int wide, const void *weights, int64_t in, int from, const float *x,
                  int64_t apart, float *tile) {
    vec sums[ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++) sums[r][k] = load(tile + r * PANEL + (from + k) * LANES);
    for (int64_t i = 0; i < in; i++) {
        vec column[WIDE];
        const char *row = (const char *)weights + i * PANEL * bytes(kind);
        fetch(row + AHEAD, wide * LANES * bytes(kind));
        for (int k = 0; k < wide; k++) column[k] = widened(kind, row, from + k);
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

/* Up to ROWS rows of x times `in` inputs of a panel, from the input `from` on, onto the tile. */
static void times_panel(const matrix *by, int64_t panel, int64_t from, int64_t in, int64_t rows, const float *x,
                        int64_t apart, float *tile) {
    int64_t at = (panel * by->in + from) * PANEL;
    if (by->kind == BFLOAT16)
        panel_of_kind(BFLOAT16, rows, (const uint16_t *)by->weights + at, in, x + from, apart, tile);
    else if (by->kind == FLOAT16)
        panel_of_kind(FLOAT16, rows, (const uint16_t *)by->weights + at, in, x + from, apart, tile);
    else
        panel_of_kind(FLOAT32, rows, (const float *)by->weights + at, in, x + from, apart, tile);
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

/* This thread's share of y = x * weights, or onto y, or gated, for so many rows. */
static void multiply(const work *w, const matrix *by, int64_t rows, const float *x, int64_t apart, float *y,
                     int64_t y_apart, enum ending ending) {
    int64_t panels = (by->out + PANEL - 1) / PANEL, width = ending == GATED ? PANEL / 2 : PANEL;
    int64_t stop = first_of(panels, w->thread + 1, w->threads), deep = rows > ROWS ? DEEP : by->in;
    for (int64_t panel = first_of(panels, w->thread, w->threads); panel < stop; panel++) {
        for (int64_t k = 0; k < rows * PANEL; k += LANES) store(w->tiles + k, all(0));
        for (int64_t from = 0; from < by->in; from += deep) {
            int64_t in = by->in - from < deep ? by->in - from : deep;
            for (int64_t r = 0; r < rows; r += ROWS)
                times_panel(by, panel, from, in, rows - r < ROWS ? rows - r : ROWS, x + r * apart, apart,
                            w->tiles + r * PANEL);
        }
        for (int64_t r = 0; r < rows; r++)
            finish(ending, by, w->tiles + r * PANEL, panel * width, y + r * y_apart);
    }
}

/* norms and turns */

static void norm_to(const norm *by, const float *x, int64_t size, float *y) {
    vec squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / size + by->epsilon);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(by->weight + i));
}

/* This thread's share of the rows, normed. */
static void norm_rows(const work *w, const norm *by) {
    int64_t hidden = w->d->m.hidden, stop = first_of(w->count, w->thread + 1, w->threads);
    for (int64_t r = first_of(w->count, w->thread, w->threads); r < stop; r++)
        norm_to(by, w->d->x + r * hidden, hidden, w->d->normed + r * hidden);
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

/* What a query has seen so far: its largest score, and the sum of its weights relative to that. */
typedef struct {
    float most, total;
} softmax;

/* From the scores of up to KEYS keys, of which the query sees `length`, to weights. Gives what earlier ones shrink by. */
static float weigh(float *scores, int64_t length, int64_t end, softmax *so_far) {
    const ints place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec most = all(so_far->most), total = all(0);
    for (int64_t t = 0; t < end; t += LANES)
        most = larger(either(place < (int32_t)(length - t), load(scores + t), most), most);
    float peak = largest(most);
    for (int64_t t = 0; t < end; t += LANES) {
        vec weights = either(place < (int32_t)(length - t), exponential(load(scores + t) - peak), all(0));
        store(scores + t, weights);
        total += weights;
    }
    float shrink = exponential(all(so_far->most - peak))[0];
    *so_far = (softmax){peak, so_far->total * shrink + sum(total)};
    return shrink;
}

/* The values of up to KEYS keys, by weight, onto what was seen before. */
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
    int64_t size = w->d->m.size, all_keys = length + (count - 1) / group;
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
    return w->rows[r].lane + 2 * depth * w->rows[r].member + head * w->rows[r].head;
}

ALWAYS const float *mixed_of(const work *w, int64_t r, int64_t head) {
    const model *m = &w->d->m;
    return w->d->mixed + (r * (m->heads + 2 * m->shared) + head) * m->size;
}

/* This thread's share of the rows' keys and values, to where they are kept. */
static void write_rows(const work *w, const layer *l, int64_t depth) {
    const model *m = &w->d->m;
    int64_t size = m->size, tasks = w->count * m->shared, stop = first_of(tasks, w->thread + 1, w->threads);
    for (int64_t task = first_of(tasks, w->thread, w->threads); task < stop; task++) {
        int64_t r = task / m->shared, head = task % m->shared, position = w->rows[r].position;
        float *key = keys_of(w, r, depth, head) + position * size, *value = key + w->rows[r].member;
        const float *new = mixed_of(w, r, m->heads + m->shared + head);
        turn(w, l, mixed_of(w, r, m->heads + head), m->heads + head, position, 1.0f, key);
        for (int64_t i = 0; i < size; i++) value[i] = new[i];
    }
}

/* The queries of one run's rows that share a key, `count` of each row from `start` on. */
static void attend_run(const work *w, const layer *l, int64_t depth, const run *at, int64_t head, int64_t start,
                       int64_t count) {
    const model *m = &w->d->m;
    int64_t size = m->size, first = head * (m->heads / m->shared) + start;
    for (int64_t n = 0; n < at->count; n++)
        for (int64_t g = 0; g < count; g++)
            turn(w, l, mixed_of(w, at->first + n, first + g), first + g, w->rows[at->first + n].position, m->scale,
                 w->queries + (n * count + g) * size);
    const float *keys = keys_of(w, at->first, depth, head);
    attend(w, at->count * count, count, keys, keys + w->rows[at->first].member, w->rows[at->first].position + 1);
    for (int64_t n = 0; n < at->count; n++)
        for (int64_t i = 0; i < count * size; i++)
            w->d->seen[((at->first + n) * m->heads + first) * size + i] = w->blended[n * count * size + i];
}

static int wanted(const work *w, const run *at) {
    for (int64_t r = at->first; r < at->first + at->count; r++)
        if (w->rows[r].asked) return 1;
    return 0;
}

static void attend_rows(const work *w, const layer *l, int64_t depth) {
    const model *m = &w->d->m;
    int64_t group = m->heads / m->shared, tasks = w->runs * m->shared;
    int64_t stop = first_of(tasks, w->thread + 1, w->threads);
    for (int64_t task = first_of(tasks, w->thread, w->threads); task < stop; task++) {
        const run *at = w->d->runs + task / m->shared;
        if (depth + 1 == m->depth && !wanted(w, at)) continue;
        for (int64_t start = 0; start < group; start += QUERIES)
            attend_run(w, l, depth, at, task % m->shared, start, group - start < QUERIES ? group - start : QUERIES);
    }
}

/* Moves the rows that are asked for to the front: nothing comes of the others any more. */
static void gather(const work *w) {
    const decoder *d = w->d;
    int64_t hidden = d->m.hidden, seen = d->m.heads * d->m.size, found = 0;
    for (int64_t r = 0; r < w->count; r++) {
        if (!w->rows[r].asked) continue;
        for (int64_t i = 0; i < hidden; i++) d->x[found * hidden + i] = d->x[r * hidden + i];
        for (int64_t i = 0; i < seen; i++) d->seen[found * seen + i] = d->seen[r * seen + i];
        found++;
    }
}

/* the pass */

#ifdef _OPENMP
#define TOGETHER _Pragma("omp barrier")
#else
#define TOGETHER
#endif

static void pass(work w) {
    const decoder *d = w.d;
    const model *m = &d->m;
    int64_t hidden = m->hidden, mixed = (m->heads + 2 * m->shared) * m->size, seen = m->heads * m->size;
    for (int64_t depth = 0; depth < m->depth; depth++) {
        const layer *l = m->layers + depth;
        norm_rows(&w, &l->before);
        TOGETHER
        multiply(&w, &l->project, w.count, d->normed, hidden, d->mixed, mixed, SET);
        TOGETHER
        write_rows(&w, l, depth);
        if (!w.asked && depth + 1 == m->depth) return; /* the rest would lead to logits and to nothing else */
        TOGETHER
        attend_rows(&w, l, depth);
        TOGETHER
        if (depth + 1 == m->depth && w.asked < w.count) {
            if (w.thread == 0) gather(&w);
            w.count = w.asked;
            TOGETHER
        }
        multiply(&w, &l->output, w.count, d->seen, seen, d->x, hidden, ADD);
        TOGETHER
        norm_rows(&w, &l->after);
        TOGETHER
        multiply(&w, &l->gate_up, w.count, d->normed, hidden, d->inner, m->inner, GATED);
        TOGETHER
        multiply(&w, &l->down, w.count, d->inner, m->inner, d->x, hidden, ADD);
        TOGETHER
    }
    norm_rows(&w, &m->norm);
    TOGETHER
    multiply(&w, &m->logits, w.count, d->normed, hidden, w.logits, m->logits.out, SET);
}

/* Which rows are attended for at once. */
static int64_t divide(const decoder *d, const row *rows, int64_t count) {
    int64_t group = d->m.heads / d->m.shared, most = group < QUERIES ? QUERIES / group : 1, runs = 0;
    for (int64_t r = 0; r < count; r++) {
        run *last = d->runs + runs - 1;
        if (r && last->count < most && rows[r].lane == rows[r - 1].lane && rows[r].position == rows[r - 1].position + 1)
            last->count++;
        else
            d->runs[runs++] = (run){r, 1};
    }
    return runs;
}

static void share(work w, int64_t thread, int64_t threads) {
    w.thread = thread, w.threads = threads;
    w.queries = w.d->own[thread];
    w.blended = w.queries + QUERIES * w.d->m.size;
    w.scores = w.blended + QUERIES * w.d->m.size;
    w.tiles = w.scores + QUERIES * KEYS;
    pass(w);
}

/* `count` rows; the logits of those asked for into [asked][outputs]. Rows of one sequence come in their order. */
void palaver_step(const decoder *d, const row *rows, int64_t count, const float *turns, float *logits,
                  int64_t threads) {
    work w = {.d = d, .rows = rows, .turns = turns, .logits = logits, .count = count, .runs = divide(d, rows, count)};
    int64_t hidden = d->m.hidden;
    for (int64_t r = 0; r < count; r++) {
        w.asked += rows[r].asked;
        for (int64_t i = 0; i < hidden; i++) d->x[r * hidden + i] = d->m.embedding[rows[r].token * hidden + i];
    }
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads((int)(threads < d->m.threads ? threads : d->m.threads))
        share(w, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    share(w, 0, 1);
}

static float *numbers(int64_t count) {
    size_t bytes = ((size_t)count * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return aligned_alloc(ALIGNMENT, bytes);
}

void palaver_free(decoder *d) {
    if (!d) return;
    for (int64_t t = 0; d->own && t < d->m.threads; t++) free(d->own[t]);
    free(d->own), free(d->runs);
    free(d->x), free(d->normed), free(d->mixed), free(d->seen), free(d->inner), free(d);
}

/* NULL where there is no memory for it. What the model points to must stay where it is. */
decoder *palaver_new(const model *m) {
    decoder *d = calloc(1, sizeof(decoder));
    if (!d) return NULL;
    d->m = *m;
    d->x = numbers(m->rows * m->hidden);
    d->normed = numbers(m->rows * m->hidden);
    d->runs = calloc(m->rows, sizeof(run));
    d->mixed = numbers(m->rows * (m->heads + 2 * m->shared) * m->size);
    d->seen = numbers(m->rows * m->heads * m->size);
    d->inner = numbers(m->rows * m->inner);
    d->own = calloc(m->threads, sizeof(float *));
    int whole = d->x && d->normed && d->mixed && d->seen && d->inner && d->runs && d->own;
    for (int64_t t = 0; whole && t < m->threads; t++) {
        d->own[t] = numbers(QUERIES * (2 * m->size + KEYS) + m->rows * PANEL);
        whole = d->own[t] != NULL;
    }
    if (whole) return d;
    palaver_free(d);
    return NULL;
}

/* Whether weights can be kept as halves: not every compiler has them. */
int palaver_halves(void) {
#if defined(__AVX512F__) || defined(__F16C__) || defined(__FLT16_MAX__)
    return 1;
#else
    return 0;
#endif
}

/* A trial on a model made up here: whether rows computed together, in two threads, give what each gives alone. It uses
   every kind of weights, so that code for another processor, or a damaged file, ends the trial and not the engine. */

enum { DEPTH = 2, HIDDEN = 32, HEADS = 4, SIZE = 16, INNER = 64, TOKENS = 20, OUTPUTS = PANEL, TRIED = 9 };

static uint32_t next_number(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* Weights of about -0.5 to 0.5: all of them are numbers that every kind holds. */
static matrix made_up(int kind, int64_t in, int64_t out, uint32_t *state) {
    int64_t count = in * ((out + PANEL - 1) / PANEL) * PANEL;
    void *weights = numbers(count);
    for (int64_t i = 0; weights && i < count; i++) {
        uint32_t drawn = next_number(state) >> 16, sign = drawn & 0x8000;
        if (kind == FLOAT32) ((float *)weights)[i] = ((float)drawn - 32768.0f) / 65536.0f;
        if (kind == BFLOAT16) ((uint16_t *)weights)[i] = sign | 0x3e00 | (drawn & 0x7f);
        if (kind == FLOAT16) ((uint16_t *)weights)[i] = sign | 0x3000 | (drawn & 0x3ff);
    }
    return (matrix){weights, NULL, in, out, kind};
}

static int same(const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(a[i] == b[i])) return 0; /* NaN is no answer either */
    return 1;
}

static int check_kind(int kind) {
    uint32_t state = 1;
    int64_t mixed = 3 * HEADS * SIZE / 2, lane = 2 * DEPTH * HEADS / 2 * TOKENS * SIZE, right = 0;
    float *ones = numbers(mixed), *embedding = numbers(TOKENS * HIDDEN), *turns = numbers(TOKENS * SIZE);
    float *kept = calloc(2 * lane, sizeof(float)), *together = numbers(TRIED * OUTPUTS), *alone = numbers(OUTPUTS);
    layer layers[DEPTH] = {0};
    for (int64_t i = 0; ones && i < mixed; i++) ones[i] = 1.0f;
    for (int64_t i = 0; embedding && i < TOKENS * HIDDEN; i++) embedding[i] = (next_number(&state) >> 24) / 256.0f;
    for (int64_t i = 0; turns && i < TOKENS * SIZE; i++) turns[i] = i % 2 ? 0.6f : 0.8f;
    for (int64_t depth = 0; depth < DEPTH; depth++)
        layers[depth] = (layer){.before = {ones, 1e-6f}, .after = {ones, 1e-6f}, .queries_keys = {ones, 1e-6f},
                                .project = made_up(kind, HIDDEN, 2 * HEADS * SIZE, &state),
                                .output = made_up(kind, HEADS * SIZE, HIDDEN, &state),
                                .gate_up = made_up(kind, HIDDEN, 2 * INNER, &state),
                                .down = made_up(kind, INNER, HIDDEN, &state)};
    model m = {layers, embedding, {ones, 1e-6f}, made_up(kind, HIDDEN, OUTPUTS, &state),
               DEPTH, HIDDEN, HEADS, HEADS / 2, SIZE, INNER, 0.25f, TRIED, 2};
    decoder *d = palaver_new(&m);
    if (d && ones && embedding && turns && kept && together && alone) {
        row rows[TRIED];
        for (int64_t r = 0; r < TRIED; r++)
            rows[r] = (row){kept, HEADS / 2 * TOKENS * SIZE, TOKENS * SIZE, r * 7 % TOKENS, r, 1};
        palaver_step(d, rows, TRIED, turns, together, 2);
        for (int64_t r = 0; r < TRIED; r++) {
            rows[r].lane = kept + lane;
            palaver_step(d, rows + r, 1, turns, alone, 1);
            right += same(alone, together + r * OUTPUTS, OUTPUTS);
        }
    }
    for (int64_t depth = 0; depth < DEPTH; depth++) {
        layer *l = layers + depth;
        free((void *)l->project.weights), free((void *)l->output.weights);
        free((void *)l->gate_up.weights), free((void *)l->down.weights);
    }
    free((void *)m.logits.weights), free(ones), free(embedding), free(turns), free(kept), free(together), free(alone);
    palaver_free(d);
    return right == TRIED;
}

/* 0 where all is well. */
int palaver_check(void) {
    return !(check_kind(FLOAT32) && check_kind(BFLOAT16) && (!palaver_halves() || check_kind(FLOAT16)));
}
