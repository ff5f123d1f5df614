// All layers of a dense model in one call: norm, queries keys and values, rotation, cache, attention, projection, norm,
// gated unit, projection; two residuals. Small parts are done row by row, with the rounding to 8 bits that follows them.
#pragma once
#include "attention.h"

enum { SILU, GELU_TANH };
typedef struct {
    // Norms that a layer lacks are NULL. The last ones of a part are of what it adds to the rows.
    const float *norm, *last_norm, *mlp_norm, *mlp_last_norm, *head_norm;   // head_norm: [heads + kv heads][dim]
    const float *sinks;
    void *keys, *values;
    float *key_scales, *value_scales;
    matrix qkv[3], out, gate_up[2], down;
    int num_qkv, num_gate_up, rotation, window, kv, activation, is_norm_of_all_heads;   // rotation: 0 is none, n the nth table
    float eps, mlp_eps, head_eps, scale, softcap, share;   // share: what is added to the rows is multiplied by it
} layer;

typedef struct {
    const float *cos, *sin;                       // [tables][tokens][dim], the first half of the sines negated
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
    x.scale = (float *)(scratch + (size_t)rows * row_bytes(t, inputs));
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
    if (a->weight) normalize(s->hidden + (size_t)i * s->hidden_size, a->weight, a->eps, y, s->hidden_size);
    else memcpy(y, s->hidden + (size_t)i * s->hidden_size, sizeof(float) * s->hidden_size);
    const quantized to = place(cut(s->scratch, t, s->tokens, a->m->inputs), i, s->tokens, a->m->inputs, t, &place_step);
    quantize_row(y, s->hidden_size, a->m->inputs, t, to, place_step);
}

// What a part gave is added to the rows, normalized and in its share.
typedef struct { const step *s; const float *weight; float eps, share; } merge_job;
static void merge_chunk(const void *job, int i) {
    const merge_job *a = job;
    const int n = a->s->hidden_size;
    float *x = a->s->hidden + (size_t)i * n, *y = a->s->normed + (size_t)i * n;
    if (a->weight) normalize(y, a->weight, a->eps, y, n);
    for (int k = 0; k < n; k++) x[k] += y[k] * a->share;
}

// exp(-what `rest` gives) is what an activation x / (1 + exp) needs.
INL vf rest(vf x, int activation) {
    return activation == SILU ? x : splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x);
}
typedef struct { const step *s; const layer *l; } gate_job;
static void gate_chunk(const void *job, int i) {
    const gate_job *a = job;
    const step *s = a->s;
    const matrix *m = &a->l->down;
    const traits t = TRAITS[m->kind];
    const int activation = a->l->activation;
    float *g = s->wide + (size_t)i * 2 * s->gates;
    const float *u = g + s->gates;
    int k = 0, place_step;
    for (; k + LANES <= s->gates; k += LANES) {
        const vf x = load(g + k);
        store(g + k, x / (splat(1.0f) + exp_(-rest(x, activation))) * load(u + k));
    }
    for (; k < s->gates; k++) g[k] = g[k] / (1.0f + exp_(-rest(splat(g[k]), activation))[0]) * u[k];
    const quantized to = place(cut(s->scratch, t, s->tokens, m->inputs), i, s->tokens, m->inputs, t, &place_step);
    quantize_row(g, s->gates, m->inputs, t, to, place_step);
}

typedef struct { const step *s; const layer *l; } heads_job;
static void heads_chunk(const void *job, int i) {       // norms of heads, rotation, keys and values to their slots
    const heads_job *a = job;
    const step *s = a->s;
    const int dim = s->dim, half = dim / 2, turned = s->heads + s->kv_heads;
    float *row = s->wide + (size_t)i * (turned + s->kv_heads) * dim;
    const layer *l = a->l;
    const size_t table = l->rotation > 0 ? ((size_t)(l->rotation - 1) * s->tokens + i) * dim : 0;
    const float *c = s->cos + table, *d = s->sin + table;
    if (l->head_norm && l->is_norm_of_all_heads) {
        normalize(row, l->head_norm, l->head_eps, row, s->heads * dim);
        normalize(row + s->heads * dim, l->head_norm + s->heads * dim, l->head_eps, row + s->heads * dim, s->kv_heads * dim);
    }
    for (int h = 0; h < turned; h++) {
        float *x = row + h * dim;
        if (l->head_norm && !l->is_norm_of_all_heads) normalize(x, l->head_norm + h * dim, l->head_eps, x, dim);
        for (int k = 0; l->rotation && k < half; k++) {
            const float left = x[k], right = x[k + half];
            x[k] = left * c[k] + right * d[k];
            x[k + half] = right * c[k + half] + left * d[k + half];
        }
    }
    for (int h = 0; h < s->kv_heads; h++) {
        const size_t at = (size_t)s->slots[i] * s->kv_heads + h;
        keep(row + (s->heads + h) * dim, l->keys, l->key_scales, l->kv, at, dim);
        keep(row + (turned + h) * dim, l->values, l->value_scales, l->kv, at, dim);
    }
}

INL int same_rows(int a, int b) {
    return (a == FLOAT32) == (b == FLOAT32) && TRAITS[a].group == TRAITS[b].group && TRAITS[a].zero == TRAITS[b].zero && TRAITS[a].has_minimum == TRAITS[b].has_minimum;
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

// A product that is added to the rows: at once, or beside them if more is to be done with it.
INL int is_merged(const layer *l, const float *last_norm) { return last_norm || l->share != 1.0f; }
static void project(const step *s, const layer *l, const matrix *m, const float *last_norm) {
    const int merged = is_merged(l, last_norm);
    const quantized q = cut(s->scratch, TRAITS[m->kind], s->tokens, m->inputs);
    multiply(*m, q, merged ? s->normed : s->hidden, (size_t)s->hidden_size, s->tokens, !merged, s->parallel);
}
static void merge(const step *s, const layer *l, const float *last_norm, float eps, int many) {
    const merge_job job = {s, last_norm, eps, l->share};
    if (is_merged(l, last_norm)) run(merge_chunk, &job, s->tokens, many);
}

// A layer in parts, each of which ends with a product, so that others may add to what it gave before the next one.
enum { QKV, ATTEND, GATES, DOWN, END, PARTS };
static void advance(const step *s, const layer *l, int part) {
    const int width = (s->heads + 2 * s->kv_heads) * s->dim, inner = s->heads * s->dim, many = s->parallel && s->tokens > 3;
    const norm_job norm = {s, l->norm, l->eps, l->qkv}, mlp_norm = {s, l->mlp_norm, l->mlp_eps, l->gate_up};
    const heads_job heads = {s, l};
    const gate_job gate = {s, l};
    const attention a = {s->wide, l->sinks, l->keys, l->values, l->key_scales, l->value_scales, s->rows, s->spans, s->attended,
                         l->scale, l->softcap, s->num_rows, width, s->heads, s->kv_heads, s->dim, l->window, l->kv};
    switch (part) {
    case QKV:
        run(norm_chunk, &norm, s->tokens, many);
        multiply_all(s, l->qkv, l->num_qkv, s->normed, s->wide, width);
        break;
    case ATTEND:
        run(heads_chunk, &heads, s->tokens, many);
        attend(a, s->chunks, s->parallel);
        quantize_rows(s->attended, (size_t)inner, s->tokens, inner, l->out.inputs, TRAITS[l->out.kind],
                      cut(s->scratch, TRAITS[l->out.kind], s->tokens, l->out.inputs), s->parallel);
        project(s, l, &l->out, l->last_norm);
        break;
    case GATES:
        merge(s, l, l->last_norm, l->eps, many);
        run(norm_chunk, &mlp_norm, s->tokens, many);
        multiply_all(s, l->gate_up, l->num_gate_up, s->normed, s->wide, 2 * s->gates);
        break;
    case DOWN:
        run(gate_chunk, &gate, s->tokens, s->parallel && s->tokens > 1);
        project(s, l, &l->down, l->mlp_last_norm);
        break;
    case END:
        merge(s, l, l->mlp_last_norm, l->mlp_eps, many);
        break;
    }
}
