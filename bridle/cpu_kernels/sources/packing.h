// Blocks of files brought into the order of the products: see packing.py, which has the same in plain torch.
#pragma once
#include "linear.h"

// The place of everything in a block of a file, in bytes; -1 for what a kind lacks.
typedef struct { int bytes, scale, minimum, factors, high, low; } block_layout;
static const block_layout LAYOUTS[NUM_KINDS] = {
    [Q8_0] = {34, 0, -1, -1, -1, 2}, [Q4_0] = {18, 0, -1, -1, -1, 2}, [Q4_1] = {20, 0, 2, -1, -1, 4},
    [Q5_0] = {22, 0, -1, -1, 2, 6}, [Q5_1] = {24, 0, 2, -1, 4, 8}, [Q4_K] = {144, 0, 2, 4, -1, 16},
    [Q5_K] = {176, 0, 2, 4, 16, 48}, [Q6_K] = {210, 208, -1, 192, 128, 0},
};

// 32 integers of group g of a block, without their zero; of 8 bits as they are stored.
INL void integers_of(int kind, const uint8_t *block, int g, uint8_t *q) {
    const block_layout at = LAYOUTS[kind];
    const uint8_t *low = block + at.low, *high = block + at.high;
    switch (kind) {
    case Q8_0: for (int j = 0; j < 32; j++) q[j] = low[j] ^ ZERO8; break;
    case Q4_0: case Q4_1: for (int j = 0; j < 16; j++) { q[j] = low[j] & 15; q[j + 16] = low[j] >> 4; } break;
    case Q5_0: case Q5_1:
        for (int j = 0; j < 16; j++) {
            q[j] = (low[j] & 15) | (high[j / 8] >> j % 8 & 1) << 4;
            q[j + 16] = low[j] >> 4 | (high[2 + j / 8] >> j % 8 & 1) << 4;
        }
        break;
    case Q4_K: for (int j = 0; j < 32; j++) q[j] = low[g / 2 * 32 + j] >> g % 2 * 4 & 15; break;
    case Q5_K: for (int j = 0; j < 32; j++) q[j] = (low[g / 2 * 32 + j] >> g % 2 * 4 & 15) | (high[j] >> g & 1) << 4; break;
    case Q6_K:
        low += g / 4 * 64 + g % 2 * 32; high += g / 4 * 32;
        for (int j = 0; j < 32; j++) q[j] = (low[j] >> g % 4 / 2 * 4 & 15) | (high[j] >> g % 4 * 2 & 3) << 4;
        break;
    }
}

// They are taken four at a time: groups 0 to 7 as words.
INL void write_integers(const uint8_t *q, uint8_t *to, int bits) {
    uint32_t w[8], v[8];
    memcpy(w, q, 32);
    const uint32_t low = 0x0f0f0f0f;
    if (bits == 8) memcpy(v, w, 32);
    else for (int g = 0; g < 4; g++) v[g] = (w[g] & low) | (w[g + 4] & low) << 4;
    if (bits == 5) { v[4] = 0; for (int g = 0; g < 8; g++) v[4] |= (w[g] >> 4 & 0x01010101) << g; }
    if (bits == 6)
        for (int h = 0; h < 2; h++) { v[4 + h] = 0; for (int g = 0; g < 4; g++) v[4 + h] |= (w[4 * h + g] >> 4 & 0x03030303) << 2 * g; }
    for (int g = 0; g < bits; g++) memcpy(to + (size_t)g * 4 * LANES, v + g, 4);
}

// Of K-quants: factors of groups, and offsets after them, each of six bits in twelve bytes; of Q6_K sixteen whole factors.
INL void write_factors(int kind, const uint8_t *p, uint8_t *to) {
    if (kind == Q6_K) { for (int n = 0; n < 16; n++) to[n * LANES] = p[n]; return; }
    for (int n = 0; n < 4; n++) {
        to[n * LANES] = p[n] & 63;
        to[(n + 4) * LANES] = (p[n + 8] & 15) | p[n] >> 6 << 4;
        to[(n + 8) * LANES] = p[n + 4] & 63;
        to[(n + 12) * LANES] = p[n + 8] >> 4 | p[n + 4] >> 6 << 4;
    }
}

// The scales of one block of a file, of one output.
INL void write_scales(int kind, const uint8_t *block, uint8_t *to, int lane) {
    const block_layout at = LAYOUTS[kind];
    memcpy(to + 2 * lane, block + at.scale, 2);
    to += 2 * LANES;
    if (at.minimum >= 0) {
        uint16_t low;
        memcpy(&low, block + at.minimum, 2);
        if (at.factors < 0) low ^= 0x8000;              // of these it is added
        memcpy(to + 2 * lane, &low, 2);
        to += 2 * LANES;
    }
    if (at.factors >= 0) write_factors(kind, block + at.factors, to + lane);
}

typedef struct { const uint8_t *blocks; uint8_t *weights, *scales; int kind, outputs, inputs; } packing;

INL void pack_panel(const packing *p, int panel, int kind) {
    const traits t = TRAITS[kind];
    const int groups = t.has_factor ? SUPER : 1, count = p->inputs / (BLOCK * groups), size = LAYOUTS[kind].bytes;
    const size_t weights = block_bytes(t), scales = scale_bytes(t, (size_t)groups);
    uint8_t *w = p->weights + (size_t)panel * count * groups * weights, *s = p->scales + (size_t)panel * count * scales;
    const int left = p->outputs - panel * LANES, lanes = left < LANES ? left : LANES;
    if (lanes < LANES) { memset(w, 0, count * groups * weights); memset(s, 0, count * scales); }
    for (int b = 0; b < count; b++, w += groups * weights, s += scales)
        for (int lane = 0; lane < lanes; lane++) {
            const uint8_t *block = p->blocks + ((size_t)(panel * LANES + lane) * count + b) * size;
            write_scales(kind, block, s, lane);
            for (int g = 0; g < groups; g++) {
                uint8_t q[32];
                integers_of(kind, block, g, q);
                write_integers(q, w + g * weights + 4 * lane, t.bits);
            }
        }
}

#define PACK(KIND) case KIND: pack_panel(job, panel, KIND); break;
static void pack_chunk(const void *job, int panel) {
    switch (((const packing *)job)->kind) {
    PACK(Q8_0) PACK(Q4_0) PACK(Q4_1) PACK(Q5_0) PACK(Q5_1) PACK(Q4_K) PACK(Q5_K) PACK(Q6_K)
    }
}
