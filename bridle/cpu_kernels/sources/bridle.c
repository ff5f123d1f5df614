// The kernels of one instruction set, as one object without dependencies but the C library. Pointers and sizes are checked
// by whoever calls (bridle/native/kernels.py): nothing here looks twice.
#include "layer.h"
#include "packing.h"
#include "recurrent.h"
#include "sampling.h"

// What the object was built for: outputs to a panel, what is added to a stored 8-bit weight, the version of this interface.
API int bridle_lanes(void) { return LANES; }
API int bridle_zero(void) { return ZERO8; }
API int bridle_version(void) { return 10; }

// Scratch for rows that are rounded: bytes of integers, then 4-byte scales, then 4-byte sums.
// out [rows, outputs] = x [rows, given] . weights + bias
API void bridle_linear(const matrix *m, const float *x, uint8_t *scratch, float *out, int rows, int parallel) {
    const traits t = TRAITS[m->kind];
    const quantized q = cut(scratch, t, rows, m->inputs);
    quantize_rows(x, (size_t)m->given, rows, m->given, m->inputs, t, q, parallel);
    multiply(*m, q, out, (size_t)m->outputs, rows, 0, parallel);
}

// Rows of blocks as files have them -> the weights and scales of a matrix
API void bridle_pack(const uint8_t *blocks, uint8_t *weights, uint8_t *scales, int kind, int outputs, int inputs, int parallel) {
    const packing p = {blocks, weights, scales, kind, outputs, inputs};
    run(pack_chunk, &p, (outputs + LANES - 1) / LANES, parallel);
}

// out [tokens, heads, dim]: what each token of each sequence gets from what it sees
API void bridle_attend(const attention *a, int chunks, int parallel) { attend(*a, chunks, parallel); }
API int bridle_queries(void) { return QUERIES; }

// hidden [tokens, hidden] after so many layers
API void bridle_layers(const step *s, const layer *layers, int count) {
    for (int i = 0; i < count; i++) for (int part = 0; part < PARTS; part++) advance(s, layers + i, part);
}
// ... after one part of one layer
API void bridle_part(const step *s, const layer *l, int part) { advance(s, l, part); }

// Of rows of logits: those that masks allow, the largest of them, tokens drawn, and where given tokens stand.
API void bridle_allow(const allowance *a, int rows, int parallel) { run(allow_row, a, rows, parallel); }
API void bridle_search(const search *s, int rows, int parallel) { run(search_row, s, rows, parallel); }
API void bridle_draw(const draws *d, int rows, int parallel) { run(draw_row, d, rows, parallel); }
API void bridle_survey(const survey *s, int rows, int parallel) { run(survey_row, s, rows, parallel); }

// What goes along the tokens of recurrent layers.
API void bridle_convolve(const convolution *a, int parallel) { convolve(a, parallel); }
API void bridle_delta_rule(const delta_rule *a, int parallel) { run(delta_chunk, a, a->count * a->heads, parallel); }
API void bridle_state_space(const state_space *a, int parallel) { run(space_chunk, a, a->count * a->heads, parallel); }
API void bridle_scan(const scan *a, int parallel) { run(scan_chunk, a, a->count * ((a->channels + LANES - 1) / LANES), parallel); }
