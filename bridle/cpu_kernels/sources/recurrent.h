// What goes along the tokens of recurrent layers: short convolutions, gated delta rules, and the scans of Mamba and Mamba-2.
// A stretch is consecutive tokens of one sequence, with its state, which is written in place. No two stretches of a call are of
// one sequence. Each number is computed token by token by the same operations, whatever else is in the call.
#pragma once
#include "pool.h"

typedef struct { int64_t offset, length, is_fresh; float *state; } stretch;

// The first n numbers of a vector; the others are 0, or not stored.
INL vf load_n(const float *p, int n) {
    if (n >= LANES) return load(p);
    float t[LANES] = {0};
    memcpy(t, p, 4 * (size_t)n);
    return load(t);
}
INL void store_n(float *p, vf v, int n) {
    if (n >= LANES) { store(p, v); return; }
    float t[LANES]; store(t, v);
    memcpy(p, t, 4 * (size_t)n);
}
INL int least(int a, int b) { return a < b ? a : b; }
INL vf silu(vf x) { return x / (splat(1.0f) + exp_(-x)); }

// out [tokens][channels]: each row and those before it times taps [channels][taps]. A state is the last `width` rows.
typedef struct {
    const float *rows, *taps, *bias;
    float *out;
    const stretch *stretches;
    int64_t stride;
    int count, channels, num_taps, width, has_silu;
} convolution;
enum { MAX_TAPS = 8 };
static void convolve_lanes(const convolution *a, int c, int n) {
    vf taps[MAX_TAPS];
    for (int k = 0; k < a->num_taps; k++) {
        float t[LANES] = {0};
        for (int i = 0; i < n; i++) t[i] = a->taps[(size_t)(c + i) * a->num_taps + k];
        taps[k] = load(t);
    }
    const vf bias = a->bias ? load_n(a->bias + c, n) : splat(0);
    for (int s = 0; s < a->count; s++) {
        const stretch *x = a->stretches + s;
        const float *rows = a->rows + x->offset * a->stride + c;
        float *state = x->state + c;
        for (int64_t t = 0; t < x->length; t++) {
            vf sum = bias;
            for (int k = 0; k < a->num_taps; k++) {
                const int64_t j = t + 1 - a->num_taps + k;
                if (j >= 0) sum = fma_(load_n(rows + j * a->stride, n), taps[k], sum);
                else if (!x->is_fresh) sum = fma_(load_n(state + (a->width + j) * a->channels, n), taps[k], sum);
            }
            store_n(a->out + (x->offset + t) * a->channels + c, a->has_silu ? silu(sum) : sum, n);
        }
        for (int i = 0; i < a->width; i++) {
            const int64_t j = x->length - a->width + i;
            const vf kept = j >= 0 ? load_n(rows + j * a->stride, n) : x->is_fresh ? splat(0) : load_n(state + (a->width + j) * a->channels, n);
            store_n(state + (int64_t)i * a->channels, kept, n);
        }
    }
}
enum { CONV_CHUNK = 8 * LANES };
static void convolve_chunk(const void *job, int chunk) {
    const convolution *a = job;
    const int end = least((chunk + 1) * CONV_CHUNK, a->channels);
    for (int c = chunk * CONV_CHUNK; c < end; c += LANES) convolve_lanes(a, c, least(LANES, end - c));
}
static void convolve(const convolution *a, int parallel) {
    run(convolve_chunk, a, (a->channels + CONV_CHUNK - 1) / CONV_CHUNK, parallel);
}

// Gated delta rules: the state [heads][size][columns] decays, what it holds for the key comes nearer to the value, then it is
// asked. Keys and queries [groups][size] are brought to length one; decays are logarithms [heads][decays] of each token.
// With `norm`, a layer has given what decays (one for each head, with `shift` and `fall`) and rates are made of, and the outputs
// of each head are normalized and gated.
typedef struct {
    const float *query, *key, *value, *decay, *rate;
    float *out;
    const stretch *stretches;
    const float *shift, *fall, *norm, *gate;   // [heads], [heads], [columns], rows as outputs
    const int32_t *places;                     // of the heads' outputs; NULL: in their order
    int64_t query_stride, key_stride, value_stride, decay_stride, rate_stride, gate_stride;
    int count, groups, heads, size, columns, decays;
    float eps;
} delta_rule;
// Some tokens go through some columns of a state together: these columns stay in the nearest cache.
enum { MAX_SIZE = 256, DELTA_VECTORS = 4, DELTA_TOKENS = 4 };
typedef struct { float key[MAX_SIZE], query[MAX_SIZE], decay[MAX_SIZE], old_key[MAX_SIZE], sums, rate; } delta_token;

INL void unit(const float *x, float scale, float *out, int n) {
    vf v = {0};
    for (int k = 0; k < n; k += LANES) { const vf y = load_n(x + k, n - k); v = fma_(y, y, v); }
    const float r = scale / sqrtf(sum_lanes(v) + 1e-6f);
    for (int k = 0; k < n; k++) out[k] = x[k] * r;
}
INL float softplus(float x) { return x > 20 ? x : log1pf(exp_(splat(x))[0]); }
static void delta_prepare(const delta_rule *a, int64_t t, int head, int group, delta_token *to) {
    const int size = a->size;
    unit(a->key + t * a->key_stride + group * size, 1.0f, to->key, size);
    unit(a->query + t * a->query_stride + group * size, 1.0f / sqrtf((float)size), to->query, size);
    const float *logs = a->decay + t * a->decay_stride + head * a->decays, rate = a->rate[t * a->rate_stride + head];
    to->rate = a->norm ? 1.0f / (1.0f + exp_(splat(-rate))[0]) : rate;
    if (a->decays == 1) {
        const float all = exp_(splat(a->norm ? a->fall[head] * softplus(*logs + a->shift[head]) : *logs))[0];
        for (int k = 0; k < size; k++) to->decay[k] = all;
    } else for (int k = 0; k < size; k += LANES) store_n(to->decay + k, exp_(load_n(logs + k, size - k)), size - k);
    vf both = {0};
    for (int k = 0; k < size; k += LANES) both = fma_(load_n(to->key + k, size - k), load_n(to->query + k, size - k), both);
    to->sums = sum_lanes(both);
    for (int k = 0; k < size; k++) { to->old_key[k] = to->key[k] * to->decay[k]; to->query[k] *= to->decay[k]; }
}
// One token in some columns, `vectors` x LANES of them, or `n` in one vector.
INL void delta_step(float *state, const delta_token *x, const float *value, float *out, int size, int columns, int vectors, int n) {
    vf held[DELTA_VECTORS], asked[DELTA_VECTORS], more[DELTA_VECTORS];
    EACH(i, vectors) held[i] = asked[i] = splat(0);
    for (int k = 0; k < size; k++) EACH(i, vectors) {
        const vf s = load_n(state + (size_t)k * columns + i * LANES, n);
        held[i] = fma_(s, splat(x->old_key[k]), held[i]);
        asked[i] = fma_(s, splat(x->query[k]), asked[i]);
    }
    EACH(i, vectors) {
        more[i] = (load_n(value + i * LANES, n) - held[i]) * splat(x->rate);
        store_n(out + i * LANES, fma_(more[i], splat(x->sums), asked[i]), n);
    }
    for (int k = 0; k < size; k++) EACH(i, vectors) {
        float *at = state + (size_t)k * columns + i * LANES;
        store_n(at, fma_(splat(x->key[k]), more[i], load_n(at, n) * splat(x->decay[k])), n);
    }
}
INL float *delta_out(const delta_rule *a, int64_t t, int head) {
    return a->out + (t * a->heads + (a->places ? a->places[head] : head)) * a->columns;
}
INL void delta_steps(const delta_rule *a, float *state, const delta_token *x, int64_t t, int count, int head, int c, int vectors, int n) {
    for (int i = 0; i < count; i++)
        delta_step(state + c, x + i, a->value + (t + i) * a->value_stride + head * a->columns + c,
                   delta_out(a, t + i, head) + c, a->size, a->columns, vectors, n);
}
static void delta_finish(const delta_rule *a, int64_t t, int head) {
    float *out = delta_out(a, t, head);
    const float *gate = a->gate + t * a->gate_stride + head * a->columns;
    normalize(out, a->norm, a->eps, out, a->columns);
    for (int c = 0; c < a->columns; c += LANES) {
        const int n = least(LANES, a->columns - c);
        store_n(out + c, load_n(out + c, n) * silu(load_n(gate + c, n)), n);
    }
}
static void delta_chunk(const void *job, int chunk) {
    const delta_rule *a = job;
    const int head = chunk % a->heads, group = head / (a->heads / a->groups), size = a->size, columns = a->columns;
    const stretch *x = a->stretches + chunk / a->heads;
    const int64_t end = x->offset + x->length;
    float *state = x->state + (size_t)head * size * columns;
    delta_token tokens[DELTA_TOKENS];
    if (x->is_fresh) memset(state, 0, 4 * (size_t)size * columns);
    for (int64_t t = x->offset; t < end; t += DELTA_TOKENS) {
        const int count = end - t < DELTA_TOKENS ? (int)(end - t) : DELTA_TOKENS;
        for (int i = 0; i < count; i++) delta_prepare(a, t + i, head, group, tokens + i);
        int c = 0;
        for (; c + DELTA_VECTORS * LANES <= columns; c += DELTA_VECTORS * LANES)
            delta_steps(a, state, tokens, t, count, head, c, DELTA_VECTORS, LANES);
        for (; c < columns; c += LANES) delta_steps(a, state, tokens, t, count, head, c, 1, least(LANES, columns - c));
        for (int i = 0; a->norm && i < count; i++) delta_finish(a, t + i, head);
    }
}

// Mamba-2: the state [heads][rows][size] decays, inputs [heads][rows] times `write` [groups][size] are added, and it is asked
// by `read` [groups][size]. Steps [tokens][heads] are how long a token lasts.
typedef struct {
    const float *input, *step, *rate, *write, *read, *skip;   // rate, skip: [heads]
    float *out;
    const stretch *stretches;
    int64_t input_stride, write_stride, read_stride;
    int count, groups, heads, rows, size;
} state_space;
static void space_chunk(const void *job, int chunk) {
    const state_space *a = job;
    const int head = chunk % a->heads, group = head / (a->heads / a->groups), rows = a->rows, size = a->size;
    const stretch *x = a->stretches + chunk / a->heads;
    float *state = x->state + (size_t)head * rows * size;
    if (x->is_fresh) memset(state, 0, 4 * (size_t)rows * size);
    for (int64_t t = x->offset; t < x->offset + x->length; t++) {
        const float step = a->step[t * a->heads + head], skip = a->skip ? a->skip[head] : 0;
        const vf decay = splat(exp_(splat(step * a->rate[head]))[0]);
        const float *input = a->input + t * a->input_stride + head * rows;
        const float *write = a->write + t * a->write_stride + group * size, *read = a->read + t * a->read_stride + group * size;
        float *out = a->out + (t * a->heads + head) * rows;
        for (int r = 0; r < rows; r += LANES) {
            const int n = least(LANES, rows - r);
            vf sums[LANES] = {{0}};
            for (int i = 0; i < n; i++) {
                float *s = state + (size_t)(r + i) * size;
                const vf added = splat(input[r + i] * step);
                vf sum = {0};
                for (int k = 0; k < size; k += LANES) {
                    const int m = size - k;
                    const vf now = fma_(added, load_n(write + k, m), load_n(s + k, m) * decay);
                    store_n(s + k, now, m);
                    sum = fma_(now, load_n(read + k, m), sum);
                }
                sums[i] = sum;
            }
            store_n(out + r, fma_(splat(skip), load_n(input + r, n), sums_of(sums)), n);
        }
    }
}

// Mamba: a state of `size` numbers for each channel, each number with its rate [channels][size]. Steps are [tokens][channels],
// `write` and `read` [size]. What is read is multiplied by the activation of a gate.
typedef struct {
    const float *input, *step, *rate, *write, *read, *skip, *gate;
    float *out;
    const stretch *stretches;
    int64_t input_stride, step_stride, write_stride, read_stride, gate_stride;
    int count, channels, size;
} scan;
static void scan_chunk(const void *job, int chunk) {
    const scan *a = job;
    const int chunks = (a->channels + LANES - 1) / LANES, c = chunk % chunks * LANES, n = least(LANES, a->channels - c), size = a->size;
    const stretch *x = a->stretches + chunk / chunks;
    float *state = x->state + (size_t)c * size;
    if (x->is_fresh) memset(state, 0, 4 * (size_t)n * size);
    for (int64_t t = x->offset; t < x->offset + x->length; t++) {
        const float *write = a->write + t * a->write_stride, *read = a->read + t * a->read_stride;
        const float *input = a->input + t * a->input_stride + c, *step = a->step + t * a->step_stride + c;
        vf sums[LANES] = {{0}};
        for (int i = 0; i < n; i++) {
            const float *rate = a->rate + (size_t)(c + i) * size;
            float *s = state + (size_t)i * size;
            vf sum = {0};
            for (int k = 0; k < size; k += LANES) {
                const int m = size - k;
                const vf decay = exp_(load_n(rate + k, m) * splat(step[i]));
                const vf now = fma_(splat(input[i] * step[i]), load_n(write + k, m), load_n(s + k, m) * decay);
                store_n(s + k, now, m);
                sum = fma_(now, load_n(read + k, m), sum);
            }
            sums[i] = sum;
        }
        vf y = sums_of(sums);
        if (a->skip) y = fma_(load_n(a->skip + c, n), load_n(input, n), y);
        if (a->gate) y *= silu(load_n(a->gate + t * a->gate_stride + c, n));
        store_n(a->out + t * a->channels + c, y, n);
    }
}
