// All layers of a model in one call: norm, queries keys and values, rotation, cache, attention, projection, norm, gated unit,
// projection; two residuals. Recurrent layers have a mixer in the place of attention, and either half may be missing. Small
// parts are done row by row, with the rounding to 8 bits that follows them.
#pragma once
#include "attention.h"
#include "mixer.h"

enum { SILU, GELU_TANH, RELU2 };                  // RELU2: the square of what is positive, without a gate
enum { ALONE, KEEPS, READS };
typedef struct {
    // Norms that a layer lacks are NULL. The last ones of a part are of what it adds to the rows.
    const float *norm, *last_norm, *mlp_norm, *mlp_last_norm, *head_norm;   // head_norm: [heads + kv heads][dim]
    const float *sinks;
    void *keys, *values;
    float *key_scales, *value_scales;
    const mixer *mixer;                           // NULL: attention
    matrix qkv[4], out, gate_up[2], down;         // of a part that a layer lacks there are none
    const float *factors;                         // of what the first product gives, or NULL
    int num_qkv, num_gate_up, rotation, window, kv, activation, is_norm_of_all_heads;   // rotation: 0 is none, n the nth table
    int beside;                                   // layers whose first halves read the same rows: the first one KEEPS them
    int has_gate;                                 // each query head is followed by a gate of what it gets
    float eps, mlp_eps, head_eps, scale, softcap, share;   // share: what is added to the rows is multiplied by it
} layer;

typedef struct {
    const float *cos, *sin;                       // [tables][tokens][turned], the first half of the sines negated
    const int64_t *slots, *rows, *spans;
    float *hidden, *normed, *wide, *attended;     // [tokens][hidden], the same, [tokens][widest], [tokens][heads x dim]
    float *mixed, *kept;                          // [tokens][channels], or gates; [tokens][hidden] of layers side by side
    uint8_t *scratch;
    state_rows states;
    int tokens, num_rows, chunks, hidden_size, heads, kv_heads, dim, turned, parallel;
} step;

typedef struct { const step *s; const float *rows, *weight; float eps; const matrix *m; } norm_job;
static void norm_chunk(const void *job, int i) {
    const norm_job *a = job;
    const step *s = a->s;
    const traits t = TRAITS[a->m->kind];
    const float *x = a->rows + (size_t)i * s->hidden_size;
    float *y = s->normed + (size_t)i * s->hidden_size;
    int place_step;
    if (a->weight) normalize(x, a->weight, a->eps, y, s->hidden_size);
    else memcpy(y, x, sizeof(float) * s->hidden_size);
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
INL int gate_width(const layer *l) { return l->activation == RELU2 ? l->down.given : 2 * l->down.given; }
typedef struct { const step *s; const layer *l; } gate_job;
static void gate_chunk(const void *job, int i) {
    const gate_job *a = job;
    const step *s = a->s;
    const matrix *m = &a->l->down;
    const traits t = TRAITS[m->kind];
    const int activation = a->l->activation, gates = m->given;
    float *g = s->wide + (size_t)i * gate_width(a->l);
    const float *u = g + gates;
    int k = 0, place_step;
    for (; activation == RELU2 && k < gates; k++) g[k] = g[k] > 0 ? g[k] * g[k] : 0 * g[k];
    for (; k + LANES <= gates; k += LANES) {
        const vf x = load(g + k);
        store(g + k, x / (splat(1.0f) + exp_(-rest(x, activation))) * load(u + k));
    }
    for (; k < gates; k++) g[k] = g[k] / (1.0f + exp_(-rest(splat(g[k]), activation))[0]) * u[k];
    const quantized to = place(cut(s->scratch, t, s->tokens, m->inputs), i, s->tokens, m->inputs, t, &place_step);
    quantize_row(g, gates, m->inputs, t, to, place_step);
}

typedef struct { float *rows; const float *factors; int width; } factor_job;
static void factor_chunk(const void *job, int i) {
    const factor_job *a = job;
    gate_by(a->rows + (size_t)i * a->width, a->factors, a->width);
}
static void scale_product(const step *s, const layer *l, int width, int many) {
    const factor_job job = {s->wide, l->factors, width};
    if (l->factors) run(factor_chunk, &job, s->tokens, many);
}

INL int outputs_of(const matrix *m, int count) {
    int all = 0;
    for (int i = 0; i < count; i++) all += m[i].outputs;
    return all;
}
INL int attention_width(const step *s, const layer *l) { return ((l->has_gate ? 2 : 1) * s->heads + 2 * s->kv_heads) * s->dim; }
typedef struct { const step *s; const layer *l; } heads_job;
static void heads_chunk(const void *job, int i) {       // norms of heads, rotation, keys and values to their slots
    const heads_job *a = job;
    const step *s = a->s;
    const int dim = s->dim, half = s->turned / 2, inner = s->heads * dim;
    const layer *l = a->l;
    float *row = s->wide + (size_t)i * attention_width(s, l), *keys = row + inner, *values;
    const size_t table = l->rotation > 0 ? ((size_t)(l->rotation - 1) * s->tokens + i) * s->turned : 0;
    const float *c = s->cos + table, *d = s->sin + table;
    for (int h = 0; l->has_gate && h < s->heads; h++) {
        memcpy(s->mixed + (size_t)i * inner + h * dim, row + (2 * h + 1) * dim, 4 * (size_t)dim);
        memmove(row + h * dim, row + 2 * h * dim, 4 * (size_t)dim);
    }
    if (l->has_gate) keys += inner;
    values = keys + s->kv_heads * dim;
    if (l->head_norm && l->is_norm_of_all_heads) {
        normalize(row, l->head_norm, l->head_eps, row, s->heads * dim);
        normalize(keys, l->head_norm + s->heads * dim, l->head_eps, keys, s->kv_heads * dim);
    }
    for (int h = 0; h < s->heads + s->kv_heads; h++) {
        float *x = h < s->heads ? row + h * dim : keys + (h - s->heads) * dim;
        if (l->head_norm && !l->is_norm_of_all_heads) normalize(x, l->head_norm + h * dim, l->head_eps, x, dim);
        for (int k = 0; l->rotation && k < half; k++) {
            const float left = x[k], right = x[k + half];
            x[k] = left * c[k] + right * d[k];
            x[k + half] = right * c[k + half] + left * d[k + half];
        }
    }
    for (int h = 0; h < s->kv_heads; h++) {
        const size_t at = (size_t)s->slots[i] * s->kv_heads + h;
        keep(keys + h * dim, l->keys, l->key_scales, l->kv, at, dim);
        keep(values + h * dim, l->values, l->value_scales, l->kv, at, dim);
    }
}
static void open_gates(const void *job, int i) {
    const heads_job *a = job;
    const int n = a->s->heads * a->s->dim;
    float *x = a->s->attended + (size_t)i * n;
    const float *g = a->s->mixed + (size_t)i * n;
    for (int k = 0; k < n; k += LANES) store(x + k, load(x + k) / (splat(1.0f) + exp_(-load(g + k))));   // heads are whole vectors
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

// What the queries of all tokens get, or what a mixer makes of its inputs.
static void attend_or_mix(const step *s, const layer *l, int many) {
    const int width = attention_width(s, l);
    const heads_job heads = {s, l};
    if (l->mixer) {
        const mixing a = {l->mixer, s->wide, s->mixed, s->normed, s->attended, s->scratch, outputs_of(l->qkv, l->num_qkv)};
        mix(l->mixer, &s->states, &a, s->tokens, s->parallel);
        return;
    }
    const attention a = {s->wide, l->sinks, l->keys, l->values, l->key_scales, l->value_scales, s->rows, s->spans, s->attended,
                         l->scale, l->softcap, s->num_rows, width, s->heads, s->kv_heads, s->dim, l->window, l->kv};
    run(heads_chunk, &heads, s->tokens, many);
    attend(a, s->chunks, s->parallel);
    if (l->has_gate) run(open_gates, &heads, s->tokens, many);
}

// A layer in parts, each of which ends with a product, so that others may add to what it gave before the next one.
enum { QKV, ATTEND, GATES, DOWN, END, PARTS };
static void advance(const step *s, const layer *l, int part) {
    const int many = s->parallel && s->tokens > 3;
    const norm_job norm = {s, l->beside == READS ? s->kept : s->hidden, l->norm, l->eps, l->qkv};
    const norm_job mlp_norm = {s, s->hidden, l->mlp_norm, l->mlp_eps, l->gate_up};
    const gate_job gate = {s, l};
    if (!l->num_qkv && part <= ATTEND) return;
    if (!l->num_gate_up && part > GATES) return;
    switch (part) {
    case QKV:
        if (l->beside == KEEPS) memcpy(s->kept, s->hidden, sizeof(float) * s->tokens * s->hidden_size);
        run(norm_chunk, &norm, s->tokens, many);
        multiply_all(s, l->qkv, l->num_qkv, s->normed, s->wide, outputs_of(l->qkv, l->num_qkv));
        break;
    case ATTEND:
        scale_product(s, l, outputs_of(l->qkv, l->num_qkv), many);
        attend_or_mix(s, l, many);
        quantize_rows(s->attended, (size_t)l->out.given, s->tokens, l->out.given, l->out.inputs, TRAITS[l->out.kind],
                      cut(s->scratch, TRAITS[l->out.kind], s->tokens, l->out.inputs), s->parallel);
        project(s, l, &l->out, l->last_norm);
        break;
    case GATES:
        if (l->num_qkv) merge(s, l, l->last_norm, l->eps, many);
        if (!l->num_gate_up) return;
        run(norm_chunk, &mlp_norm, s->tokens, many);
        multiply_all(s, l->gate_up, l->num_gate_up, s->normed, s->wide, gate_width(l));
        break;
    case DOWN:
        if (!l->num_qkv) scale_product(s, l, gate_width(l), many);
        run(gate_chunk, &gate, s->tokens, s->parallel && s->tokens > 1);
        project(s, l, &l->down, l->mlp_last_norm);
        break;
    case END:
        merge(s, l, l->mlp_last_norm, l->mlp_eps, many);
        break;
    }
}
