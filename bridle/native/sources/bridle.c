// The kernels of one instruction set, as one object without dependencies but the C library. Pointers and sizes are checked
// by whoever calls (bridle/native/calls.py): nothing here looks twice.
#include "linear.h"

// What the object was built for: outputs to a panel, what is added to a stored 8-bit weight, the version of this interface.
API int bridle_lanes(void) { return LANES; }
API int bridle_zero(void) { return ZERO8; }
API int bridle_version(void) { return 1; }

// Scratch for `rows` rows: bytes of integers, then 4-byte scales, then 4-byte sums.
static quantized cut(uint8_t *scratch, traits t, int rows, int inputs) {
    quantized x;
    x.q = (int8_t *)scratch;
    x.scale = (float *)(scratch + (size_t)rows * inputs);
    x.sums = (int32_t *)(x.scale + (size_t)rows * row_scales(t, inputs));
    return x;
}

// out [rows, outputs] = x [rows, given] . weights + bias
API void bridle_linear(const matrix *m, const float *x, uint8_t *scratch, float *out, int rows, int parallel) {
    const traits t = TRAITS[m->kind];
    const quantized q = cut(scratch, t, rows, m->inputs);
    quantize_rows(x, (size_t)m->given, rows, m->given, m->inputs, t, q, parallel);
    multiply(*m, q, out, (size_t)m->outputs, rows, 0, parallel);
}
