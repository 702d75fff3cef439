/* A forward pass of a decoder over new tokens of several sequences.

   A row is a new token of a sequence. Its bits depend on the tokens before it in its sequence and on nothing else: not
   on the other rows, the chunk size or the number of threads, because the order of every sum is fixed. Weights are
   stored in panels (panels.h), in the narrowest type that holds them without loss. Arithmetic is done in float, but for
   the products with quantised weights (products.h). */

#include "attention.h"
#include "threads.h"

#define SPANS 8 /* spans of one sequence that share what is loaded of its keys and values */
#define TASK_FLOATS 16384 /* of rows that one task norms, embeds or stores: less is done sooner than shared */

typedef struct {
    const float *weight;
    float epsilon;
} norm;

/* A norm or a matrix without weights is left out. Experts lie one after the other in the matrices of the feed-forward
   part, each in whole panels. */
typedef struct {
    norm input_norm, post_attention_norm, qk_norm; /* qk_norm: a row of weights for each head */
    norm output_norm, result_norm; /* of what attention and the feed-forward part add to a row */
    matrix qkv_proj[3], o_proj, router, gate_up_proj[2], down_proj;
    const float *sinks;     /* of each head, or NULL */
    int64_t window, rotary; /* the keys that a query sees, and by which of the tables it rotates */
} layer;

enum activation { SILU, GELU_TANH, CLAMPED_SWIGLU };
#define SWIGLU_LIMIT 7.0f
#define SWIGLU_ALPHA 1.702f

typedef struct {
    const layer *layers;
    matrix embedding; /* an output for each token */
    norm norm;
    matrix lm_head;
    int64_t num_layers, hidden_size, num_heads;
    int64_t num_kv_heads, head_dim, intermediate_size;
    float scale, embedding_scale, score_cap, logit_cap; /* caps: 0 for none */
    int64_t activation;
    int64_t num_experts, experts_per_token; /* 0 for none; intermediate_size is that of an expert */
    int64_t weighs_all; /* whether the weights of a row's experts are shares of all experts, not of those chosen */
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

/* An expert that a row has chosen. */
typedef struct {
    int64_t expert, place; /* place: of the row among those of all experts */
    float weight;
} choice;

/* The rows of an expert: `count` of them from `first` on. */
typedef struct {
    int64_t expert, first, count;
} expert_rows;

typedef struct {
    model m;
    float *x, *normed, *qkv, *attended, *intermediate; /* [rows][...] */
    rounded_group *rounded; /* of the rows of a product, [rows][groups] */
    float *scores, *expert_inputs, *expert_outputs; /* [rows][experts], and [rows of experts][...] */
    choice *choices; /* [rows][experts of a token] */
    expert_rows *experts; /* first those with rows */
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
    const float *const *rotations; /* tables: [position][head_dim / 2][2], cosine and sine */
    float *logits;
    int64_t count, groups, logit_rows, threads;
    int64_t experts; /* with rows */
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

ALWAYS vec activated(int64_t activation, vec gate, vec up) {
    if (activation == GELU_TANH) {
        vec inner = (gate + gate * gate * gate * 0.044715f) * 0.7978845608028654f;
        return gate / (1.0f + exponential(inner * -2.0f)) * up;
    }
    if (activation == CLAMPED_SWIGLU) {
        gate = smaller(all(SWIGLU_LIMIT), gate);
        up = smaller(all(SWIGLU_LIMIT), larger(all(-SWIGLU_LIMIT), up));
        return gate / (1.0f + exponential(gate * -SWIGLU_ALPHA)) * (up + 1.0f);
    }
    return gate / (1.0f + exponential(-gate)) * up;
}

/* A panel of y = activated(x * gate, x * up) for `count` rows. The rows of y have room for whole panels. */
ALWAYS void gate_panel(const work *w, int64_t panel, int64_t count, const row_numbers *x, float *y, int64_t thread) {
    const rows_product *p = &w->product;
    const matrix *gate = p->by, *up = gate + 1;
    scratch s = scratch_of(w->d, thread);
    float *gates = s.tiles, *ups = gates + count * PANEL;
    multiply_panel(gate, panel, count, x, gates);
    multiply_panel(up, panel, count, x, ups);
    for (int64_t r = 0; r < count; r++)
        for (int64_t k = 0, out = panel * PANEL; k < PANEL; k += LANES) {
            vec open = biased(gate, out + k, gates + r * PANEL + k);
            vec through = biased(up, out + k, ups + r * PANEL + k);
            store(y + r * p->y_apart + k, activated(w->d->m.activation, open, through));
        }
}

static void gate_task(const void *context, int64_t panel, int64_t thread) {
    const work *w = context;
    gate_panel(w, panel, w->count, &w->product.x, w->product.y + panel * PANEL, thread);
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
        if (w->rows[r].embedding || w->d->m.embedding_scale == 1.0f) continue;
        for (int64_t i = 0; i < hidden; i++) w->d->x[r * hidden + i] *= w->d->m.embedding_scale;
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

/* Adds to rows what lies in `normed`, normed. */
static void add_normed_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    int64_t hidden = w->d->m.hidden_size, rows = rows_of_task(hidden), stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++) {
        float *x = w->d->x + r * hidden, *added = w->d->normed + r * hidden;
        norm_to(w->norm, added, hidden, added);
        for (int64_t i = 0; i < hidden; i += LANES) store(x + i, load(x + i) + load(added + i));
    }
}

static void add_normed(work *w, const norm *by) {
    w->norm = by;
    share(w, row_tasks(w->count, w->d->m.hidden_size), add_normed_task);
}

/* Adds a product to the rows, which is normed before if there is a norm. */
static void add_product(work *w, const matrix *by, const float *x, int64_t apart, const norm *normed_by) {
    const int64_t hidden = w->d->m.hidden_size;
    float *y = normed_by->weight ? w->d->normed : w->d->x;
    multiply(w, (rows_product){by, 1, {x, apart, NULL}, y, hidden, !normed_by->weight});
    if (normed_by->weight) add_normed(w, normed_by);
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
    const float *rotations = at->rotations ? at->rotations : w->rotations[w->l->rotary] + at->rotary_position * size;
    for (int64_t j = 0; j < half; j++) {
        float cosine = rotations[2 * j], sine = rotations[2 * j + 1];
        y[2 * j] = (x[j] * cosine - x[j + half] * sine) * scale;
        y[2 * j + 1] = (x[j + half] * cosine + x[j] * sine) * scale;
    }
}

/* attention */

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
    to->count = at->count * count, to->group = count, to->cap = w->d->m.score_cap;
    to->length = w->rows[at->first].position + 1, to->first = to->length - w->l->window;
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
        float total = of->so_far[g].total;
        if (w->l->sinks) total += exponential(all(w->l->sinks[head] - of->so_far[g].max))[0];
        for (int64_t i = 0; i < size; i += LANES)
            store(w->d->attended + (r * m->num_heads + head) * size + i, load(of->blended + g * size + i) / total);
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
    int64_t used = 0, begins = at_least(w->rows[spans->first].position + 1 - w->l->window, 0) / KEYS * KEYS;
    fetch(keys + begins * size, at_most(w->rows[spans->first].position - begins, FETCHED_KEYS) * size * sizeof(float));
    for (int64_t n = 0; n < group->count; n++) {
        if (last && !needs_logits(w, spans + n)) continue;
        each[n].queries = s->queries + n * QUERIES * size, each[n].blended = s->blended + n * QUERIES * size;
        begin(w, spans + n, first, count, each + n);
        longest = keys_seen(each + n);
        used++;
    }
    float *turned = TURNED_SIZE && used > 1 && size <= TURNED_SIZE ? s->turned : NULL;
    for (int64_t from = begins; from < longest; from += KEYS) {
        int64_t fetched = longest;
        if (TURNED_SIZE && turned) turn_keys(keys + from * size, size, at_most(longest - from, KEYS), turned);
        for (int64_t n = 0; n < group->count; n++) {
            if (last && !needs_logits(w, spans + n)) continue;
            if (keys_seen(each + n) > from && each[n].first < from + KEYS)
                attend(size, s->scores, each + n, keys, values, from, turned, fetched);
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

/* The outputs of whole panels. */
ALWAYS int64_t padded(int64_t outputs) { return panel_count(outputs) * PANEL; }

/* experts */

/* Chooses the experts of a row: those with the largest scores, the first ones of equals. */
static void choose(const float *scores, int64_t num_experts, int64_t count, choice *chosen) {
    int64_t held = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        if (held == count && !(scores[e] > scores[chosen[count - 1].expert])) continue;
        int64_t n = held < count ? held++ : count - 1;
        for (; n && scores[e] > scores[chosen[n - 1].expert]; n--) chosen[n].expert = chosen[n - 1].expert;
        chosen[n].expert = e;
    }
}

/* What choosing costs for a row, as if so many floats were normed. */
ALWAYS int64_t choosing_floats(const model *m) { return m->num_experts * m->experts_per_token; }

static void choose_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    const model *m = &w->d->m;
    int64_t rows = rows_of_task(choosing_floats(m)), stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++) {
        const float *scores = w->d->scores + r * m->num_experts;
        choice *chosen = w->d->choices + r * m->experts_per_token;
        float total = 0;
        choose(scores, m->num_experts, m->experts_per_token, chosen);
        const float most = scores[chosen->expert];
        for (int64_t n = 0; n < m->experts_per_token; n++) {
            chosen[n].weight = exponential(all(scores[chosen[n].expert] - most))[0];
            total += chosen[n].weight;
        }
        if (m->weighs_all) total = 0;
        for (int64_t e = 0; m->weighs_all && e < m->num_experts; e++) total += exponential(all(scores[e] - most))[0];
        for (int64_t n = 0; n < m->experts_per_token; n++) chosen[n].weight /= total;
    }
}

/* Puts the rows of each expert side by side. Returns how many there are, each as often as it has experts. */
static int64_t place_rows(work *w) {
    const model *m = &w->d->m;
    expert_rows *experts = w->d->experts;
    int64_t count = w->count * m->experts_per_token, placed = 0;
    for (int64_t e = 0; e < m->num_experts; e++) experts[e] = (expert_rows){e, 0, 0};
    for (int64_t n = 0; n < count; n++) w->d->choices[n].place = experts[w->d->choices[n].expert].count++;
    for (int64_t e = 0; e < m->num_experts; placed += experts[e++].count) experts[e].first = placed;
    for (int64_t n = 0; n < count; n++) w->d->choices[n].place += experts[w->d->choices[n].expert].first;
    w->experts = 0;
    for (int64_t e = 0; e < m->num_experts; e++)
        if (experts[e].count) experts[w->experts++] = experts[e];
    return placed;
}

static void copy_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    const model *m = &w->d->m;
    int64_t hidden = m->hidden_size, rows = rows_of_task(hidden), stop = at_most(w->count, (task + 1) * rows);
    (void)thread;
    for (int64_t n = task * rows; n < stop; n++)
        memcpy(w->d->expert_inputs + w->d->choices[n].place * hidden,
               w->d->normed + n / m->experts_per_token * hidden, hidden * sizeof(float));
}

/* The numbers of an expert's rows. */
ALWAYS row_numbers rows_of(const work *w, const expert_rows *of) {
    const rows_product *p = &w->product;
    return (row_numbers){p->x.floats + of->first * p->x.apart, p->x.apart,
                         p->x.integers + of->first * rounded_groups(p->by->inputs)};
}

/* A task is a panel of an expert. */
static void gate_expert_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    int64_t panels = panel_count(w->d->m.intermediate_size), panel = task % panels;
    const expert_rows *of = w->d->experts + task / panels;
    row_numbers x = rows_of(w, of);
    float *y = w->product.y + of->first * w->product.y_apart + panel * PANEL;
    gate_panel(w, of->expert * panels + panel, of->count, &x, y, thread);
}

static void down_expert_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    const rows_product *p = &w->product;
    int64_t panels = panel_count(w->d->m.hidden_size), panel = task % panels;
    const expert_rows *of = w->d->experts + task / panels;
    row_numbers x = rows_of(w, of);
    scratch s = scratch_of(w->d, thread);
    int64_t out = of->expert * panels + panel;
    multiply_panel(p->by, out, of->count, &x, s.tiles);
    for (int64_t r = 0; r < of->count; r++)
        for (int64_t k = 0; k < PANEL; k += LANES)
            store(p->y + (of->first + r) * p->y_apart + panel * PANEL + k,
                  biased(p->by, out * PANEL + k, s.tiles + r * PANEL + k));
}

/* Adds up what the experts of each row give: to the row, or where it is normed before. */
static void combine_task(const void *context, int64_t task, int64_t thread) {
    const work *w = context;
    const model *m = &w->d->m;
    int64_t hidden = m->hidden_size, rows = rows_of_task(hidden), stop = at_most(w->count, (task + 1) * rows);
    int norms = w->l->result_norm.weight != NULL;
    (void)thread;
    for (int64_t r = task * rows; r < stop; r++) {
        const choice *chosen = w->d->choices + r * m->experts_per_token;
        float *y = (norms ? w->d->normed : w->d->x) + r * hidden;
        for (int64_t i = 0; i < hidden; i += LANES) {
            vec total = all(0);
            for (int64_t n = 0; n < m->experts_per_token; n++)
                total += load(w->d->expert_outputs + chosen[n].place * hidden + i) * chosen[n].weight;
            store(y + i, norms ? total : load(y + i) + total);
        }
    }
}

/* The feed-forward part, from the normed rows on. */
static void compute_experts(work *w) {
    const decoder *d = w->d;
    const model *m = &d->m;
    const layer *l = w->l;
    int64_t hidden = m->hidden_size, inner = padded(m->intermediate_size), rows = w->count;
    multiply(w, (rows_product){&l->router, 1, {d->normed, hidden, NULL}, d->scores, m->num_experts, 0});
    share(w, row_tasks(rows, choosing_floats(m)), choose_task);
    w->count = place_rows(w);
    share(w, row_tasks(w->count, hidden), copy_task);
    begin_product(w, (rows_product){l->gate_up_proj, 2, {d->expert_inputs, hidden, NULL}, d->intermediate, inner, 0});
    share(w, w->experts * panel_count(m->intermediate_size), gate_expert_task);
    begin_product(w, (rows_product){&l->down_proj, 1, {d->intermediate, inner, NULL}, d->expert_outputs, hidden, 0});
    share(w, w->experts * panel_count(hidden), down_expert_task);
    w->count = rows;
    share(w, row_tasks(rows, hidden), combine_task);
    if (l->result_norm.weight) add_normed(w, &l->result_norm);
}

/* the pass */

/* A task is a row of logits. */
static void cap_task(const void *context, int64_t r, int64_t thread) {
    const work *w = context;
    int64_t outputs = w->d->m.lm_head.outputs, whole = outputs / LANES * LANES;
    float *logits = w->logits + r * outputs, rest[LANES] = {0};
    (void)thread;
    cap_numbers(logits, whole, w->d->m.logit_cap);
    memcpy(rest, logits + whole, (outputs - whole) * sizeof(float));
    cap_numbers(rest, LANES, w->d->m.logit_cap);
    memcpy(logits + whole, rest, (outputs - whole) * sizeof(float));
}

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
        add_product(w, &l->o_proj, d->attended, attended, &l->output_norm);
        norm_rows(w, &l->post_attention_norm);
        if (l->router.weights) {
            compute_experts(w);
            continue;
        }
        begin_product(w, (rows_product){l->gate_up_proj, 2, {d->normed, hidden, NULL}, d->intermediate, inner, 0});
        share(w, panel_count(l->gate_up_proj->outputs), gate_task);
        add_product(w, &l->down_proj, d->intermediate, inner, &l->result_norm);
    }
    norm_rows(w, &m->norm);
    multiply(w, (rows_product){&m->lm_head, 1, {d->normed, hidden, NULL}, w->logits, m->lm_head.outputs, 0});
    if (m->logit_cap > 0) share(w, w->count, cap_task);
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
void palaver_step(const decoder *d, const row *rows, int64_t count, const float *const *rotations, float *logits,
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

/* Returns 0 where there is no memory. `rows`: of all experts. */
static int allocate_experts(decoder *d, int64_t rows) {
    const model *m = &d->m;
    d->scores = allocate_floats(m->max_rows * m->num_experts);
    d->expert_inputs = allocate_floats(rows * m->hidden_size);
    d->expert_outputs = allocate_floats(rows * m->hidden_size);
    d->choices = calloc(rows, sizeof(choice));
    d->experts = calloc(m->num_experts, sizeof(expert_rows));
    return d->scores && d->expert_inputs && d->expert_outputs && d->choices && d->experts;
}

void palaver_free(decoder *d) {
    if (!d) return;
    free_team(d->team);
    for (int64_t t = 0; d->scratch && t < d->m.max_threads; t++) free(d->scratch[t]);
    free(d->scratch), free(d->spans), free(d->groups);
    free(d->scores), free(d->expert_inputs), free(d->expert_outputs), free(d->choices), free(d->experts);
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
    int64_t rows = m->max_rows * at_least(m->experts_per_token, 1); /* of the feed-forward part */
    d->intermediate = allocate_floats(rows * padded(m->intermediate_size));
    int64_t inputs = at_least(at_least(m->hidden_size, m->num_heads * m->head_dim), m->intermediate_size);
    d->rounded = allocate(rows * rounded_groups(inputs), sizeof(rounded_group));
    d->scratch = calloc(m->max_threads, sizeof(float *));
    int complete = d->rounded && d->x && d->normed && d->qkv && d->attended && d->intermediate && d->spans && d->groups;
    complete = complete && d->scratch && (!m->num_experts || allocate_experts(d, rows));
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

enum { DEPTH = 2, HIDDEN = 256, HEADS = 4, SIZE = 64, INNER = 256, OUTPUTS = PANEL, EXPERTS = 4, WINDOW = 5 };
enum { CHECK_ROWS = ROWS + 1, TOKENS = (CHECK_ROWS + LANES - 1) / LANES * LANES };

static uint32_t next_number(uint32_t *state) { return *state = *state * 1664525u + 1013904223u; }

/* Weights of about -0.5 to 0.5 in the form of a file: random numbers, with small scales. */
static void draw_weights(int dtype, int64_t blocks, uint8_t *to, uint32_t *state) {
    for (int64_t block = 0; block < blocks; block++, to += LAYOUTS[dtype].file_bytes) {
        for (int i = 0; i < LAYOUTS[dtype].file_bytes; i++) to[i] = next_number(state) >> 24;
        if (is_quantised(dtype)) {
            const uint8_t scale[] = {0, dtype >= Q4_K ? 0x04 : 0x14}; /* float16: 2^-14 and 2^-10 */
            if (dtype == MXFP4) to[0] = 122; /* 2^-5 */
            else memcpy(to + (dtype == Q6_K ? 208 : 0), scale, 2);
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

/* `special`: with experts, a window, caps, sinks and norms of what is added. */
static int check_dtype(int dtype, int special) {
    uint32_t state = 1;
    int64_t norm_size = 2 * HEADS * SIZE, slot_size = 2 * DEPTH * HEADS / 2 * TOKENS * SIZE, right = 0;
    int64_t experts = special ? EXPERTS : 1;
    float *ones = allocate_floats(norm_size), *turns = allocate_floats(TOKENS * SIZE);
    float *cache = calloc(2 * slot_size, sizeof(float)), *alone = allocate_floats(OUTPUTS);
    float *together = allocate_floats(CHECK_ROWS * OUTPUTS);
    const float *rotations[] = {turns, turns};
    layer layers[DEPTH] = {0};
    for (int64_t i = 0; ones && i < norm_size; i++) ones[i] = 1.0f;
    for (int64_t i = 0; turns && i < TOKENS * SIZE; i++) turns[i] = i % 2 ? 0.6f : 0.8f;
    for (int64_t depth = 0; depth < DEPTH; depth++) {
        layer *l = layers + depth;
        *l = (layer){.input_norm = {ones, 1e-6f},
                     .post_attention_norm = {ones, 1e-6f},
                     .qk_norm = {ones, 1e-6f},
                     .qkv_proj = {random_matrix(dtype, HIDDEN, 2 * HEADS * SIZE, &state)},
                     .o_proj = random_matrix(dtype, HEADS * SIZE, HIDDEN, &state),
                     .gate_up_proj = {random_matrix(dtype, HIDDEN, experts * INNER, &state),
                                      random_matrix(dtype, HIDDEN, experts * INNER, &state)},
                     .down_proj = random_matrix(dtype, INNER, experts * HIDDEN, &state),
                     .window = TOKENS};
        if (!special) continue;
        l->router = random_matrix(FLOAT32, HIDDEN, EXPERTS, &state);
        l->sinks = ones, l->window = WINDOW;
        l->output_norm = l->result_norm = l->input_norm;
    }
    matrix tokens = random_matrix(dtype, HIDDEN, OUTPUTS, &state);
    model m = {.layers = layers, .embedding = tokens, .norm = {ones, 1e-6f}, .lm_head = tokens,
               .num_layers = DEPTH, .hidden_size = HIDDEN, .num_heads = HEADS,
               .num_kv_heads = HEADS / 2, .head_dim = SIZE, .intermediate_size = INNER,
               .scale = 0.25f, .embedding_scale = 1.0f, .max_rows = CHECK_ROWS, .max_threads = 2};
    if (special) {
        m.score_cap = 5.0f, m.logit_cap = 3.0f, m.activation = GELU_TANH;
        m.num_experts = EXPERTS, m.experts_per_token = 2;
    }
    decoder *d = palaver_new(&m);
    if (d && ones && turns && cache && together && alone) {
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
        free((void *)l->qkv_proj[0].weights), free((void *)l->o_proj.weights), free((void *)l->router.weights);
        free((void *)l->gate_up_proj[0].weights), free((void *)l->gate_up_proj[1].weights);
        free((void *)l->down_proj.weights);
    }
    free((void *)tokens.weights), free(ones), free(turns), free(cache), free(together), free(alone);
    palaver_free(d);
    return right == CHECK_ROWS;
}

/* Returns 0 where all checks pass. */
int palaver_check(void) {
    for (int dtype = 0; dtype < DTYPES; dtype++)
        if (!check_dtype(dtype, 0)) return 1;
    return !check_dtype(BFLOAT16, 1) || !check_dtype(Q4_K, 1);
}
