// Vectors of LANES numbers, and the few operations that differ between instruction sets. All else is plain C over them.
//
// Weights come four inputs at a time for LANES outputs: a vector of 4 x LANES bytes. `dot4` multiplies it by the same four
// inputs of one row and adds to LANES sums of 32 bits, exactly. Instruction sets differ in whether weights are bytes with
// or without a sign (ZERO8 is what is added to an 8-bit weight when it is stored).
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INL static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))

// A loop over a number of things that is known when compiling: what they hold lies in registers.
#define EACH(i, n) _Pragma("clang loop unroll(full)") for (int i = 0; i < (n); i++)

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#define MAX_ROWS 12          // rows of a tile: as many as keep their sums in registers
#define ZERO8 128
#elif defined(__AVXVNNI__)
#define LANES 8
#define MAX_ROWS 6
#define ZERO8 128
#elif defined(__AVX2__)
#define LANES 8
#define MAX_ROWS 4
#define ZERO8 0
#define PAIRWISE 1           // sums of two products saturate at 16 bits: see tile_groups
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define LANES 8
#define MAX_ROWS 6
#define ZERO8 0
#define SQUARES 1            // two rows by two outputs at once: see dot8
#elif defined(__ARM_FEATURE_DOTPROD)
#define LANES 8
#define MAX_ROWS 4
#define ZERO8 0
#else
#error "no form of dot4 for this instruction set"
#endif

// Inputs of a row that lie side by side in a tile.
#if SQUARES
enum { RUN = 8 };
#else
enum { RUN = 4 };
#endif

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint8_t vb __attribute__((vector_size(4 * LANES), aligned(1)));
typedef uint16_t vh __attribute__((vector_size(4 * LANES), aligned(1)));   // the bytes of a vb, in pairs
typedef _Float16 half_lanes __attribute__((vector_size(2 * LANES), aligned(1)));
typedef uint16_t short_lanes __attribute__((vector_size(2 * LANES), aligned(1)));
typedef uint8_t byte_lanes __attribute__((vector_size(LANES), aligned(1)));
typedef int8_t sbyte_lanes __attribute__((vector_size(LANES), aligned(1)));

INL vf splat(float x) { return x - (vf){0}; }
INL vi splat_i(int32_t x) { return x - (vi){0}; }
INL vf load(const float *p) { return *(const vf *)p; }
INL void store(float *p, vf v) { *(vf *)p = v; }
INL vb load_bytes(const uint8_t *p) { return *(const vb *)p; }
INL vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INL vf halves(const uint8_t *p) { return __builtin_convertvector(*(const half_lanes *)p, vf); }
INL vf bytes(const uint8_t *p) { return __builtin_convertvector(__builtin_convertvector(*(const byte_lanes *)p, vi), vf); }
INL vf sbytes(const uint8_t *p) { return __builtin_convertvector(__builtin_convertvector(*(const sbyte_lanes *)p, vi), vf); }
INL vf fma_(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
INL vf max_(vf a, vf b) { return (vf)(((vi)a & (a > b)) | ((vi)b & ~(a > b))); }
INL vb and_bytes(vb v, uint8_t m) { return v & (m - (vb){0}); }
INL vb right(vb v, int n) { return (vb)((vh)v >> n); }       // bits cross from byte to byte: mask afterwards
INL vb left(vb v, int n) { return (vb)((vh)v << n); }

INL int32_t four(const int8_t *x) { int32_t v; memcpy(&v, x, 4); return v; }
#if defined(__AVX512VNNI__) && LANES == 16
INL vi dot4(vi sums, vb w, const int8_t *x) { return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(four(x))); }
#elif defined(__AVXVNNI__)
INL vi dot4(vi sums, vb w, const int8_t *x) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(four(x))); }
#elif defined(__AVX2__)
// Weights with a sign: it goes over to the inputs, -127 .. 127, and 2 x 128 x 127 fits into 16 bits.
INL vi dot4(vi sums, vb w, const int8_t *x) {
    const __m256i a = _mm256_abs_epi8((__m256i)w), b = _mm256_sign_epi8(_mm256_set1_epi32(four(x)), (__m256i)w);
    return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
}
// Weights of up to 6 bits without a sign: sums of two products in 16 bits, of which the caller adds up what fits.
INL vb pairs4(vb sums, vb w, const int8_t *x) {
    return (vb)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(four(x))));
}
INL vi add_pairs(vi sums, vb pairs) { return sums + (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#else
INL vi dot4(vi sums, vb w, const int8_t *x) {
    const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four(x)));
    int32x4_t s[2]; int8x16_t a[2];
    memcpy(s, &sums, 32); memcpy(a, &w, 32);
    s[0] = vdotq_s32(s[0], a[0], b); s[1] = vdotq_s32(s[1], a[1], b);
    memcpy(&sums, s, 32);
    return sums;
}
#endif
#if SQUARES
// Eight inputs of two rows, which lie one after the other, by those of all outputs, of which `w` are the first four and `v`
// the others. Sums of two rows are kept in pairs: {row 0, output 0}, {0, 1}, {1, 0}, {1, 1}, {0, 2}, ... .
INL void dot8(vi *sums, vb w, vb v, const int8_t *x) {
    const int8x16_t rows = vld1q_s8(x);
    int32x4_t a[2], b[2], s[4];
    memcpy(a, &w, 32); memcpy(b, &v, 32); memcpy(s, sums, 64);
    EACH(i, 2) {
        s[2 * i] = vmmlaq_s32(s[2 * i], rows, vreinterpretq_s8_s32(vzip1q_s32(a[i], b[i])));
        s[2 * i + 1] = vmmlaq_s32(s[2 * i + 1], rows, vreinterpretq_s8_s32(vzip2q_s32(a[i], b[i])));
    }
    memcpy(sums, s, 64);
}
INL void pair_sums(vi *s) {
    const vi a = s[0], b = s[1];
    s[0] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 2, 3, 10, 11); s[1] = __builtin_shufflevector(a, b, 4, 5, 12, 13, 6, 7, 14, 15);
}
INL void part_sums(vi *s) {
    const vi a = s[0], b = s[1];
    s[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13); s[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
}
#endif

INL float sum_lanes(vf v) {
    float t[LANES]; store(t, v);
    for (int n = LANES / 2; n; n /= 2) for (int i = 0; i < n; i++) t[i] += t[i + n];
    return t[0];
}

// e^x, a few units in the last place; 0 for what is below -87, infinite above 88.4; what is no number stays none.
INL vf exp_(vf x) {
    const vi tiny = x < splat(-87.0f), none = x != x;
    x = max_(-max_(-x, splat(-89.0f)), splat(-87.0f));
    const vf n = __builtin_elementwise_roundeven(x * splat(1.44269504f));
    vf r = fma_(n, splat(-0.693359375f), x);
    r = fma_(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f)); p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f)); p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f)); p = fma_(p * r, r, r + splat(1.0f));
    const vi power = (__builtin_convertvector(n, vi) + splat_i(127)) << 23;
    return (vf)(((vi)(p * (vf)power) & ~tiny) | none);
}

// Pairs of lanes, quarters, ... of two vectors added up; after all rounds lane i is the sum of vector i.
#define FOLD(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
#if LANES == 16
INL vf fold1(vf a, vf b) { return FOLD(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + FOLD(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31); }
INL vf fold2(vf a, vf b) { return FOLD(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + FOLD(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); }
INL vf fold4(vf a, vf b) { return FOLD(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) + FOLD(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31); }
INL vf fold8(vf a, vf b) { return FOLD(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + FOLD(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31); }
INL vf sums_of(const vf *v) {
    vf t[8];
    EACH(i, 8) t[i] = fold1(v[2 * i], v[2 * i + 1]);
    EACH(i, 4) t[i] = fold2(t[2 * i], t[2 * i + 1]);
    EACH(i, 2) t[i] = fold4(t[2 * i], t[2 * i + 1]);
    return fold8(t[0], t[1]);
}
#else
INL vf fold1(vf a, vf b) { return FOLD(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + FOLD(a, b, 1, 9, 3, 11, 5, 13, 7, 15); }
INL vf fold2(vf a, vf b) { return FOLD(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + FOLD(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
INL vf fold4(vf a, vf b) { return FOLD(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + FOLD(a, b, 4, 5, 6, 7, 12, 13, 14, 15); }
INL vf sums_of(const vf *v) {
    vf t[4];
    EACH(i, 4) t[i] = fold1(v[2 * i], v[2 * i + 1]);
    EACH(i, 2) t[i] = fold2(t[2 * i], t[2 * i + 1]);
    return fold4(t[0], t[1]);
}
#endif

// RMS norms.
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
