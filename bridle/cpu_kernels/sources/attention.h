// Attention of packed rows over a paged cache of keys and values [slots][kv heads][dim]: float32, bfloat16, or 8-bit integers
// with a scale per head and slot. What is not float32 becomes it tile by tile; all else is the same.
//
// A chunk of work is one key head and as many tokens of one sequence as make up QUERIES query rows with the heads that
// share it. Keys are read in tiles of 64 positions, always the same ones, and a query that does not see a tile is left as
// it is: so what a token gives depends neither on the tokens beside it nor on how its cache is cut into blocks.
#pragma once
#include "linear.h"

enum { TILE = 64, QUERIES = 32, MAX_DIM = 256, MAX_GROUP = 32 };
enum { KV_FLOAT32, KV_BFLOAT16, KV_INT8 };
enum { OFFSET, LENGTH, CONTEXT, FIRST_SPAN, FIRST_CHUNK, ROW_FIELDS };   // of a sequence's row

typedef struct {
    const float *q, *sinks;
    const void *keys, *values;
    const float *key_scales, *value_scales;       // [slots][kv heads], with KV_INT8
    const int64_t *rows, *spans;      // spans: where positions from 0 on lie, {slot, count} after {slot, count}
    float *out;
    float scale, softcap;
    int num_rows, q_stride, heads, kv_heads, dim, window, kv;
} attention;
INL size_t kv_bytes(int kv) { return kv == KV_FLOAT32 ? 4 : kv == KV_BFLOAT16 ? 2 : 1; }

typedef struct { int64_t span, passed; } cursor;   // the first position of the span

// A tile: where the keys of the positions begin .. end - 1 after `from` lie, counted in numbers. What is before or beyond
// is filled up with what is there, so that it can be read.
typedef struct { int64_t from; int begin, end; size_t at[TILE]; } tile;

INL void find_tile(const attention *a, const int64_t *spans, cursor *c, int64_t from, int64_t first, int64_t last, tile *t) {
    t->from = from;
    t->begin = first > from ? (int)(first - from) : 0;
    t->end = last + 1 - from < TILE ? (int)(last + 1 - from) : TILE;
    for (int j = t->begin; j < t->end; j++) {
        while (from + j >= c->passed + spans[2 * c->span + 1]) { c->passed += spans[2 * c->span + 1]; c->span++; }
        t->at[j] = (size_t)(spans[2 * c->span] + from + j - c->passed) * (size_t)a->kv_heads * (size_t)a->dim;
    }
    for (int j = 0; j < t->begin; j++) t->at[j] = t->at[t->begin];
    for (int j = t->end; j < TILE; j++) t->at[j] = t->at[t->end - 1];
}
// Ask memory for a head's numbers at positions `from` to `to` - 1 of a tile.
INL void fetch(const attention *a, const void *numbers, const tile *t, int head, int from, int to) {
    const size_t item = kv_bytes(a->kv), size = (size_t)a->dim * item;
    for (int j = from; j < to; j++)
        for (size_t d = 0; d < size; d += 64)
            __builtin_prefetch((const char *)numbers + (t->at[j] + (size_t)head * a->dim) * item + d);
}
// A head's numbers in a tile as float32, one position after the other.
static void widen(const attention *a, const void *from, const float *scales, const tile *t, int head, float *out) {
    const int dim = a->dim, last = (t->end + LANES - 1) / LANES * LANES;
    for (int j = t->begin / LANES * LANES; j < last; j++) {
        const size_t at = t->at[j] + (size_t)head * dim;
        float *to = out + j * dim;
        if (a->kv == KV_BFLOAT16)
            for (int d = 0; d < dim; d += LANES)
                store(to + d, (vf)(__builtin_convertvector(*(const short_lanes *)((const uint16_t *)from + at + d), vi) << 16));
        else {
            const vf scale = splat(scales[at / (size_t)dim]);
            for (int d = 0; d < dim; d += LANES) store(to + d, sbytes((const uint8_t *)from + at + d) * scale);
        }
    }
}
// The numbers of a head as the cache keeps them, at place `at`, which counts heads of all slots.
static void keep(const float *x, void *to, float *scales, int kv, size_t at, int dim) {
    if (kv == KV_FLOAT32) { memcpy((float *)to + at * dim, x, sizeof(float) * dim); return; }
    if (kv == KV_INT8) {
        scales[at] = scale_of(largest(x, dim));
        quantize_span(x, (int8_t *)to + at * dim, dim, scales[at]);
        return;
    }
    for (int d = 0; d < dim; d++) {                    // to the nearest, of two the even one
        uint32_t v; memcpy(&v, x + d, 4);
        ((uint16_t *)to)[at * dim + d] = (v & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((v + 0x7fff + (v >> 16 & 1)) >> 16);
    }
}

// One query by LANES keys that lie side by side.
INL void score(const float *q, const float *keys, const int DIM, float *out) {
    vf v[LANES];
    EACH(i, LANES) v[i] = load(q) * load(keys + i * DIM);
    for (int d = LANES; d < DIM; d += LANES) {
        const vf x = load(q + d);
        EACH(i, LANES) v[i] = fma_(x, load(keys + i * DIM + d), v[i]);
    }
    store(out, sums_of(v));
}
// All queries by the keys of a tile. Keys that do not lie together (`at` says where they do) are copied first: their places
// are known when compiling then, and all queries find them in the first-level cache. Meanwhile memory is asked for the values.
INL void score_all(const attention *a, const tile *t, int head, const float *const *q, int n, const float *keys, const size_t *at, int begin, int end, const int DIM, float *p) {
    float copy[LANES * MAX_DIM];
    for (int j = begin / LANES * LANES; j < end; j += LANES) {
        const float *near = at ? copy : keys + j * DIM;
        fetch(a, a->values, t, head, j, j + LANES);
        for (int i = 0; at && i < LANES; i++)
            for (int d = 0; d < DIM; d += LANES) store(copy + i * DIM + d, load(keys + at[j + i] + d));
        for (int e = 0; e < n; e++) score(q[e], near, DIM, p + e * TILE + j);
    }
}

enum { BESIDE = LANES == 16 ? 6 : 2 };             // queries whose sums stay in registers
// acc[e][:] += sum over j of p[e][j] values[j][:], for N queries and W vectors of their width.
INL void gather(float *acc, const float *p, const float *values, const size_t *at, int begin, int end, int dim, const int N, const int W) {
    for (int d = 0; d < dim; d += W * LANES) {
        vf s[BESIDE * 4];
        EACH(e, N) EACH(k, W) s[e * W + k] = load(acc + e * dim + d + k * LANES);
        for (int j = begin; j < end; j++) {
            vf v[4];
            EACH(k, W) v[k] = load(values + at[j] + d + k * LANES);
            EACH(e, N) { const vf x = splat(p[e * TILE + j]); EACH(k, W) s[e * W + k] = fma_(x, v[k], s[e * W + k]); }
        }
        EACH(e, N) EACH(k, W) store(acc + e * dim + d + k * LANES, s[e * W + k]);
    }
}
INL void gather_all(float *acc, const float *p, const float *values, const size_t *at, int begin, int end, int dim, int n) {
    int e = 0;
    if (dim % (4 * LANES) == 0) {
        for (; e + BESIDE <= n; e += BESIDE) gather(acc + e * dim, p + e * TILE, values, at, begin, end, dim, BESIDE, 4);
        if (BESIDE > 2 && e + 4 <= n) { gather(acc + e * dim, p + e * TILE, values, at, begin, end, dim, 4, 4); e += 4; }
        if (e + 2 <= n) { gather(acc + e * dim, p + e * TILE, values, at, begin, end, dim, 2, 4); e += 2; }
        for (; e < n; e++) gather(acc + e * dim, p + e * TILE, values, at, begin, end, dim, 1, 4);
    } else for (; e < n; e++) gather(acc + e * dim, p + e * TILE, values, at, begin, end, dim, 1, 1);
}

INL vf tanh_(vf x) {
    return splat(1.0f) - splat(2.0f) / (exp_(x + x) + splat(1.0f));
}

// Scores of one query over a tile become weights; gives what earlier sums are multiplied by.
INL float weigh(const attention *a, float *s, int begin, int end, int64_t low, int64_t high, int64_t j0, float *top, float *total) {
    vi lane; for (int i = 0; i < LANES; i++) lane[i] = i;
    const vf hidden = splat(-INFINITY);
    vf m = hidden;
    const int from = begin / LANES * LANES;
    for (int j = from; j < end; j += LANES) {
        vf v = load(s + j) * splat(a->scale);
        if (a->softcap > 0) v = tanh_(v / splat(a->softcap)) * splat(a->softcap);
        const vi at = lane + splat_i((int32_t)(j0 + j));
        const vi seen = (at >= splat_i((int32_t)low)) & (at <= splat_i((int32_t)high));
        v = (vf)(((vi)v & seen) | ((vi)hidden & ~seen));
        m = max_(m, v);
        store(s + j, v);
    }
    float most = *top;
    for (int i = 0; i < LANES; i++) most = m[i] > most ? m[i] : most;
    vf sum = {0};
    for (int j = from; j < end; j += LANES) {
        // Nothing seen so far: weights of nothing. A score that is no number is never the largest, and stays none.
        const vf w = most == -INFINITY ? (vf)((vi)load(s + j) & (load(s + j) != load(s + j))) : exp_(load(s + j) - splat(most));
        store(s + j, w);
        sum += w;
    }
    const float kept = *top == most ? 1.0f : exp_(splat(*top - most))[0];
    *total = *total * kept + sum_lanes(sum);
    *top = most;
    return kept;
}

static void attend_chunk(const void *job, int number) {
    const attention *a = job;
    int r = 0, up = a->num_rows;                       // the last row that begins at or before this chunk
    while (up - r > 1) { const int mid = (r + up) / 2; if (a->rows[mid * ROW_FIELDS + FIRST_CHUNK] <= number) r = mid; else up = mid; }
    const int64_t *row = a->rows + r * ROW_FIELDS, *spans = a->spans + 2 * row[FIRST_SPAN];
    const int group = a->heads / a->kv_heads, tokens = QUERIES / group, dim = a->dim;
    const int local = number - (int)row[FIRST_CHUNK], head = local % a->kv_heads, t0 = local / a->kv_heads * tokens;
    const int t1 = t0 + tokens < row[LENGTH] ? t0 + tokens : (int)row[LENGTH], n = (t1 - t0) * group;
    const int64_t start = row[CONTEXT] - row[LENGTH], last = start + t1 - 1;
    const int64_t first = a->window && start + t0 >= a->window ? start + t0 - a->window + 1 : 0;
    float acc[QUERIES * MAX_DIM], p[QUERIES * TILE], top[QUERIES], total[QUERIES];
    const float *q[QUERIES];
    for (int e = 0; e < n; e++) {
        q[e] = a->q + (size_t)(row[OFFSET] + t0 + e / group) * (size_t)a->q_stride + (size_t)(head * group + e % group) * dim;
        top[e] = -INFINITY; total[e] = 0;
    }
    memset(acc, 0, sizeof(float) * n * dim);
    const int wide = a->kv == KV_FLOAT32;
    float near_keys[TILE * MAX_DIM], near_values[TILE * MAX_DIM];      // of a tile, if the cache has other numbers
    size_t near_at[TILE];
    for (int j = 0; j < TILE; j++) near_at[j] = (size_t)j * dim;
    const float *keys = wide ? (const float *)a->keys + (size_t)head * dim : near_keys;
    const float *values = wide ? (const float *)a->values + (size_t)head * dim : near_values;
    cursor c = {0, 0};
    tile tiles[2];
    int now = 0;
    find_tile(a, spans, &c, first / TILE * TILE, first, last, tiles);
    fetch(a, a->keys, tiles, head, tiles->begin, tiles->end);
    for (int64_t j0 = tiles[0].from; j0 <= last; j0 += TILE, now ^= 1) {
        const int begin = tiles[now].begin, end = tiles[now].end;
        const size_t *at = wide ? tiles[now].at : NULL;
        if (j0 + TILE <= last) find_tile(a, spans, &c, j0 + TILE, first, last, tiles + (now ^ 1));
        if (!wide) {
            widen(a, a->keys, a->key_scales, tiles + now, head, near_keys);
            widen(a, a->values, a->value_scales, tiles + now, head, near_values);
        }
        if (dim == 64) score_all(a, tiles + now, head, q, n, keys, at, begin, end, 64, p);
        else if (dim == 128) score_all(a, tiles + now, head, q, n, keys, at, begin, end, 128, p);
        else score_all(a, tiles + now, head, q, n, keys, at, begin, end, dim, p);
        for (int e = 0; e < n; e++) {
            // The next keys, evenly, while there is something to compute.
            if (j0 + TILE <= last) fetch(a, a->keys, tiles + (now ^ 1), head, e * TILE / n, (e + 1) * TILE / n);
            const int64_t own = start + t0 + e / group, low = a->window && own >= a->window ? own - a->window + 1 : 0;
            const float kept = weigh(a, p + e * TILE, begin, end, low, own, j0, top + e, total + e);
            if (kept != 1.0f) for (int d = 0; d < dim; d += LANES) store(acc + e * dim + d, load(acc + e * dim + d) * splat(kept));
        }
        gather_all(acc, p, values, wide ? at : near_at, begin, end, dim, n);
    }
    for (int e = 0; e < n; e++) {
        const int h = head * group + e % group;
        if (a->sinks) {                                // one more key, without a value
            const float most = a->sinks[h] > top[e] ? a->sinks[h] : top[e];
            const float kept = exp_(splat(top[e] - most))[0];
            total[e] = total[e] * kept + exp_(splat(a->sinks[h] - most))[0];
            for (int d = 0; d < dim; d++) acc[e * dim + d] *= kept;
        }
        float *out = a->out + ((size_t)(row[OFFSET] + t0 + e / group) * a->heads + h) * dim;
        const vf by = splat(1.0f / total[e]);
        for (int d = 0; d < dim; d += LANES) store(out + d, load(acc + e * dim + d) * by);
    }
}

static void attend(attention a, int chunks, int parallel) { run(attend_chunk, &a, chunks, parallel); }
