// What stands in the place of attention in recurrent layers, between two products: a short convolution between two gates
// (LFM2), gated delta nets (Qwen3.5, Qwen3-Next), Mamba-2 (Nemotron-H), Mamba (Jamba). All tokens of all sequences at once.
#pragma once
#include "linear.h"
#include "recurrent.h"

// Where integers, scales and sums of rounded rows lie.
static quantized cut(uint8_t *scratch, traits t, int rows, int inputs) {
    quantized x;
    x.q = (int8_t *)scratch;
    x.scale = (float *)(scratch + (size_t)rows * row_bytes(t, inputs));
    x.sums = (int32_t *)(x.scale + (size_t)rows * row_scales(t, inputs));
    return x;
}

enum { SHORT_CONVOLUTION, DELTA_NET, MAMBA2, MAMBA };
typedef struct {
    const float *taps, *bias;             // [channels][num_taps], [channels]
    const float *shift, *fall, *skip;     // [heads]; Mamba has a head for each channel, and [heads][size] of `fall`
    const float *norm;                    // [columns] of a delta net, of what Mamba's steps, `write` and `read` are made of, else of all
                                          // outputs; may be NULL with both kinds of Mamba
    const matrix *inner;                  // of Mamba: channels -> parameters, and those of steps -> steps
    const int32_t *places;                // of the heads' outputs of a delta net, or NULL
    const int32_t *runs;                  // {from, length}: the order of a row's inputs, if it is another one than here
    float *inputs, *states;               // of all slots: [width][channels], and [heads][size][columns] or [heads][columns][size]
    int kind, channels, num_taps, width, groups, heads, size, columns, num_runs;
    float eps, least, most;               // steps of Mamba-2 are kept within limits
} mixer;

// The stretches of a pass in groups with at most one of each sequence, and the states that are copied after each group.
typedef struct {
    const int64_t *stretches, *groups, *copies;   // {offset, length, is_fresh, slot}, {stretches, copies}, {from, to}
    stretch *table;
    int num_groups;
} state_rows;
typedef void (*group_fn)(void *call, const stretch *x, int count, int parallel);
static void each_group(const state_rows *r, float *states, size_t size, group_fn fn, void *call, int parallel) {
    const int64_t *x = r->stretches, *copy = r->copies;
    for (const int64_t *g = r->groups; g < r->groups + 2 * r->num_groups; g += 2) {
        for (int64_t i = 0; i < g[0]; i++, x += 4) r->table[i] = (stretch){x[0], x[1], x[2], states + (size_t)x[3] * size};
        fn(call, r->table, (int)g[0], parallel);
        for (int64_t i = 0; i < g[1]; i++, copy += 2) memcpy(states + (size_t)copy[1] * size, states + (size_t)copy[0] * size, 4 * size);
    }
}
static void convolve_group(void *call, const stretch *x, int count, int parallel) {
    convolution *a = call;
    a->stretches = x; a->count = count;
    convolve(a, parallel);
}
static void scan_group(void *call, const stretch *x, int count, int parallel) {
    scan *a = call;
    a->stretches = x; a->count = count;
    run(scan_chunk, a, count * ((a->channels + LANES - 1) / LANES), parallel);
}
static void delta_group(void *call, const stretch *x, int count, int parallel) {
    delta_rule *a = call;
    a->stretches = x; a->count = count;
    run(delta_chunk, a, count * a->heads, parallel);
}
static void space_group(void *call, const stretch *x, int count, int parallel) {
    state_space *a = call;
    a->stretches = x; a->count = count;
    run(space_chunk, a, count * a->heads, parallel);
}

// Rows of inputs [tokens][width], of convolved ones [tokens][channels], of steps [tokens][heads], and of outputs.
typedef struct { const mixer *m; float *rows, *mixed, *steps, *out; uint8_t *scratch; int width; } mixing;
INL void gate_by(float *x, const float *y, int n) {
    for (int k = 0; k < n; k += LANES) store_n(x + k, load_n(x + k, n - k) * load_n(y + k, n - k), n - k);
}
static void order_inputs(const void *job, int i) {      // there is room for whole rows in `mixed`
    const mixing *a = job;
    float *row = a->rows + (size_t)i * a->width, *ordered = a->mixed + (size_t)i * a->width, *to = ordered;
    for (const int32_t *r = a->m->runs; r < a->m->runs + 2 * a->m->num_runs; to += r[1], r += 2) memcpy(to, row + r[0], 4 * (size_t)r[1]);
    memcpy(row, ordered, 4 * (size_t)a->width);
}
static void gate_inputs(const void *job, int i) {       // rows are: gates before, gates after, inputs
    const mixing *a = job;
    float *row = a->rows + (size_t)i * a->width;
    gate_by(row, row + 2 * a->m->channels, a->m->channels);
}
static void gate_outputs(const void *job, int i) {
    const mixing *a = job;
    const int n = a->m->channels;
    gate_by(a->out + (size_t)i * n, a->rows + (size_t)i * a->width + n, n);
}
static void make_steps(const void *job, int i) {        // rows are: gates, what is convolved, steps
    const mixing *a = job;
    const mixer *m = a->m;
    const float *given = a->rows + (size_t)i * a->width + m->heads * m->columns + m->channels;
    for (int h = 0; h < m->heads; h++) a->steps[(size_t)i * m->heads + h] = fminf(fmaxf(softplus(given[h] + m->shift[h]), m->least), m->most);
}
static void finish_space(const void *job, int i) {
    const mixing *a = job;
    const mixer *m = a->m;
    const int n = m->heads * m->columns, each = n / m->groups;
    float *out = a->out + (size_t)i * n;
    const float *gate = a->rows + (size_t)i * a->width;
    for (int k = 0; k < n; k += LANES) store_n(out + k, load_n(out + k, n - k) * silu(load_n(gate + k, n - k)), n - k);
    for (int k = 0; m->norm && k < n; k += each) normalize(out + k, m->norm + k, m->eps, out + k, each);
}

static void norm_parameters(const void *job, int i) {  // of Mamba: those of steps, `write`, `read`
    const mixing *a = job;
    const mixer *m = a->m;
    const int rank = m->inner[1].given, all = m->inner[0].outputs;
    float *row = a->steps + (size_t)i * all;
    for (int k = 0, n = rank; k < all; k += n, n = m->size) normalize(row + k, m->norm + k, m->eps, row + k, n);
}
static void soften(const void *job, int i) {
    const mixing *a = job;
    float *x = a->rows + (size_t)i * a->width;
    for (int k = 0; k < a->m->channels; k++) x[k] = softplus(x[k]);
}
static void multiply_inner(const mixing *a, const matrix *m, const float *x, size_t stride, float *out, size_t width, int tokens, int parallel) {
    const traits t = TRAITS[m->kind];
    const quantized q = cut(a->scratch, t, tokens, m->inputs);
    quantize_rows(x, stride, tokens, m->given, m->inputs, t, q, parallel);
    multiply(*m, q, out, width, tokens, 0, parallel);
}
// Rows are: what is convolved, gates. Steps take the place of the former, parameters that of steps.
static void mix_mamba(const mixer *m, const state_rows *r, const mixing *a, convolution *c, int tokens, int parallel) {
    const int n = m->channels, rank = m->inner[1].given, all = m->inner[0].outputs, width = a->width, many = parallel && tokens > 3;
    const float *write = a->steps + rank;
    scan s = {a->mixed, a->rows, m->fall, write, write + m->size, m->skip, a->rows + n, a->out, NULL, n, width, all, all, width, 0, n, m->size};
    each_group(r, m->inputs, (size_t)m->width * n, convolve_group, c, parallel);
    multiply_inner(a, m->inner, a->mixed, (size_t)n, a->steps, (size_t)all, tokens, parallel);
    if (m->norm) run(norm_parameters, a, tokens, many);
    multiply_inner(a, m->inner + 1, a->steps, (size_t)all, a->rows, (size_t)width, tokens, parallel);
    run(soften, a, tokens, many);
    each_group(r, m->states, (size_t)n * m->size, scan_group, &s, parallel);
}

static void mix(const mixer *m, const state_rows *r, const mixing *a, int tokens, int parallel) {
    const size_t kept = (size_t)m->width * m->channels, held = (size_t)m->heads * m->size * m->columns;
    const int inner = m->heads * m->columns, keys = m->groups * m->size, width = a->width, n = m->channels, many = parallel && tokens > 3;
    convolution c = {a->rows, m->taps, m->bias, a->mixed, NULL, width, 0, n, m->num_taps, m->width, 1};
    if (m->num_runs) run(order_inputs, a, tokens, many);
    if (m->kind == SHORT_CONVOLUTION) {
        c.out = a->out; c.has_silu = 0;
        run(gate_inputs, a, tokens, many);
        each_group(r, m->inputs, kept, convolve_group, &c, parallel);
        run(gate_outputs, a, tokens, many);
    } else if (m->kind == DELTA_NET) {                  // rows are: what is convolved, gates, rates, decays
        const float *gate = a->rows + n, *rate = gate + inner, *query = a->mixed;
        delta_rule d = {query, query + keys, query + 2 * keys, rate + m->heads, rate, a->out, NULL, m->shift, m->fall, m->norm, gate, m->places,
                        n, n, n, width, width, width, 0, m->groups, m->heads, m->size, m->columns, 1, m->eps};
        each_group(r, m->inputs, kept, convolve_group, &c, parallel);
        each_group(r, m->states, held, delta_group, &d, parallel);
    } else if (m->kind == MAMBA) mix_mamba(m, r, a, &c, tokens, parallel);
    else {
        const float *input = a->mixed, *write = input + inner;
        state_space s = {input, a->steps, m->fall, write, write + keys, m->skip, a->out, NULL, n, n, n, 0, m->groups, m->heads, m->columns, m->size};
        c.rows += inner;
        run(make_steps, a, tokens, many);
        each_group(r, m->inputs, kept, convolve_group, &c, parallel);
        each_group(r, m->states, held, space_group, &s, parallel);
        run(finish_space, a, tokens, many);
    }
}
