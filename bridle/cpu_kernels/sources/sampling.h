// What a sampler asks of rows of logits: the largest of those that a mask allows, a draw, and where given tokens stand beside
// the best ones. Columns come in blocks of BLOCK_COLUMNS, and no row depends on another.
#pragma once
#include "pool.h"

enum { BLOCK_COLUMNS = 256, MAX_BEST = 128, HEAD = 32 };   // HEAD: most nuclei are smaller
typedef double vd __attribute__((vector_size(8 * LANES), aligned(8)));

// -- the best tokens ----------------------------------------------------------------------------------------------------------

INL int any(vi v) {
    int64_t part[LANES / 2], found = 0;
    memcpy(part, &v, sizeof part);
    for (int i = 0; i < LANES / 2; i++) found |= part[i];
    return found != 0;
}
// Values in order, the largest first; of equal ones the earliest. Enters one that is larger than the last.
INL void enter(float *best, int64_t *places, int n, float value, int64_t place) {
    int i = n - 1;
    for (; i > 0 && value > best[i - 1]; i--) { best[i] = best[i - 1]; places[i] = places[i - 1]; }
    best[i] = value; places[i] = place;
}
// NaN counts as the largest value of its block. Each maximum waits for the one before it, so there are some side by side.
enum { AT_ONCE = 4 };
INL float block_maximum(const float *x) {
    vf most[AT_ONCE];
    vi none[AT_ONCE];
    EACH(k, AT_ONCE) { most[k] = load(x + k * LANES); none[k] = most[k] != most[k]; }
    for (int j = AT_ONCE * LANES; j < BLOCK_COLUMNS; j += AT_ONCE * LANES)
        EACH(k, AT_ONCE) { const vf v = load(x + j + k * LANES); most[k] = max_(v, most[k]); none[k] |= v != v; }
    for (int k = 1; k < AT_ONCE; k++) { most[0] = max_(most[k], most[0]); none[0] |= none[k]; }
    float t[LANES]; int32_t is_none[LANES];
    store(t, most[0]); memcpy(is_none, none, sizeof is_none);
    float largest = t[0];
    for (int i = 0; i < LANES; i++) { if (t[i] > largest) largest = t[i]; if (is_none[i]) return NAN; }
    return largest;
}
static void find_maxima(const float *x, int blocks, float *maxima) {
    for (int b = 0; b < blocks; b++) maxima[b] = block_maximum(x + b * BLOCK_COLUMNS);
}
static void find_best(const float *x, const float *maxima, int blocks, int n, float *best, int64_t *places) {
    float bound[MAX_BEST];
    int64_t unused[MAX_BEST];
    if (!n) return;
    // As many values as there are blocks are at least as large as the least of these.
    for (int i = 0; i < n; i++) { bound[i] = best[i] = -INFINITY; places[i] = 0; unused[i] = 0; }
    for (int b = 0; b < blocks; b++) if (maxima[b] > bound[n - 1]) enter(bound, unused, n, maxima[b], 0);
    for (int b = 0; b < blocks; b++) {
        if (!(maxima[b] >= bound[n - 1]) || maxima[b] <= best[n - 1]) continue;
        for (int j = b * BLOCK_COLUMNS; j < (b + 1) * BLOCK_COLUMNS; j += LANES) {
            const vf v = load(x + j);
            const vi above = v > splat(best[n - 1]);
            if (any(above)) for (int i = 0; i < LANES; i++) if (x[j + i] > best[n - 1]) enter(best, places, n, x[j + i], j + i);
        }
    }
}

// -- masks: bit i of a row's bytes, the lowest first, allows token i; what is beyond their end is forbidden -------------------

enum { WORDS = BLOCK_COLUMNS / 32, NONE, SOME, ALL };
// What a mask says of the block that begins at `column`, and how many it allows.
INL int mask_words(const uint8_t *mask, int64_t size, int column, uint32_t *words) {
    const int64_t left = size - column / 8;
    uint32_t any_of = 0, all_of = ~0u;
    memset(words, 0, 4 * WORDS);
    memcpy(words, mask + column / 8, left < 0 ? 0 : left < 4 * WORDS ? (size_t)left : 4 * WORDS);
    for (int i = 0; i < WORDS; i++) { any_of |= words[i]; all_of &= words[i]; }
    return !any_of ? NONE : all_of == ~0u ? ALL : SOME;
}
static void allow_block(const float *x, const uint32_t *words, float *to) {
    vi bit;
    EACH(i, LANES) bit[i] = 1 << i;
    const vi never = (vi)splat(-INFINITY);
    for (int j = 0; j < BLOCK_COLUMNS; j += LANES) {
        const vi on = (splat_i((int32_t)(words[j / 32] >> j % 32)) & bit) != 0;
        store(to + j, (vf)(((vi)load(x + j) & on) | (never & ~on)));
    }
}
static void forbid_block(float *x) { for (int j = 0; j < BLOCK_COLUMNS; j += LANES) store(x + j, splat(-INFINITY)); }

typedef struct {
    float *work;                                // [rows][columns], columns in whole blocks: changed in place
    const int64_t *where;                       // [masks]: which rows of work
    const uint8_t *const *masks;
    const int64_t *sizes;                       // [masks] of bytes
    int columns;
} allowance;
static void allow_row(const void *job, int i) {
    const allowance *a = job;
    float *row = a->work + (size_t)a->where[i] * (size_t)a->columns;
    uint32_t words[WORDS];
    for (int j = 0; j < a->columns; j += BLOCK_COLUMNS) {
        const int allows = mask_words(a->masks[i], a->sizes[i], j, words);
        if (allows == NONE) forbid_block(row + j);
        else if (allows == SOME) allow_block(row + j, words, row + j);
    }
}

typedef struct {
    const float *logits;                        // [rows][stride], of which the first `columns` count
    const int64_t *where;                       // [masks]: which rows of logits
    const uint8_t *const *masks;                // NULL: all are allowed
    const int64_t *sizes;                       // [masks] of bytes
    float *best;                                // [masks]: -inf where nothing is allowed
    int64_t *places;                            // [masks]: of equal ones the first
    int64_t stride;
    int columns;
} search;
// NaN counts as the largest.
static void search_row(const void *job, int i) {
    const search *a = job;
    const float *row = a->logits + (size_t)a->where[i] * (size_t)a->stride;
    float best = -INFINITY, near[BLOCK_COLUMNS];
    int64_t place = 0;
    uint32_t words[WORDS];
    for (int j = 0; j < a->columns && best == best; j += BLOCK_COLUMNS) {
        const float *x = row + j;
        const int left = a->columns - j, allows = a->masks[i] ? mask_words(a->masks[i], a->sizes[i], j, words) : ALL;
        if (allows == NONE) continue;
        if (left < BLOCK_COLUMNS) {             // the last one is filled up
            forbid_block(near);
            memcpy(near, x, sizeof(float) * (size_t)left);
            x = near;
        }
        if (allows == SOME) { allow_block(x, words, near); x = near; }
        const float most = block_maximum(x);
        if (!(most > best) && most == most) continue;
        int k = 0;
        while (x[k] != most && x[k] == x[k]) k++;
        best = most; place = j + k;
    }
    a->best[i] = best; a->places[i] = place;
}

// -- draws: weights in whole units of 2^-34, of which sums of doubles are exact in any order (sampling/weights.py) ------------

#define UNIT 17179869184.0f
#define LEAST -24.0f                            // what is less has no weight

typedef struct {
    const float *logits, *best, *temperature;   // best, temperature [rows]
    const double *uniform;                      // [rows], 0 <= u < 1
    const int64_t *where;                       // [rows]: which rows of logits
    const int64_t *top_k;                       // [rows], 0: all; NULL: no row is cut
    const double *top_p;                        // [rows]
    const float *floors;                        // [rows]: shifted logits below them go
    int64_t *tokens;                            // [rows]
    double *totals, *sums;                      // [rows], [rows][blocks]
    float *maxima;                              // [rows][blocks], if rows are cut
    int columns;
} draws;

// A row of shifted logits, (x - best) / temperature; of these stay: those above the edge, of those at it the ones up to
// place `last`, and none below the floor.
typedef struct { const float *x; vf best, temperature; float edge, floor; int last, is_cut, blocks; } kept;

INL vf shifted_at(const kept *c, int j) { return (load(c->x + j) - c->best) / c->temperature; }
INL float shift(const kept *c, float x) { return (x - c->best[0]) / c->temperature[0]; }
INL vf weigh_shifted(vf s) { return __builtin_elementwise_floor(exp_(max_(s, splat(LEAST))) * splat(UNIT)); }
INL vf weights_at(const kept *c, int j) {
    const vf s = shifted_at(c, j);
    if (!c->is_cut) return weigh_shifted(s);
    vi place = splat_i(j);
    EACH(i, LANES) place[i] += i;
    const vi stays = ((s > splat(c->edge)) | ((s == splat(c->edge)) & (place <= splat_i(c->last)))) & (s >= splat(c->floor));
    return (vf)((vi)weigh_shifted(s) & stays);
}
// The sums of the blocks, if they are wanted, and their total. `maxima` of unshifted logits spare blocks of which nothing stays.
static double sum_blocks(const kept *c, const float *maxima, double *sums) {
    double total = 0;
    for (int b = 0; b < c->blocks; b++) {
        if (sums) sums[b] = 0;
        if (c->is_cut && shift(c, maxima[b]) < c->edge) continue;
        vd sum = {0};
        for (int j = b * BLOCK_COLUMNS; j < (b + 1) * BLOCK_COLUMNS; j += LANES)
            sum += __builtin_convertvector(weights_at(c, j), vd);
        double t[LANES]; memcpy(t, &sum, sizeof t);
        for (int n = LANES / 2; n; n /= 2) for (int i = 0; i < n; i++) t[i] += t[i + n];
        total += t[0];
        if (sums) sums[b] = t[0];
    }
    return total;
}

// Where the tokens end, best first, before which there is less weight than `wanted`: the edge and how many stay at it. Digit by
// digit of -shifted, whose bits as integers are in its order; what has no weight is left aside.
enum { FIRST_SHIFT = 20, DIGIT = 10 };
INL vf as_float(uint32_t bits) { return (vf)splat_i((int32_t)bits); }
static int64_t find_edge(kept *c, const float *maxima, double wanted) {
    double sums[1 << (31 - FIRST_SHIFT)], running = 0;
    uint32_t prefix = 0;
    vf largest = splat(0.0f), least = splat(LEAST);     // of the digits that are known
    for (int low = FIRST_SHIFT, high = 31; ; high = low, low -= DIGIT) {
        const uint32_t digits = 1u << (high - low);
        memset(sums, 0, digits * sizeof *sums);
        for (int b = 0; b < c->blocks; b++) {
            if (!(shift(c, maxima[b]) >= least[0])) continue;
            for (int j = b * BLOCK_COLUMNS; j < (b + 1) * BLOCK_COLUMNS; j += LANES) {
                const vf s = shifted_at(c, j);
                const vi is_in = (s >= least) & (s <= largest);
                if (!any(is_in)) continue;
                const vf w = weigh_shifted(s);
                const vi digit = ((vi)(splat(0.0f) - s) >> low) & splat_i((int)digits - 1) & is_in;   // the others weigh nothing
                float weights[LANES];
                int32_t to[LANES];
                store(weights, (vf)((vi)w & is_in)); memcpy(to, &digit, sizeof to);
                for (int i = 0; i < LANES; i++) sums[to[i]] += weights[i];
            }
        }
        uint32_t digit = 0;
        while (digit < digits - 1 && running + sums[digit] < wanted) running += sums[digit++];
        prefix = prefix << (high - low) | digit;
        if (low) { largest = -as_float(prefix << low); least = max_(-as_float(((prefix + 1) << low) - 1), least); continue; }
        c->edge = 0.0f - as_float(prefix)[0];
        const double each = weigh_shifted(splat(c->edge))[0], most = ceil((wanted - running) / (each > 0 ? each : 1));
        return most < 1 ? 1 : most > INT32_MAX ? INT32_MAX : (int64_t)most;
    }
}
// The place of the token that is number `room`, from 1 on, of those at the edge.
static int find_last(const kept *c, const float *maxima, int64_t room) {
    for (int b = 0; b < c->blocks; b++) {
        if (shift(c, maxima[b]) < c->edge) continue;
        for (int j = b * BLOCK_COLUMNS; j < (b + 1) * BLOCK_COLUMNS; j += LANES) {
            const vi equal = shifted_at(c, j) == splat(c->edge);
            for (int i = 0; i < LANES; i++) if (equal[i] && !--room) return j + i;
        }
    }
    return c->blocks * BLOCK_COLUMNS;
}
// Keep the tokens, best first and of equal ones the earliest first, that are among `top_k` (0: all) and before which there is
// less than `top_p` of the weight of these; at least one.
static void cut_row(kept *c, const float *maxima, int64_t top_k, double top_p, double total) {
    float best[MAX_BEST];
    int64_t places[MAX_BEST], room = 1;
    const int n = top_k ? (int)top_k : HEAD;
    double weights[MAX_BEST], running = 0, sum = 0;
    find_best(c->x, maxima, c->blocks, n, best, places);
    for (int i = 0; i < n; i++) { best[i] = shift(c, best[i]); sum += weights[i] = weigh_shifted(splat(best[i]))[0]; }
    const double wanted = top_p * (top_k ? sum : total);
    int count = 0;
    while (count < n && (!count || running < wanted)) running += weights[count++];
    if (!top_k && running < wanted) room = find_edge(c, maxima, wanted);
    else {
        c->edge = best[count - 1];
        for (int i = count - 2; i >= 0 && best[i] == c->edge; i--) room++;
    }
    c->last = find_last(c, maxima, room);
}
static void draw_row(const void *job, int row) {
    const draws *d = job;
    const int blocks = d->columns / BLOCK_COLUMNS;
    kept c = {d->logits + (size_t)d->where[row] * d->columns, splat(d->best[row]), splat(d->temperature[row]),
             -INFINITY, -INFINITY, d->columns, 0, blocks};
    double *sums = d->sums + (size_t)row * blocks, total = 0;
    float *maxima = d->maxima ? d->maxima + (size_t)row * blocks : NULL;
    const int64_t top_k = d->top_k ? d->top_k[row] : 0;
    const int is_prefix = d->top_k && (top_k || d->top_p[row] < 1.0);
    if (!top_k) total = sum_blocks(&c, NULL, sums);
    if (d->top_k) find_maxima(c.x, blocks, maxima);
    if (is_prefix) cut_row(&c, maxima, top_k, d->top_p[row], total);
    if (is_prefix || (d->top_k && d->floors[row] > -INFINITY)) {
        c.floor = d->floors[row]; c.is_cut = 1;
        total = sum_blocks(&c, maxima, sums);
    }
    double target = floor(d->uniform[row] * total), running = 0;
    if (target > total - 1) target = total - 1;
    int block = 0;
    while (block < blocks - 1 && running + sums[block] <= target) running += sums[block++];
    int token = block * BLOCK_COLUMNS;
    const int last = token + BLOCK_COLUMNS - 1;
    for (int j = token, first = token; j <= last; j += LANES) {
        float w[LANES]; store(w, weights_at(&c, j));
        for (int i = 0; i < LANES; i++) { running += w[i]; first += running <= target; }
        token = first;
    }
    d->tokens[row] = token < last ? token : last;
    d->totals[row] = total;
}

// -- where tokens stand -------------------------------------------------------------------------------------------------------

typedef struct {
    const float *logits;
    const int64_t *tokens;                      // [rows]
    const double *totals;                       // [rows]: of the weights at temperature 1; what is negative is counted here
    float *maxima;                              // [rows][blocks]
    double *told;                               // [rows][4 + 2 num_best]: the token's logit and rank, the best logits, the
    int columns, num_best;                      // places of these, the largest logit (NaN if there is one), the total
} survey;

static int64_t num_above(const float *x, const float *maxima, int blocks, float bound) {
    int64_t count = 0;
    for (int b = 0; b < blocks; b++) {
        if (!(maxima[b] > bound)) continue;
        vi above = {0};
        for (int j = b * BLOCK_COLUMNS; j < (b + 1) * BLOCK_COLUMNS; j += LANES) above -= load(x + j) > splat(bound);
        int32_t t[LANES]; memcpy(t, &above, sizeof t);
        for (int i = 0; i < LANES; i++) count += t[i];
    }
    return count;
}
static float largest_of(const float *maxima, int blocks) {
    float largest = maxima[0];
    for (int b = 1; b < blocks && largest == largest; b++) if (!(maxima[b] <= largest)) largest = maxima[b];
    return largest;
}
static void survey_row(const void *job, int row) {
    const survey *s = job;
    const int blocks = s->columns / BLOCK_COLUMNS, n = s->num_best;
    const float *x = s->logits + (size_t)row * s->columns, chosen = x[s->tokens[row]];
    float *maxima = s->maxima + (size_t)row * blocks, best[MAX_BEST];
    int64_t places[MAX_BEST];
    double *told = s->told + (size_t)row * (4 + 2 * n), total = s->totals[row];
    find_maxima(x, blocks, maxima);
    find_best(x, maxima, blocks, n, best, places);
    const float largest = largest_of(maxima, blocks);
    if (total < 0) {
        const kept all = {x, splat(largest), splat(1.0f), -INFINITY, -INFINITY, s->columns, 0, blocks};
        total = sum_blocks(&all, NULL, NULL);
    }
    *told++ = chosen;
    *told++ = 1 + num_above(x, maxima, blocks, chosen);
    for (int i = 0; i < n; i++) { told[i] = best[i]; told[n + i] = places[i]; }
    told[2 * n] = largest; told[2 * n + 1] = total;
}
