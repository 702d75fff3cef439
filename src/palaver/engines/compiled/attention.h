/* Attention of a few queries of one KV head over the keys and values of a sequence, in blocks of keys at fixed places: the
   sums of a query are the same whichever queries and blocks are computed beside its own. */

#include "products.h"

#define QUERIES 8 /* queries of one KV head whose sums fit into registers */
#define KEYS 128 /* keys scored before their values are added */
#define FETCHED_KEYS 32 /* keys and values fetched ahead */
#ifdef __AVX512F__
#define SCORED_KEYS 8 /* keys whose products with two queries fit into registers */
#define TURNED_SIZE 64 /* of heads up to which keys are transposed: there adding up lanes takes most of the time */
#define TURNED_QUERIES 4
#else
#define SCORED_KEYS 2
#define TURNED_SIZE 0
#define TURNED_QUERIES 1
#endif

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

/* Moves numbers softly into the range from -cap to cap, in whole vectors. */
static void cap_numbers(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, tanh_of(load(x + i) / cap) * cap);
}

/* The online softmax of a query: its largest score so far, and the sum of its weights relative to that. */
typedef struct {
    float max, total;
} softmax;

/* Turns the scores of up to KEYS keys, of which the query sees those from `first` to `length`, into weights. Returns the
   factor by which the weights of earlier keys shrink. */
static float weigh(float *scores, int64_t first, int64_t length, int64_t end, softmax *so_far) {
    const ints place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec most = all(so_far->max), total = all(0);
    for (int64_t t = 0; t < end; t += LANES) {
        ints seen = (place < (int32_t)(length - t)) & (place >= (int32_t)(first - t));
        most = larger(either(seen, load(scores + t), most), most);
    }
    float peak = largest(most);
    for (int64_t t = 0; t < end; t += LANES) {
        ints seen = (place < (int32_t)(length - t)) & (place >= (int32_t)(first - t));
        vec weights = either(seen, exponential(load(scores + t) - peak), all(0));
        store(scores + t, weights);
        total += weights;
    }
    /* both may be -INFINITY, where no key has been seen */
    float shrink = so_far->max == peak ? 1.0f : exponential(all(so_far->max - peak))[0];
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

/* The queries of a span: `group` for each row. Those of the first row see the keys from `first` to `length`, each further
   row one later. */
typedef struct {
    int64_t count, group, first, length;
    float cap; /* of scores, or 0 */
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
    for (int g = 0; g < count; g++) {
        int64_t before = from - g / to->group;
        if (to->cap > 0) cap_numbers(scores + g * KEYS, end, to->cap);
        shrink[g] = weigh(scores + g * KEYS, to->first - before, to->length - before, end, to->so_far + g);
    }
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
