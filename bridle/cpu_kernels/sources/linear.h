// Products of rows by weights, quantized ones and float32.
//
// Weights lie in panels of LANES outputs; see packing.py for the order. Rows are quantized to 8 bits first: with one
// scale per row (kind INT8) or per 32 inputs (all others); those for float32 weights stay as they are. Each output of
// each row is summed by itself, in the order of the inputs, so it does not matter which rows are computed together.
#pragma once
#include "pool.h"

enum { INT8, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, FLOAT32, Q4_1, Q5_0, Q5_1, NUM_KINDS };
typedef struct { int bits, zero, has_factor, has_minimum, group; } traits;
static const traits TRAITS[NUM_KINDS] = {
    {8, ZERO8, 0, 0, 0}, {8, ZERO8, 0, 0, 32}, {4, 8, 0, 0, 32}, {4, 0, 1, 1, 32}, {5, 0, 1, 1, 32}, {6, 32, 1, 0, 16},
    {32, 0, 0, 0, 0}, {4, 0, 0, 1, 32}, {5, 16, 0, 0, 32}, {5, 0, 0, 1, 32},
};
enum { BLOCK = 32, SUPER = 8 };

// How far ahead of one row's product memory is asked for weights, in bytes: processors look ahead by themselves, but stop at
// every page of 4 KiB. With several rows the next panel is asked for, while this one is used again and again.
enum { AHEAD = 4096 };
INL void ask_for(const uint8_t *p, size_t size) { for (size_t e = 0; e < size; e += 64) __builtin_prefetch(p + e, 0, 3); }

INL size_t block_bytes(traits t) { return (size_t)t.bits * 4 * LANES; }
// Scales of a panel, with `blocks` blocks of 32 inputs.
INL size_t scale_bytes(traits t, size_t blocks) {
    if (t.bits == 32) return 0;
    if (t.group == 0) return 4 * LANES;
    if (!t.has_factor) return blocks * (t.has_minimum ? 4 : 2) * LANES;
    return blocks / SUPER * (t.has_minimum ? 2 + 2 + 8 + 8 : 2 + 16) * LANES;
}

// Rows are computed in tiles of as many as keep their sums in registers: how many the next one takes of those left.
INL int tile_rows(int left) {
    if (MAX_ROWS == 12 && left >= 12 && left != 16) return 12;
    if (MAX_ROWS == 12 && left >= 8) return 8;
    if (MAX_ROWS == 6 && left >= 6 && left != 8) return 6;
    return left >= 4 ? 4 : left;
}

// Quantized rows: integers, a scale per row or block, and what of the sums of inputs a kind needs. The rows of a tile lie
// side by side, RUN inputs of each, one scale of each, one sum of each: a tile then reads one stream of each. Of float32
// there are the numbers, one of each row.
typedef struct { int8_t *q; float *scale; int32_t *sums; } quantized;
INL size_t row_bytes(traits t, size_t inputs) { return t.bits == 32 ? 4 * inputs : inputs; }
INL size_t row_scales(traits t, size_t inputs) { return t.bits == 32 ? 0 : t.group ? inputs / BLOCK : 1; }
INL size_t row_sums(traits t, size_t inputs) { return t.bits == 32 ? 0 : t.group == 0 ? 1 : inputs / t.group; }

INL float largest(const float *x, int n) {      // of the absolute values; not-a-number is larger than all
    vi m = {0}; int k = 0;
    for (; k + LANES <= n; k += LANES) {
        const vi v = *(const vi *)(x + k) & splat_i(0x7fffffff);
        const vi more = v > m;
        m = (v & more) | (m & ~more);
    }
    int32_t best = 0, one;
    for (int i = 0; i < LANES; i++) best = m[i] > best ? m[i] : best;
    for (; k < n; k++) { memcpy(&one, x + k, 4); one &= 0x7fffffff; best = one > best ? one : best; }
    float f; memcpy(&f, &best, 4); return f;
}

// Rounds x / scale to the nearest even integer, and gives the sum. What is no number becomes some integer: its scale is
// no number either.
INL int32_t quantize_span(const float *x, int8_t *q, int n, float scale) {
    int32_t sum = 0; int k = 0;
    const vf d = splat(scale);
    vi sums = {0};
    for (; k + LANES <= n; k += LANES) {
        const vf v = __builtin_elementwise_roundeven(load(x + k) / d);
        const vi in = (v >= splat(-127.0f)) & (v <= splat(127.0f));
        const vi r = __builtin_convertvector((vf)((vi)v & in), vi);
        *(sbyte_lanes *)(q + k) = __builtin_convertvector(r, sbyte_lanes);
        sums += r;
    }
    for (int i = 0; i < LANES; i++) sum += sums[i];
    for (; k < n; k++) {
        const float v = rintf(x[k] / scale);
        q[k] = (v >= -127.0f && v <= 127.0f) ? (int8_t)v : 0;
        sum += q[k];
    }
    return sum;
}

INL float scale_of(float most) { const float d = most / 127.0f; return d < 1e-12f ? 1e-12f : d; }

// Where inputs k to k + 3 of row i begin, of so many rows that lie side by side.
INL size_t input(size_t k, int i, int rows) { return k / RUN * RUN * (size_t)rows + (size_t)(RUN * i) + k % RUN; }

// A run of bytes each to every `step`th place.
INL void spread(const int8_t *q, int8_t *to, int n, int step) {
    for (int k = 0; k < n; k += RUN) memcpy(to + (size_t)k * step, q + k, RUN);
}

// One row of `inputs` numbers, of which `given` are there and the rest zero; the place of a row in a tile of `step`.
static void quantize_row(const float *x, int given, int inputs, traits t, quantized to, int step) {
    int8_t q[BLOCK] = {0};
    if (t.bits == 32) {
        for (int k = 0; k < given; k++) memcpy(to.q + 4 * (size_t)k * step, x + k, 4);
        return;
    }
    const float all = t.group ? 0 : scale_of(largest(x, given));
    int32_t total = 0;
    for (int b = 0; b < inputs / BLOCK; b++, x += BLOCK) {
        const int left = given - b * BLOCK, n = left < 0 ? 0 : left < BLOCK ? left : BLOCK;
        const float scale = t.group ? scale_of(largest(x, n)) : all;
        if (n < BLOCK) memset(q, 0, BLOCK);
        const int32_t first = quantize_span(x, q, n < 16 ? n : 16, scale);
        const int32_t second = n > 16 ? quantize_span(x + 16, q + 16, n - 16, scale) : 0;
        spread(q, to.q + (size_t)b * BLOCK * step, BLOCK, step);
        if (!t.group) { total += first + second; continue; }
        to.scale[(size_t)b * step] = scale;
        if (t.group == 16) {
            to.sums[(size_t)(2 * b) * step] = -t.zero * first;
            to.sums[(size_t)(2 * b + 1) * step] = -t.zero * second;
        } else if (t.has_minimum) {
            const float lifted = scale * (float)(first + second);
            memcpy(to.sums + (size_t)b * step, &lifted, 4);
        } else to.sums[(size_t)b * step] = -t.zero * (first + second);
    }
    if (!t.group) { *to.scale = all; *to.sums = -t.zero * total; }
}

typedef struct { const float *x; size_t stride; int rows, given, inputs; traits t; quantized to; } quantize_job;
// Where the quantized row of a number begins.
static quantized place(quantized all, int row, int rows, int inputs, traits t, int *step) {
    int m = 0, n = tile_rows(rows);
    while (m + n <= row) { m += n; n = tile_rows(rows - m); }
    *step = n;
    return (quantized){all.q + m * row_bytes(t, inputs) + (row - m) * (t.bits == 32 ? 4 : RUN), all.scale + (size_t)m * row_scales(t, inputs) + (row - m),
                       all.sums + (size_t)m * row_sums(t, inputs) + (row - m)};
}
static void quantize_chunk(const void *job, int i) {
    const quantize_job *a = job;
    int step;
    const quantized to = place(a->to, i, a->rows, a->inputs, a->t, &step);
    quantize_row(a->x + (size_t)i * a->stride, a->given, a->inputs, a->t, to, step);
}
static void quantize_rows(const float *x, size_t stride, int rows, int given, int inputs, traits t, quantized to, int parallel) {
    const quantize_job a = {x, stride, rows, given, inputs, t, to};
    run(quantize_chunk, &a, rows, parallel && (size_t)rows * inputs > 16384);
}

typedef struct { const uint8_t *weights, *scales; const float *bias; int kind, outputs, inputs, given; } matrix;
typedef struct { matrix m; traits t; quantized x; float *out; size_t stride; int rows, add, panels_each; } product;

INL void finish(const product *p, int row, int panel, vf v) {
    const int n = panel * LANES;
    float *o = p->out + (size_t)row * p->stride + n;
    if (n + LANES <= p->m.outputs) {
        if (p->m.bias) v = v + load(p->m.bias + n);
        store(o, p->add ? load(o) + v : v);
        return;
    }
    float t[LANES]; store(t, v);
    for (int j = 0; n + j < p->m.outputs; j++) {
        const float y = p->m.bias ? t[j] + p->m.bias[n + j] : t[j];
        o[j] = p->add ? o[j] + y : y;
    }
}

// Sums of rows as products are added to them, and back: where two rows are multiplied at once they lie in pairs.
INL void before_products(vi *sums, const int ROWS) {
#if SQUARES
    EACH(i, ROWS / 2) pair_sums(sums + 2 * i);
#else
    (void)sums; (void)ROWS;
#endif
}
INL void after_products(vi *sums, const int ROWS) {
#if SQUARES
    EACH(i, ROWS / 2) part_sums(sums + 2 * i);
#else
    (void)sums; (void)ROWS;
#endif
}
#if SQUARES
// Eight inputs of all rows of a tile by two vectors of weights. A row without a second one is multiplied by itself.
INL void add_products(vi *sums, vb w, vb v, const int8_t *x, const int ROWS) {
    EACH(i, ROWS / 2) dot8(sums + 2 * i, w, v, x + 2 * RUN * i);
    if (ROWS % 2) sums[ROWS - 1] = dot4(dot4(sums[ROWS - 1], w, x + RUN * (ROWS - 1)), v, x + RUN * (ROWS - 1) + 4);
}
#endif

// ---- 8 bits, one scale per output and per row. PANELS panels at once read each input once for all of them.
INL void tile_int8(const product *p, int panel, int row, const int ROWS, const int PANELS) {
    const size_t inputs = p->m.inputs, size = inputs * LANES;
    const uint8_t *w = p->m.weights + (size_t)panel * size;
    const int8_t *x = p->x.q + (size_t)row * inputs;
    // Few sums would wait for their own last product: they are made in parts then, which are exact in any order.
    const int N = ROWS * PANELS, PARTS_OF_SUM = ZERO8 == 0 || N > 4 ? 1 : N > 2 ? 2 : 4;
    vi sums[MAX_ROWS * 2];
    EACH(i, N * PARTS_OF_SUM) sums[i] = i < N ? splat_i(p->x.sums[row + i / PANELS]) : (vi){0};
    before_products(sums, ROWS);
    for (size_t begin = 0; begin < inputs; begin += RUN * PARTS_OF_SUM) EACH(part, PARTS_OF_SUM) {
        const size_t k = begin + part * RUN;
        vb v[2];
        EACH(j, PANELS) v[j] = load_bytes(w + j * size + k * LANES);
        if (ROWS > 1) EACH(j, PANELS) __builtin_prefetch(w + (PANELS + j) * size + k * LANES, 0, 2);
        else if (k * LANES % 64 == 0) ask_for(w + k * LANES + AHEAD, 64);
#if SQUARES                                      // and one panel
        add_products(sums, v[0], load_bytes(w + (k + 4) * LANES), x + k * ROWS, ROWS);
#else
        EACH(i, ROWS) EACH(j, PANELS) {
            vi *s = sums + part * N + i * PANELS + j;
            *s = dot4(*s, v[j], x + input(k, i, ROWS));
        }
#endif
    }
    EACH(i, N * (PARTS_OF_SUM - 1)) sums[i % N] += sums[N + i];
    after_products(sums, ROWS);
    EACH(j, PANELS) {
        const vf scale = load((const float *)p->m.scales + (size_t)(panel + j) * LANES);
        EACH(i, ROWS)
            finish(p, row + i, panel + j, to_float(sums[i * PANELS + j]) * splat(p->x.scale[row + i]) * scale);
    }
}

// ---- float32, as quantize_row lays the rows out. As many panels at once as hide the time that a sum takes.
enum { WIDE = MAX_ROWS == 4 ? 3 : 2 };
INL void tile_float32(const product *p, int panel, int row, const int ROWS, const int PANELS) {
    const size_t inputs = p->m.inputs, size = inputs * LANES;
    const float *w = (const float *)p->m.weights + (size_t)panel * size, *x = (const float *)p->x.q + (size_t)row * inputs;
    vf sums[MAX_ROWS * 4];
    EACH(i, ROWS * PANELS) sums[i] = (vf){0};
    for (size_t k = 0; k < inputs; k++) {
        vf v[4];
        EACH(j, PANELS) v[j] = load(w + j * size + k * LANES);
        if (ROWS > 1) EACH(j, PANELS) __builtin_prefetch(w + (PANELS + j) * size + k * LANES, 0, 2);
        EACH(i, ROWS) {
            const vf y = splat(x[k * ROWS + i]);
            EACH(j, PANELS) sums[i * PANELS + j] = fma_(y, v[j], sums[i * PANELS + j]);
        }
    }
    vf done[MAX_ROWS * 4];                       // in memory: one loop instead of so many copies of what follows
    EACH(i, ROWS * PANELS) done[i] = sums[i];
    for (int i = 0; i < ROWS; i++) for (int j = 0; j < PANELS; j++) finish(p, row + i, panel + j, done[i * PANELS + j]);
}

// ---- groups. Vector g of a block has inputs 4 g to 4 g + 3: low nibbles for g < 4, high ones above; further bits apart.
INL vb weights_of(const uint8_t *w, int g, const int BITS) {
    enum { V = 4 * LANES };
    if (BITS == 8) return load_bytes(w + g * V);
    const vb n = g < 4 ? load_bytes(w + g * V) : right(load_bytes(w + (g - 4) * V), 4);
    if (BITS == 4) return and_bytes(n, 15);
    if (BITS == 5) {
        const vb h = load_bytes(w + 4 * V);
        return and_bytes(n, 15) | and_bytes(g < 4 ? left(h, 4 - g) : right(h, g - 4), 16);
    }
    const vb h = load_bytes(w + (4 + g / 4) * V);
    const int k = g % 4;
    return and_bytes(n, 15) | and_bytes(k < 2 ? left(h, 4 - 2 * k) : k == 2 ? h : right(h, 2), 48);
}

// Sums of `count` vectors of a block from g on, for all rows of a tile.
INL void add_vectors(vi *sums, const uint8_t *w, int g, const int count, const int8_t *x, const int ROWS, const int BITS) {
#if PAIRWISE
    if (BITS < 8) {                              // 15 x 127 x 2 x 8, 31 x 127 x 2 x 4, 63 x 127 x 2 x 2 fit into 16 bits
        const int fit = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
        for (int e = g; e < g + count; e += fit) {
            vb pairs[MAX_ROWS];
            EACH(i, ROWS) pairs[i] = (vb){0};
            for (int k = e; k < e + fit; k++) {
                const vb v = weights_of(w, k, BITS);
                EACH(i, ROWS) pairs[i] = pairs4(pairs[i], v, x + input(4 * k, i, ROWS));
            }
            EACH(i, ROWS) sums[i] = add_pairs(sums[i], pairs[i]);
        }
        return;
    }
#endif
#if SQUARES
    before_products(sums, ROWS);
    EACH(e, count / 2) {
        const int k = g + 2 * e;
        add_products(sums, weights_of(w, k, BITS), weights_of(w, k + 1, BITS), x + 4 * k * ROWS, ROWS);
    }
    after_products(sums, ROWS);
#else
    for (int k = g; k < g + count; k++) {
        const vb v = weights_of(w, k, BITS);
        EACH(i, ROWS) sums[i] = dot4(sums[i], v, x + input(4 * k, i, ROWS));
    }
#endif
}

INL void tile_groups(const product *p, int panel, int row, const int ROWS, const int KIND) {
    const traits t = TRAITS[KIND];
    const size_t inputs = p->m.inputs, blocks = inputs / BLOCK, size = block_bytes(t);
    const size_t num_sums = row_sums(t, inputs), parts = BLOCK / t.group;
    const uint8_t *w = p->m.weights + (size_t)panel * blocks * size, *s = p->m.scales + (size_t)panel * scale_bytes(t, blocks);
    const int8_t *x = p->x.q + (size_t)row * inputs;
    const float *xs = p->x.scale + (size_t)row * blocks;
    const int32_t *xsum = p->x.sums + (size_t)row * num_sums;
    vf f[MAX_ROWS], d = {0}, low = {0};
    const uint8_t *factors = s;
    EACH(i, ROWS) f[i] = (vf){0};
    for (size_t b = 0; b < blocks; b++, w += size, x += BLOCK * ROWS) {
        if (ROWS > 1) for (size_t e = 0; e < size; e += 64) __builtin_prefetch(w + blocks * size + e, 0, 2);
        else { ask_for(w + AHEAD, size); ask_for(s + AHEAD / size * 2 * LANES, 1); }
        if (!t.has_factor || b % SUPER == 0) {
            d = halves(s); s += 2 * LANES;
            if (t.has_minimum) { low = -halves(s); s += 2 * LANES; }
            factors = s; s += t.has_factor ? 16 * LANES : 0;
        }
        for (size_t h = 0; h < parts; h++) {
            vi sums[MAX_ROWS];
            EACH(i, ROWS) sums[i] = t.has_minimum ? (vi){0} : splat_i(xsum[(b * parts + h) * ROWS + i]);
            add_vectors(sums, w, (int)(h * t.group / 4), t.group / 4, x, ROWS, t.bits);
            vf scale = d;
            if (t.has_factor && t.has_minimum) scale = d * bytes(factors + (b % SUPER) * LANES);
            else if (t.has_factor) scale = d * sbytes(factors + ((b % SUPER) * 2 + h) * LANES);
            EACH(i, ROWS) f[i] = fma_(to_float(sums[i]), scale * splat(xs[b * ROWS + i]), f[i]);
        }
        if (t.has_minimum) {
            const vf lift = t.has_factor ? low * bytes(factors + (8 + b % SUPER) * LANES) : low;
            EACH(i, ROWS) {
                float lifted; memcpy(&lifted, xsum + b * ROWS + i, 4);
                f[i] = fma_(lift, splat(lifted), f[i]);
            }
        }
    }
    EACH(i, ROWS) finish(p, row + i, panel, f[i]);
}

// ---- many rows: tiles of as many as fit, in blocks whose integers stay in the second-level cache
#define EACH_TILE(TILE) \
    for (int m = first, n; m < last; m += n) { \
        n = tile_rows(p->rows - m); \
        if (MAX_ROWS == 12 && n == 12) { TILE(12) } else if (MAX_ROWS == 12 && n == 8) { TILE(8) } \
        else if (MAX_ROWS == 6 && n == 6) { TILE(6) } else if (n == 4) { TILE(4) } \
        else if (n == 3) { TILE(3) } else if (n == 2) { TILE(2) } else { TILE(1) } \
    }
#define ROWS_OF(KIND) \
    static __attribute__((noinline)) void rows_##KIND(const product *p, int panel, int first, int last) { \
        EACH_TILE(TILE_##KIND) \
    }
#define TILE_Q8_0(N) tile_groups(p, panel, m, N, Q8_0);
#define TILE_Q4_0(N) tile_groups(p, panel, m, N, Q4_0);
#define TILE_Q4_K(N) tile_groups(p, panel, m, N, Q4_K);
#define TILE_Q5_K(N) tile_groups(p, panel, m, N, Q5_K);
#define TILE_Q6_K(N) tile_groups(p, panel, m, N, Q6_K);
#define TILE_Q4_1(N) tile_groups(p, panel, m, N, Q4_1);
#define TILE_Q5_0(N) tile_groups(p, panel, m, N, Q5_0);
#define TILE_Q5_1(N) tile_groups(p, panel, m, N, Q5_1);
#define TILE_INT8(N) tile_int8(p, panel, m, N, 1);
#define TILE_INT8_2(N) tile_int8(p, panel, m, N, 2);
#define TILE_FLOAT32(N) tile_float32(p, panel, m, N, 1);
#define TILE_FLOAT32_WIDE(N) tile_float32(p, panel, m, N, WIDE);
ROWS_OF(Q8_0) ROWS_OF(Q4_0) ROWS_OF(Q4_K) ROWS_OF(Q5_K) ROWS_OF(Q6_K) ROWS_OF(INT8) ROWS_OF(INT8_2) ROWS_OF(FLOAT32)
ROWS_OF(FLOAT32_WIDE) ROWS_OF(Q4_1) ROWS_OF(Q5_0) ROWS_OF(Q5_1)
static __attribute__((noinline)) void row_FLOAT32_4(const product *p, int panel) { tile_float32(p, panel, 0, 1, 4); }

static void rows_of_panel(const product *p, int panel, int first, int last) {
    switch (p->m.kind) {
    case INT8: rows_INT8(p, panel, first, last); break;
    case Q8_0: rows_Q8_0(p, panel, first, last); break;
    case Q4_0: rows_Q4_0(p, panel, first, last); break;
    case Q4_K: rows_Q4_K(p, panel, first, last); break;
    case Q5_K: rows_Q5_K(p, panel, first, last); break;
    case Q6_K: rows_Q6_K(p, panel, first, last); break;
    case FLOAT32: rows_FLOAT32(p, panel, first, last); break;
    case Q4_1: rows_Q4_1(p, panel, first, last); break;
    case Q5_0: rows_Q5_0(p, panel, first, last); break;
    case Q5_1: rows_Q5_1(p, panel, first, last); break;
    }
}

static void product_chunk(const void *job, int i) {
    const product *p = job;
    const int panels = (p->m.outputs + LANES - 1) / LANES, begin = i * p->panels_each;
    const int end = begin + p->panels_each < panels ? begin + p->panels_each : panels;
    const int block = p->m.inputs > 2048 ? 96 : 240;       // whole tiles of 12, 6 or 4
    for (int m = 0, last; m < p->rows; m = last) {
        // A tile of 16 rows left is not of 12: what remains then is no block of its own.
        last = p->rows - m <= block + 16 ? p->rows : m + block;
        for (int n = begin; n < end;) {
            if (p->m.kind == INT8 && LANES == 16 && p->rows > 4 && n + 2 <= end) { rows_INT8_2(p, n, m, last); n += 2; }
            else if (p->m.kind == FLOAT32 && p->rows == 1 && n + 4 <= end) { row_FLOAT32_4(p, n); n += 4; }
            else if (p->m.kind == FLOAT32 && p->rows > 1 && n + WIDE <= end) { rows_FLOAT32_WIDE(p, n, m, last); n += WIDE; }
            else { rows_of_panel(p, n, m, last); n += 1; }
        }
    }
}

// Panels of a chunk. Taking a chunk takes as long as reading some KiB, so chunks are large where there is little to compute for
// each; with many rows they are small, so that threads end together. Whatever the threads, there are some chunks for each.
enum { CHUNK_WORK = 1 << 21, LEAST_CHUNK = 1 << 16, MOST_CHUNK = 1 << 18, CHUNKS_EACH = 8 };     // bytes x rows, bytes
static int panels_each(matrix m, int panels, int rows) {
    if (m.kind == FLOAT32) return rows == 1 ? 4 : 2 * WIDE;
    const int bytes = CHUNK_WORK / rows, most = panels / (CHUNKS_EACH * (workers + 1));
    const int wanted = bytes < LEAST_CHUNK ? LEAST_CHUNK : bytes > MOST_CHUNK ? MOST_CHUNK : bytes;
    int each = (int)(wanted / ((size_t)TRAITS[m.kind].bits * m.inputs * LANES / 8));
    if (each > most) each = most;
    return each < 2 ? 2 : each & ~1;
}

// out[row][:outputs] = or += x . weights + bias
static void multiply(matrix m, quantized x, float *out, size_t stride, int rows, int add, int parallel) {
    const traits t = TRAITS[m.kind];
    const int panels = (m.outputs + LANES - 1) / LANES;
    const int each = panels_each(m, panels, rows);
    const product p = {m, t, x, out, stride, rows, add, each};
    run(product_chunk, &p, (panels + each - 1) / each, parallel);
}
