// All layers of a dense model in one call: norm, queries keys and values, rotation, cache, attention, projection, norm,
// gated unit, projection; two residuals. Small parts are done row by row, with the rounding to 8 bits that follows them.
#pragma once
#include "attention.h"
#include "linear.h"

typedef struct {
    const float *norm, *mlp_norm, *head_norm;     // head_norm: [heads + kv heads][dim], or none
    float *keys, *values;
    matrix qkv[3], out, gate_up[2], down;
    int num_qkv, num_gate_up, is_rotated, window;
    float eps, mlp_eps, head_eps, scale;
} layer;

typedef struct {
    const float *cos, *sin;                       // [tokens][dim], the first half of the sines negated
    const int64_t *slots, *rows, *spans;
    float *hidden, *normed, *wide, *attended;     // [tokens][hidden], the same, [tokens][widest], [tokens][heads x dim]
    uint8_t *scratch;
    int tokens, num_rows, chunks, hidden_size, gates, heads, kv_heads, dim, parallel;
} step;

INL float inverse_rms(const float *x, int n, float eps) {
    vf v = {0}; int k = 0;
    for (; k + LANES <= n; k += LANES) v = fma_(load(x + k), load(x + k), v);
    float sum = sum_lanes(v);
    for (; k < n; k++) sum += x[k] * x[k];
    return 1.0f / sqrtf(sum / (float)n + eps);
}
INL void normalize(const float *x, const float *weight, float eps, float *out, int n) {
    const float r = inverse_rms(x, n, eps);
    int k = 0;
    for (; k + LANES <= n; k += LANES) store(out + k, load(x + k) * splat(r) * load(weight + k));
    for (; k < n; k++) out[k] = x[k] * r * weight[k];
}

// Where integers, scales and sums of rounded rows lie.
static quantized cut(uint8_t *scratch, traits t, int rows, int inputs) {
    quantized x;
    x.q = (int8_t *)scratch;
    x.scale = (float *)(scratch + (size_t)rows * inputs);
    x.sums = (int32_t *)(x.scale + (size_t)rows * row_scales(t, inputs));
    return x;
}

typedef struct { const step *s; const float *weight; float eps; const matrix *m; } norm_job;
static void norm_chunk(const void *job, int i) {
    const norm_job *a = job;
    const step *s = a->s;
    const traits t = TRAITS[a->m->kind];
    float *y = s->normed + (size_t)i * s->hidden_size;
    int place_step;
    normalize(s->hidden + (size_t)i * s->hidden_size, a->weight, a->eps, y, s->hidden_size);
    const quantized to = place(cut(s->scratch, t, s->tokens, a->m->inputs), i, s->tokens, a->m->inputs, t, &place_step);
    quantize_row(y, s->hidden_size, a->m->inputs, t, to, place_step);
}

typedef struct { const step *s; const matrix *m; } gate_job;
static void gate_chunk(const void *job, int i) {
    const gate_job *a = job;
    const step *s = a->s;
    const traits t = TRAITS[a->m->kind];
    float *g = s->wide + (size_t)i * 2 * s->gates;
    const float *u = g + s->gates;
    int k = 0, place_step;
    for (; k + LANES <= s->gates; k += LANES) {
        const vf x = load(g + k);
        store(g + k, x / (splat(1.0f) + exp_(-x)) * load(u + k));
    }
    for (; k < s->gates; k++) g[k] = g[k] / (1.0f + exp_(splat(-g[k]))[0]) * u[k];
    const quantized to = place(cut(s->scratch, t, s->tokens, a->m->inputs), i, s->tokens, a->m->inputs, t, &place_step);
    quantize_row(g, s->gates, a->m->inputs, t, to, place_step);
}

typedef struct { const step *s; const layer *l; } heads_job;
static void heads_chunk(const void *job, int i) {       // norms of heads, rotation, keys and values to their slots
    const heads_job *a = job;
    const step *s = a->s;
    const int dim = s->dim, half = dim / 2, turned = s->heads + s->kv_heads;
    float *row = s->wide + (size_t)i * (turned + s->kv_heads) * dim;
    const float *c = s->cos + (size_t)i * dim, *d = s->sin + (size_t)i * dim;
    for (int h = 0; h < turned; h++) {
        float *x = row + h * dim;
        if (a->l->head_norm) normalize(x, a->l->head_norm + h * dim, a->l->head_eps, x, dim);
        if (!a->l->is_rotated) continue;
        for (int k = 0; k < half; k++) {
            const float left = x[k], right = x[k + half];
            x[k] = left * c[k] + right * d[k];
            x[k + half] = right * c[k + half] + left * d[k + half];
        }
    }
    const size_t size = (size_t)s->kv_heads * dim;
    memcpy(a->l->keys + (size_t)s->slots[i] * size, row + (size_t)s->heads * dim, sizeof(float) * size);
    memcpy(a->l->values + (size_t)s->slots[i] * size, row + (size_t)turned * dim, sizeof(float) * size);
}

INL int same_rows(int a, int b) {
    return TRAITS[a].group == TRAITS[b].group && TRAITS[a].zero == TRAITS[b].zero && TRAITS[a].has_minimum == TRAITS[b].has_minimum;
}
// Several matrices over rows that are rounded already as the first one wants it; `x` are the rows before that.
static void multiply_all(const step *s, const matrix *m, int count, const float *x, float *out, int width) {
    for (int i = 0, column = 0; i < count; column += m[i].outputs, i++) {
        const traits t = TRAITS[m[i].kind];
        const quantized q = cut(s->scratch, t, s->tokens, m[i].inputs);
        if (i && !same_rows(m[i].kind, m[i - 1].kind)) quantize_rows(x, (size_t)m[i].given, s->tokens, m[i].given, m[i].inputs, t, q, s->parallel);
        multiply(m[i], q, out + column, (size_t)width, s->tokens, 0, s->parallel);
    }
}

static void advance(const step *s, const layer *l) {
    const int width = (s->heads + 2 * s->kv_heads) * s->dim, inner = s->heads * s->dim, many = s->parallel && s->tokens > 3;
    const traits out_traits = TRAITS[l->out.kind], down_traits = TRAITS[l->down.kind];
    const norm_job norm = {s, l->norm, l->eps, l->qkv}, mlp_norm = {s, l->mlp_norm, l->mlp_eps, l->gate_up};
    const heads_job heads = {s, l};
    const gate_job gate = {s, &l->down};
    const attention a = {s->wide, l->keys, l->values, NULL, s->rows, s->spans, s->attended, l->scale, 0,
                         s->num_rows, width, s->heads, s->kv_heads, s->dim, l->window};
    run(norm_chunk, &norm, s->tokens, many);
    multiply_all(s, l->qkv, l->num_qkv, s->normed, s->wide, width);
    run(heads_chunk, &heads, s->tokens, many);
    attend(a, s->chunks, s->parallel);
    const quantized q = cut(s->scratch, out_traits, s->tokens, l->out.inputs);
    quantize_rows(s->attended, (size_t)inner, s->tokens, inner, l->out.inputs, out_traits, q, s->parallel);
    multiply(l->out, q, s->hidden, (size_t)s->hidden_size, s->tokens, 1, s->parallel);
    run(norm_chunk, &mlp_norm, s->tokens, many);
    multiply_all(s, l->gate_up, l->num_gate_up, s->normed, s->wide, 2 * s->gates);
    run(gate_chunk, &gate, s->tokens, s->parallel && s->tokens > 1);
    multiply(l->down, cut(s->scratch, down_traits, s->tokens, l->down.inputs), s->hidden, (size_t)s->hidden_size, s->tokens, 1, s->parallel);
}
