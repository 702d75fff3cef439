/* A forward pass of a plain decoder over new tokens of several sequences.

   A row is a new token of a sequence. Its bits depend on the tokens before it in its sequence and on nothing else: not
   on the other rows, the chunk size or the number of threads, because the order of every sum is fixed. Weights are
   stored in panels (panels.h), in the narrowest type that holds them without loss. Arithmetic is done in float, but for
   the products with quantised weights (products.h). */

#include "products.h"
#include "threads.h"

#define QUERIES 8 /* queries of one KV head whose sums fit into registers */
#define SPANS 8 /* spans of one sequence that share what is loaded of its keys and values */
#define KEYS 128 /* keys scored before their values are added */
#define FETCHED_KEYS 32 /* keys and values fetched ahead */
#define TASK_FLOATS 16384 /* of rows that one task norms, embeds or stores: less is done sooner than shared */
#ifdef __AVX512F__
#define SCORED_KEYS 8 /* keys whose products with two queries fit into registers */
#define TURNED_SIZE 64 /* of heads up to which keys are transposed: there adding up lanes takes most of the time */
#define TURNED_QUERIES 4
#else
#define SCORED_KEYS 2
#define TURNED_SIZE 0
#define TURNED_QUERIES 1
#endif

typedef struct {
    const float *weight;
    float epsilon;
} norm;

typedef struct {
    norm input_norm, post_attention_norm, qk_norm; /* qk_norm: a row of weights for each head, or NULL */
    matrix qkv_proj[3], o_proj, gate_up_proj[2], down_proj; /* qkv_proj: some may be empty */
} layer;

typedef struct {
    const layer *layers;
    matrix embedding; /* an output for each token */
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

/* Rows whose queries are attended for at once: consecutive tokens of one sequence. Or spans that follow each other in
   one sequence. */
typedef struct {
    int64_t first, count;
} span;

typedef struct {
    model m;
    float *x, *normed, *qkv, *attended, *intermediate; /* [rows][...] */
    rounded_group *rounded; /* of the rows of a product, [rows][groups] */
    span *spans, *groups; /* groups: of spans */
    float **scratch; /* of each thread */
    team *team;
} decoder;

/* A product of rows: y = x * weights, or onto y, with `count` matrices side by side. */
typedef struct {
    const matrix *by;
    int64_t count;
    row_numbers x;
    float *y;
    int64_t y_apart;
    int adds;
} rows_product;

/* A pass, and what its phase computes. */
typedef struct {
    const decoder *d;
    const row *rows;
    const float *rotations; /* [position][head_dim / 2][2]: cosine and sine */
    float *logits;
    int64_t count, groups, logit_rows, threads;
    int64_t depth; /* of the layer */
    const layer *l;
    const norm *norm;
    rows_product product;
} work;

/* The memory of a thread for one task. */
typedef struct {
    float *queries, *blended, *scores, *turned; /* of the spans of a group: queries and weighted values so far */
    float *tiles;
} scratch;

/* The floats that attention needs in a thread. */
static int64_t attention_floats(const model *m) {
    return 2 * SPANS * QUERIES * m->head_dim + QUERIES * KEYS + KEYS * at_most(m->head_dim, TURNED_SIZE);
}

static scratch scratch_of(const decoder *d, int64_t thread) {
    scratch s = {.queries = d->scratch[thread]};
    s.blended = s.queries + SPANS * QUERIES * d->m.head_dim;
    s.scores = s.blended + SPANS * QUERIES * d->m.head_dim;
    s.turned = s.scores + QUERIES * KEYS;
    s.tiles = s.queries + attention_floats(&d->m);
    return s;
}

/* Computes a phase of the pass, in all of its threads if there is more than one task. */
static void share(const work *w, int64_t tasks, task_function *run) {
    if (w->threads > 1 && tasks > 1 && tasks <= MAX_TASKS) run_phase(w->d->team, tasks, run, w);
    else
        for (int64_t task = 0; task < tasks; task++) run(w, task, 0);
}

/* Rows of so many floats each are divided into tasks. */
ALWAYS int64_t rows_of_task(int64_t floats) { return floats < TASK_FLOATS ? TASK_FLOATS / floats : 1; }
ALWAYS int64_t row_tasks(int64_t rows, int64_t floats) {
    return (rows + rows_of_task(floats) - 1) / rows_of_task(floats);
}

/* matrices */

/* Writes the sums of a panel and their bias to y, or adds them. */
ALWAYS void finish(const matrix *by, int64_t panel, const float *tile, int adds, float *y) {
    int64_t out = panel * PANEL, count = at_most(by->outputs - out, PANEL);
    for (int64_t k = 0; k < count; k++) {
        float value = tile[k] + (by->bias ? by->bias[out + k] : 0.0f);
        y[out + k] = adds ? y[out + k] + value : value;
    }
}

/* A task is a panel. */
static void multiply_task(const void *context, int64_t panel, int64_t thread) {
    const work *w = context;
    const rows_product *p = &w->product;
    const matrix *one = p->by;
    scratch s = scratch_of(w->d, thread);
    int64_t out = 0;
    for (; panel >= panel_count(one->outputs); one++) panel -= panel_count(one->outputs), out += one->outputs;
    multiply_panel(one, panel, w->count, &p->x, s.tiles);
    for (int64_t r = 0; r < w->count; r++)
        finish(one, panel, s.tiles + r * PANEL, p->adds, p->y + r * p->y_apart + out);
}

static void round_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    const rows_product *p = &w->product;
    int64_t inputs = p->by->inputs, rows = rows_of_task(inputs), stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++)
        round_row(p->x.floats + r * p->x.apart, inputs, w->d->rounded + r * rounded_groups(inputs));
}

/* Sets the product that is computed next, and rounds its rows if it has quantised weights. */
static void begin_product(work *w, rows_product product) {
    int rounds = 0;
    for (int64_t n = 0; n < product.count; n++) rounds |= is_quantised(product.by[n].dtype);
    w->product = product;
    if (rounds) share(w, row_tasks(w->count, product.by->inputs), round_task);
    w->product.x.integers = w->d->rounded;
}

static void multiply(work *w, rows_product product) {
    int64_t panels = 0;
    for (int64_t n = 0; n < product.count; n++) panels += panel_count(product.by[n].outputs);
    begin_product(w, product);
    share(w, panels, multiply_task);
}

ALWAYS vec biased(const matrix *by, int64_t out, const float *sums) {
    return by->bias ? load(sums) + load(by->bias + out) : load(sums);
}

/* A panel of y = silu(x * gate) * (x * up). The rows of y have room for whole panels. */
static void gate_task(const void *context, int64_t panel, int64_t thread) {
    const work *w = context;
    const rows_product *p = &w->product;
    const matrix *gate = p->by, *up = gate + 1;
    scratch s = scratch_of(w->d, thread);
    float *gates = s.tiles, *ups = gates + w->count * PANEL;
    multiply_panel(gate, panel, w->count, &p->x, gates);
    multiply_panel(up, panel, w->count, &p->x, ups);
    for (int64_t r = 0; r < w->count; r++)
        for (int64_t k = 0, out = panel * PANEL; k < PANEL; k += LANES) {
            vec open = biased(gate, out + k, gates + r * PANEL + k);
            vec through = biased(up, out + k, ups + r * PANEL + k);
            store(p->y + r * p->y_apart + out + k, open / (1.0f + exponential(-open)) * through);
        }
}

/* norms and rotary embeddings */

static void norm_to(const norm *by, const float *x, int64_t size, float *y) {
    vec squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(sum(squares) / size + by->epsilon);
    for (int64_t i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(by->weight + i));
}

static void embed_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    int64_t hidden = w->d->m.hidden_size, rows = rows_of_task(hidden), stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++) {
        if (w->rows[r].embedding) memcpy(w->d->x + r * hidden, w->rows[r].embedding, hidden * sizeof(float));
        else read_output(&w->d->m.embedding, w->rows[r].token, w->d->x + r * hidden);
    }
}

static void norm_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    int64_t hidden = w->d->m.hidden_size, rows = rows_of_task(hidden), stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++)
        norm_to(w->norm, w->d->x + r * hidden, hidden, w->d->normed + r * hidden);
}

static void norm_rows(work *w, const norm *by) {
    w->norm = by;
    share(w, row_tasks(w->count, w->d->m.hidden_size), norm_task);
}

/* Rotates by the row's position; the two halves of a head come out interleaved. */
static void rotate(const work *w, const float *x, int64_t head, int64_t r, float scale, float *y) {
    int64_t size = w->d->m.head_dim, half = size / 2;
    float even[size] __attribute__((aligned(ALIGNMENT)));
    if (w->l->qk_norm.weight) {
        norm by = {w->l->qk_norm.weight + head * size, w->l->qk_norm.epsilon};
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

/* The products of queries and keys, vectors that are to be added up: sums[g * HALF + t]. */
ALWAYS void multiply_keys(int queries, int keys, const float *query, const float *key, int64_t size, vec *sums) {
    vec products[2][HALF];
    for (int g = 0; g < queries; g++)
        for (int t = 0; t < keys; t++) products[g][t] = all(0);
    for (int64_t i = 0; i < size; i += LANES) {
        vec query_part[2];
        for (int g = 0; g < queries; g++) query_part[g] = load(query + g * size + i);
        for (int t = 0; t < keys; t++) {
            vec key_part = load(key + t * size + i);
            KEEP_IN_REGISTER(key_part);
            for (int g = 0; g < queries; g++) products[g][t] += query_part[g] * key_part;
        }
    }
    for (int g = 0; g < queries; g++)
        for (int t = 0; t < keys; t++) sums[g * HALF + t] = products[g][t];
}

/* The scores of `queries` queries, one or two, and LANES keys. */
ALWAYS void score_some(int queries, const float *query, const float *keys, int64_t size, float *scores) {
    vec sums[2][LANES];
    for (int half = 0; half < 2; half++)
        for (int t = 0; t < HALF; t += SCORED_KEYS)
            multiply_keys(queries, SCORED_KEYS, query, keys + (half * HALF + t) * size, size, sums[half] + t);
    if (queries == 1) {
        for (int t = 0; t < HALF; t++) sums[0][HALF + t] = sums[1][t];
        store(scores, totals(sums[0]));
        return;
    }
    for (int half = 0; half < 2; half++) {
        vec both = totals(sums[half]);
        memcpy(scores + half * HALF, &both, sizeof both / 2);
        memcpy(scores + KEYS + half * HALF, (float *)&both + HALF, sizeof both / 2);
    }
}

/* The scores of `count` queries and LANES keys. */
ALWAYS void score(int count, const float *queries, const float *keys, int64_t size, float *scores) {
    for (int g = 0; g + 1 < count; g += 2) score_some(2, queries + g * size, keys, size, scores + g * KEYS);
    if (count % 2) score_some(1, queries + (count - 1) * size, keys, size, scores + (count - 1) * KEYS);
}

/* The sums of those products of queries and LANES keys that `multiply_keys` has in one lane. The numbers of the keys lie
   side by side, [size][KEYS]. */
ALWAYS void multiply_lane(int queries, const float *query, const float *turned, int64_t size, int lane, vec *sums) {
    for (int g = 0; g < queries; g++) sums[g] = all(0);
    for (int64_t i = lane; i < size; i += LANES) {
        vec key = load(turned + i * KEYS);
        KEEP_IN_REGISTER(key);
        for (int g = 0; g < queries; g++) sums[g] += key * query[g * size + i];
    }
}

/* The same for a quarter of the lanes, added up as `totals` does. */
ALWAYS void multiply_quarter(int queries, const float *query, const float *turned, int64_t size, int lane, vec *sums) {
    vec second[TURNED_QUERIES], third[TURNED_QUERIES], fourth[TURNED_QUERIES];
    multiply_lane(queries, query, turned, size, lane, sums);
    multiply_lane(queries, query, turned, size, lane + 1, second);
    for (int g = 0; g < queries; g++) sums[g] += second[g];
    multiply_lane(queries, query, turned, size, lane + 2, third);
    multiply_lane(queries, query, turned, size, lane + 3, fourth);
    for (int g = 0; g < queries; g++) sums[g] += third[g] + fourth[g];
}

/* The scores of `queries` queries and LANES keys. */
ALWAYS void score_turned_some(int queries, const float *query, const float *turned, int64_t size, float *scores) {
    vec first[TURNED_QUERIES], second[TURNED_QUERIES], third[TURNED_QUERIES], fourth[TURNED_QUERIES];
    multiply_quarter(queries, query, turned, size, 0, first);
    multiply_quarter(queries, query, turned, size, LANES / 4, second);
    for (int g = 0; g < queries; g++) first[g] += second[g];
    multiply_quarter(queries, query, turned, size, LANES / 2, third);
    multiply_quarter(queries, query, turned, size, LANES / 4 * 3, fourth);
    for (int g = 0; g < queries; g++) store(scores + g * KEYS, first[g] + (third[g] + fourth[g]));
}

/* The same for `count` queries. */
ALWAYS void score_turned(int count, const float *queries, const float *turned, int64_t size, float *scores) {
    int g = 0;
    for (; g + TURNED_QUERIES <= count; g += TURNED_QUERIES)
        score_turned_some(TURNED_QUERIES, queries + g * size, turned, size, scores + g * KEYS);
    for (; g < count; g++) score_turned_some(1, queries + g * size, turned, size, scores + g * KEYS);
}

#define EXCHANGED(s, l) ((l) & (s) ? LANES + (l) - (s) : (l))
#define REMAINING(s, l) ((l) & (s) ? LANES + (l) : (l) + (s))
#define FOUR_LANES(of, s, l) of(s, (l)), of(s, (l) + 1), of(s, (l) + 2), of(s, (l) + 3)
#define FOR_LANES(of, s) FOUR_LANES(of, s, 0), FOUR_LANES(of, s, 4), FOUR_LANES(of, s, 8), FOUR_LANES(of, s, 12)

/* Transposes LANES vectors: rows and lanes whose numbers differ by `s` change places, for each power of two. */
#define EXCHANGE(s) \
    for (int r = 0; r < LANES; r++) \
        if (!(r & (s))) { \
            vec a = rows[r], b = rows[r + (s)]; \
            rows[r] = PICKED(a, b, FOR_LANES(EXCHANGED, s)); \
            rows[r + (s)] = PICKED(a, b, FOR_LANES(REMAINING, s)); \
        }
ALWAYS void transpose(vec *rows) { EXCHANGE(8) EXCHANGE(4) EXCHANGE(2) EXCHANGE(1) }

/* Writes `count` keys to [size][KEYS]. */
static void turn_keys(const float *keys, int64_t size, int64_t count, float *turned) {
    for (int64_t t = 0; t < count; t += LANES)
        for (int64_t i = 0; i < size; i += LANES) {
            vec rows[LANES];
            for (int r = 0; r < LANES; r++) rows[r] = load(keys + (t + r) * size + i);
            transpose(rows);
            for (int r = 0; r < LANES; r++) store(turned + (i + r) * KEYS + t, rows[r]);
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

/* Adds the weighted values of `end` keys to those of the keys before: `wide` vectors of each value. */
ALWAYS void blend_some(int count, int wide, const float *weights, const float *values, int64_t size, int64_t end,
                       int64_t fetched, const float *shrink, float *out) {
    vec sums[QUERIES][LANES];
    for (int g = 0; g < count; g++)
        for (int k = 0; k < wide; k++) sums[g][k] = load(out + g * size + k * LANES) * shrink[g];
    for (int64_t t = 0; t < end; t++) {
        if (t + FETCHED_KEYS < fetched) fetch(values + (t + FETCHED_KEYS) * size, wide * LANES * sizeof(float));
        for (int k = 0; k < wide; k++) {
            vec value = load(values + t * size + k * LANES);
            KEEP_IN_REGISTER(value);
            for (int g = 0; g < count; g++) sums[g][k] += value * weights[g * KEYS + t];
        }
    }
    for (int g = 0; g < count; g++)
        for (int k = 0; k < wide; k++) store(out + g * size + k * LANES, sums[g][k]);
}

/* The same for whole values. `fetched`: up to which of them they are fetched ahead. */
ALWAYS void blend(int count, const float *weights, const float *values, int64_t size, int64_t end, int64_t fetched,
                  const float *shrink, float *out) {
    const int wide = count * 8 <= SUMS ? 8 : count * 4 <= SUMS ? 4 : count * 2 <= SUMS ? 2 : 1;
    int64_t i = 0;
    for (; i + wide * LANES <= size; i += wide * LANES)
        blend_some(count, wide, weights, values + i, size, end, fetched, shrink, out + i);
    for (; i < size; i += LANES) blend_some(count, 1, weights, values + i, size, end, fetched, shrink, out + i);
}

/* The queries of a span: `group` for each row, of which the first sees `length` keys, each further one sees one more. */
typedef struct {
    int64_t count, group, length;
    float *queries, *blended;
    softmax so_far[QUERIES];
} attention;

ALWAYS int64_t keys_seen(const attention *a) { return a->length + (a->count - 1) / a->group; }

/* Attends to KEYS keys from number `from` on. `turned`: these keys, transposed, or NULL. `fetched`: up to which number
   keys and values are fetched ahead; 0 where another span has done so. */
ALWAYS void attend_some(int count, int64_t size, float *scores, attention *to, const float *keys, const float *values,
                        int64_t from, const float *turned, int64_t fetched) {
    int64_t end = at_most(keys_seen(to) - from, KEYS);
    float shrink[QUERIES];
    keys += from * size, values += from * size;
    for (int64_t t = 0; t < end; t += LANES) {
        if (TURNED_SIZE && turned) {
            score_turned(count, to->queries, turned + t, size, scores + t);
            continue;
        }
        if (from + t + FETCHED_KEYS < fetched) fetch(keys + (t + FETCHED_KEYS) * size, LANES * size * sizeof(float));
        score(count, to->queries, keys + t * size, size, scores + t);
    }
    if (fetched) fetch(values, at_most(end, LANES) * size * sizeof(float));
    for (int g = 0; g < count; g++)
        shrink[g] = weigh(scores + g * KEYS, to->length + g / to->group - from, end, to->so_far + g);
    blend(count, scores, values, size, end, fetched - from, shrink, to->blended);
}

static void attend(int64_t size, float *scores, attention *to, const float *keys, const float *values, int64_t from,
                   const float *turned, int64_t fetched) {
#define CASE(n) \
    case n: \
        attend_some(n, size, scores, to, keys, values, from, turned, fetched); \
        break;
    switch (to->count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
}

ALWAYS float *keys_of(const work *w, int64_t r, int64_t head) {
    return w->rows[r].slot + 2 * w->depth * w->rows[r].member_stride + head * w->rows[r].head_stride;
}

ALWAYS const float *qkv_of(const work *w, int64_t r, int64_t head) {
    const model *m = &w->d->m;
    return w->d->qkv + (r * (m->num_heads + 2 * m->num_kv_heads) + head) * m->head_dim;
}

/* Stores the keys and values of some rows in their slots. */
static void store_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    const model *m = &w->d->m;
    int64_t size = m->head_dim, rows = rows_of_task(2 * m->num_kv_heads * size);
    int64_t stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++)
        for (int64_t head = 0; head < m->num_kv_heads; head++) {
            float *key = keys_of(w, r, head) + w->rows[r].position * size, *value = key + w->rows[r].member_stride;
            const float *new = qkv_of(w, r, m->num_heads + m->num_kv_heads + head);
            rotate(w, qkv_of(w, r, m->num_heads + head), m->num_heads + head, r, 1.0f, key);
            for (int64_t i = 0; i < size; i++) value[i] = new[i];
        }
}

static int needs_logits(const work *w, const span *at) {
    for (int64_t r = at->first; r < at->first + at->count; r++)
        if (w->rows[r].needs_logits) return 1;
    return 0;
}

/* The queries of a span that share a KV head, `count` of each row from `start` on. */
static void begin(const work *w, const span *at, int64_t first, int64_t count, attention *to) {
    int64_t size = w->d->m.head_dim;
    to->count = at->count * count, to->group = count, to->length = w->rows[at->first].position + 1;
    for (int64_t n = 0; n < at->count; n++)
        for (int64_t g = 0; g < count; g++)
            rotate(w, qkv_of(w, at->first + n, first + g), first + g, at->first + n, w->d->m.scale,
                   to->queries + (n * count + g) * size);
    for (int64_t g = 0; g < to->count; g++) to->so_far[g] = (softmax){-INFINITY, 0};
    for (int64_t i = 0; i < to->count * size; i += LANES) store(to->blended + i, all(0));
}

static void finish_span(const work *w, const span *at, int64_t first, const attention *of) {
    const model *m = &w->d->m;
    int64_t size = m->head_dim;
    for (int64_t g = 0; g < of->count; g++) {
        int64_t r = at->first + g / of->group, head = first + g % of->group;
        for (int64_t i = 0; i < size; i += LANES)
            store(w->d->attended + (r * m->num_heads + head) * size + i,
                  load(of->blended + g * size + i) / of->so_far[g].total);
    }
}

/* Attends for the spans of a group: block by block, so that all of them find keys and values in the nearest cache. */
static void attend_group(const work *w, const scratch *s, const span *group, int64_t head, int64_t start,
                         int64_t count) {
    const model *m = &w->d->m;
    const span *spans = w->d->spans + group->first;
    int64_t size = m->head_dim, first = head * (m->num_heads / m->num_kv_heads) + start, longest = 0;
    const float *keys = keys_of(w, spans->first, head), *values = keys + w->rows[spans->first].member_stride;
    int last = w->depth + 1 == m->num_layers; /* only what logits need is computed there */
    attention each[SPANS];
    int64_t used = 0;
    fetch(keys, at_most(w->rows[spans->first].position, FETCHED_KEYS) * size * sizeof(float));
    for (int64_t n = 0; n < group->count; n++) {
        if (last && !needs_logits(w, spans + n)) continue;
        each[n].queries = s->queries + n * QUERIES * size, each[n].blended = s->blended + n * QUERIES * size;
        begin(w, spans + n, first, count, each + n);
        longest = keys_seen(each + n);
        used++;
    }
    float *turned = TURNED_SIZE && used > 1 && size <= TURNED_SIZE ? s->turned : NULL;
    for (int64_t from = 0; from < longest; from += KEYS) {
        int64_t fetched = longest;
        if (TURNED_SIZE && turned) turn_keys(keys + from * size, size, at_most(longest - from, KEYS), turned);
        for (int64_t n = 0; n < group->count; n++) {
            if (last && !needs_logits(w, spans + n)) continue;
            if (keys_seen(each + n) > from) attend(size, s->scores, each + n, keys, values, from, turned, fetched);
            fetched = 0;
        }
    }
    for (int64_t n = 0; n < group->count; n++)
        if (!last || needs_logits(w, spans + n)) finish_span(w, spans + n, first, each + n);
}

/* A task is a group of spans at a KV head. */
static void attend_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    int64_t heads = w->d->m.num_heads / w->d->m.num_kv_heads;
    scratch s = scratch_of(w->d, thread);
    for (int64_t start = 0; start < heads; start += QUERIES)
        attend_group(w, &s, w->d->groups + task % w->groups, task / w->groups, start, at_most(heads - start, QUERIES));
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

/* The outputs of whole panels. */
ALWAYS int64_t padded(int64_t outputs) { return panel_count(outputs) * PANEL; }

static void pass(work *w) {
    const decoder *d = w->d;
    const model *m = &d->m;
    int64_t hidden = m->hidden_size, attended = m->num_heads * m->head_dim, inner = padded(m->intermediate_size);
    int64_t qkv = (m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
    share(w, row_tasks(w->count, hidden), embed_task);
    for (w->depth = 0; w->depth < m->num_layers; w->depth++) {
        const layer *l = w->l = m->layers + w->depth;
        int last = w->depth + 1 == m->num_layers;
        norm_rows(w, &l->input_norm);
        multiply(w, (rows_product){l->qkv_proj, 3, {d->normed, hidden, NULL}, d->qkv, qkv, 0});
        share(w, row_tasks(w->count, 2 * m->num_kv_heads * m->head_dim), store_task);
        if (last && !w->logit_rows) return; /* the rest is needed for logits only */
        share(w, w->groups * m->num_kv_heads, attend_task);
        if (last && w->logit_rows < w->count) {
            gather(w);
            w->count = w->logit_rows;
        }
        multiply(w, (rows_product){&l->o_proj, 1, {d->attended, attended, NULL}, d->x, hidden, 1});
        norm_rows(w, &l->post_attention_norm);
        begin_product(w, (rows_product){l->gate_up_proj, 2, {d->normed, hidden, NULL}, d->intermediate, inner, 0});
        share(w, panel_count(l->gate_up_proj->outputs), gate_task);
        multiply(w, (rows_product){&l->down_proj, 1, {d->intermediate, inner, NULL}, d->x, hidden, 1});
    }
    norm_rows(w, &m->norm);
    multiply(w, (rows_product){&m->lm_head, 1, {d->normed, hidden, NULL}, w->logits, m->lm_head.outputs, 0});
}

/* Whether a row is the next token of the sequence of the row before it. */
ALWAYS int follows(const row *rows, int64_t r) {
    return r && rows[r].slot == rows[r - 1].slot && rows[r].position == rows[r - 1].position + 1;
}

/* Divides rows into spans, and spans into groups. Returns the number of groups. */
static int64_t build_groups(const decoder *d, const row *rows, int64_t count) {
    int64_t heads = d->m.num_heads / d->m.num_kv_heads, max_rows = heads < QUERIES ? QUERIES / heads : 1;
    int64_t spans = 0, groups = 0;
    for (int64_t r = 0; r < count; r++) {
        span *last = d->spans + spans - 1, *group = d->groups + groups - 1;
        if (follows(rows, r) && last->count < max_rows) {
            last->count++;
            continue;
        }
        if (follows(rows, r) && group->count < SPANS)
            group->count++;
        else
            d->groups[groups++] = (span){spans, 1};
        d->spans[spans++] = (span){r, 1};
    }
    return groups;
}

/* Computes `count` rows; writes the logits of those that need them, [logit rows][outputs]. The rows of a sequence must
   come in order. */
void palaver_step(const decoder *d, const row *rows, int64_t count, const float *rotations, float *logits,
                  int64_t threads) {
    work w = {.d = d, .rows = rows, .rotations = rotations, .logits = logits, .count = count};
    w.groups = build_groups(d, rows, count);
    for (int64_t r = 0; r < count; r++) w.logit_rows += rows[r].needs_logits;
    w.threads = begin_pass(d->team, at_most(threads, d->m.max_threads));
    pass(&w);
}

static void *allocate(int64_t count, size_t size) {
    return aligned_alloc(ALIGNMENT, ((size_t)count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static float *allocate_floats(int64_t count) { return allocate(count, sizeof(float)); }

void palaver_free(decoder *d) {
    if (!d) return;
    free_team(d->team);
    for (int64_t t = 0; d->scratch && t < d->m.max_threads; t++) free(d->scratch[t]);
    free(d->scratch), free(d->spans), free(d->groups);
    free(d->x), free(d->normed), free(d->qkv), free(d->attended), free(d->intermediate), free(d->rounded), free(d);
}

/* Returns NULL where there is no memory. The memory that the model points to must outlive the decoder. */
decoder *palaver_new(const model *m) {
    decoder *d = calloc(1, sizeof(decoder));
    if (!d) return NULL;
    d->m = *m;
    d->x = allocate_floats(m->max_rows * m->hidden_size);
    d->normed = allocate_floats(m->max_rows * m->hidden_size);
    d->spans = calloc(m->max_rows, sizeof(span));
    d->groups = calloc(m->max_rows, sizeof(span));
    d->qkv = allocate_floats(m->max_rows * (m->num_heads + 2 * m->num_kv_heads) * m->head_dim);
    d->attended = allocate_floats(m->max_rows * m->num_heads * m->head_dim);
    d->intermediate = allocate_floats(m->max_rows * padded(m->intermediate_size));
    int64_t inputs = at_least(at_least(m->hidden_size, m->num_heads * m->head_dim), m->intermediate_size);
    d->rounded = allocate(m->max_rows * rounded_groups(inputs), sizeof(rounded_group));
    d->scratch = calloc(m->max_threads, sizeof(float *));
    int complete = d->rounded && d->x && d->normed && d->qkv && d->attended && d->intermediate && d->spans && d->groups;
    complete = complete && d->scratch;
    for (int64_t t = 0; complete && t < m->max_threads; t++) {
        int64_t tiles = 2 * m->max_rows * PANEL;
        d->scratch[t] = allocate_floats(attention_floats(m) + tiles);
        complete = d->scratch[t] != NULL;
    }
    d->team = complete ? new_team(m->max_threads) : NULL;
    if (d->team) return d;
    palaver_free(d);
    return NULL;
}

/* The self-check, on a random model: rows computed together, in two threads, must give what each gives alone. It uses
   every dtype of weights, so that code for another processor, or a damaged file, ends the check and not the engine. */

enum { DEPTH = 2, HIDDEN = 256, HEADS = 4, SIZE = 64, INNER = 256, OUTPUTS = PANEL };
enum { CHECK_ROWS = ROWS + 1, TOKENS = (CHECK_ROWS + LANES - 1) / LANES * LANES };

static uint32_t next_number(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* Weights of about -0.5 to 0.5 in the form of a file: random numbers, with small scales. */
static void draw_weights(int dtype, int64_t blocks, uint8_t *to, uint32_t *state) {
    for (int64_t block = 0; block < blocks; block++, to += LAYOUTS[dtype].file_bytes) {
        for (int i = 0; i < LAYOUTS[dtype].file_bytes; i++) to[i] = next_number(state) >> 24;
        if (is_quantised(dtype)) {
            const uint8_t scale[] = {0, dtype >= Q4_K ? 0x04 : 0x14}; /* float16: 2^-14 and 2^-10 */
            memcpy(to + (dtype == Q6_K ? 208 : 0), scale, 2);
            if (LAYOUTS[dtype].zero < 0) memcpy(to + 2, scale, 2);
            continue;
        }
        uint16_t half = (next_number(state) >> 16 & 0x83ff) | 0x3000, brain = (half & 0x807f) | 0x3e00;
        float single = ((float)(next_number(state) >> 16) - 32768.0f) / 65536.0f;
        memcpy(to, dtype == FLOAT32 ? (void *)&single : dtype == FLOAT16 ? &half : &brain, LAYOUTS[dtype].file_bytes);
    }
}

static matrix random_matrix(int dtype, int64_t in, int64_t out, uint32_t *state) {
    int64_t blocks = out * in / LAYOUTS[dtype].inputs, size = palaver_packed_bytes(dtype, out, in);
    uint8_t *file = malloc(blocks * LAYOUTS[dtype].file_bytes);
    void *weights = allocate_floats(size / sizeof(float));
    if (file && weights) {
        memset(weights, 0, size);
        draw_weights(dtype, blocks, file, state);
        palaver_pack(dtype, file, out, in, weights);
    }
    free(file);
    return (matrix){weights, NULL, in, out, dtype};
}

static int same(const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(a[i] == b[i])) return 0; /* NaN is no answer either */
    return 1;
}

static int check_dtype(int dtype) {
    uint32_t state = 1;
    int64_t norm_size = 2 * HEADS * SIZE, slot_size = 2 * DEPTH * HEADS / 2 * TOKENS * SIZE, right = 0;
    float *ones = allocate_floats(norm_size), *rotations = allocate_floats(TOKENS * SIZE);
    float *cache = calloc(2 * slot_size, sizeof(float)), *alone = allocate_floats(OUTPUTS);
    float *together = allocate_floats(CHECK_ROWS * OUTPUTS);
    layer layers[DEPTH] = {0};
    for (int64_t i = 0; ones && i < norm_size; i++) ones[i] = 1.0f;
    for (int64_t i = 0; rotations && i < TOKENS * SIZE; i++) rotations[i] = i % 2 ? 0.6f : 0.8f;
    for (int64_t depth = 0; depth < DEPTH; depth++)
        layers[depth] = (layer){.input_norm = {ones, 1e-6f},
                                .post_attention_norm = {ones, 1e-6f},
                                .qk_norm = {ones, 1e-6f},
                                .qkv_proj = {random_matrix(dtype, HIDDEN, 2 * HEADS * SIZE, &state)},
                                .o_proj = random_matrix(dtype, HEADS * SIZE, HIDDEN, &state),
                                .gate_up_proj = {random_matrix(dtype, HIDDEN, INNER, &state),
                                                 random_matrix(dtype, HIDDEN, INNER, &state)},
                                .down_proj = random_matrix(dtype, INNER, HIDDEN, &state)};
    matrix tokens = random_matrix(dtype, HIDDEN, OUTPUTS, &state);
    model m = {layers, tokens, {ones, 1e-6f}, tokens,
               DEPTH, HIDDEN, HEADS, HEADS / 2, SIZE, INNER, 0.25f, CHECK_ROWS, 2};
    decoder *d = palaver_new(&m);
    if (d && ones && rotations && cache && together && alone) {
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
        free((void *)l->qkv_proj[0].weights), free((void *)l->o_proj.weights);
        free((void *)l->gate_up_proj[0].weights), free((void *)l->gate_up_proj[1].weights);
        free((void *)l->down_proj.weights);
    }
    free((void *)tokens.weights), free(ones), free(rotations), free(cache), free(together), free(alone);
    palaver_free(d);
    return right == CHECK_ROWS;
}

/* Returns 0 where all checks pass. */
int palaver_check(void) {
    for (int dtype = 0; dtype < DTYPES; dtype++)
        if (!check_dtype(dtype)) return 1;
    return 0;
}
