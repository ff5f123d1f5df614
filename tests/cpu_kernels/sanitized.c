// Runs every kernel over many shapes, each in memory of just its size, so that a sanitizer sees what is read or written
// beside it. Links with the sources of the kernels; ends with 0. With `figures` it says what they gave, in two weighted sums
// each, so that instruction sets can be compared that have the same number of lanes.
#include <stdio.h>
#include <stdlib.h>
#include "bridle.c"
#ifdef FENCED
#include "fences.h"
#endif

static int tells;
static void tell(const char *what, const float *x, size_t n) {
    double plain = 0, mixed = 0;
    for (size_t i = 0; i < n; i++) { plain += x[i]; mixed += x[i] * (double)(i * 2654435761u % 1009); }
    if (tells) printf("%s %zu %.9g %.9g\n", what, n, plain, mixed);
}

static void *filled(size_t n) {             // bytes of a fixed stream
    static uint32_t state = 1;
    uint8_t *p = malloc(n ? n : 1);
    for (size_t i = 0; i < n; i++) { state = state * 1664525u + 1013904223u; p[i] = (uint8_t)(state >> 24); }
    return p;
}
static float *floats(size_t n) {
    uint8_t *bytes_of = filled(n);
    float *p = malloc(4 * (n ? n : 1));
    for (size_t i = 0; i < n; i++) p[i] = ((float)bytes_of[i] - 128.0f) / 100.0f;
    free(bytes_of);
    return p;
}
static matrix random_matrix(int kind, int outputs, int given) {
    const traits t = TRAITS[kind];
    const int step = t.has_factor ? BLOCK * SUPER : BLOCK, inputs = (given + step - 1) / step * step;
    const size_t panels = (size_t)(outputs + LANES - 1) / LANES, blocks = (size_t)inputs / BLOCK;
    if (kind == FLOAT32) return (matrix){(uint8_t *)floats(panels * LANES * given), filled(0), floats(outputs), kind, outputs, given, given};
    matrix m = {filled(panels * blocks * block_bytes(t)), NULL, floats((size_t)outputs), kind, outputs, inputs, t.group ? inputs : given};
    uint8_t *scales = filled(panels * scale_bytes(t, blocks));
    // halves of about 0.1, floats too: the upper byte of each decides
    for (size_t i = 1; i < panels * scale_bytes(t, blocks); i += 2) scales[i] = 0x2e;
    m.scales = scales;
    return m;
}
static void drop(matrix m) { free((void *)m.weights); free((void *)m.scales); free((void *)m.bias); }
static size_t scratch_size(matrix m, int rows) {
    return (size_t)rows * (m.kind == FLOAT32 ? 4 * m.inputs : m.inputs + m.inputs / BLOCK * 12);
}

static void try_linear(int kind, int outputs, int given, int rows) {
    const matrix m = random_matrix(kind, outputs, given);
    float *x = floats((size_t)rows * m.given), *out = floats((size_t)rows * outputs);
    uint8_t *scratch = malloc(scratch_size(m, rows));
    bridle_linear(&m, x, scratch, out, rows, 1);
    for (int i = 0; i < rows * outputs; i++) if (out[i] != out[i]) { printf("kind %d: not a number\n", kind); exit(1); }
    tell("linear", out, (size_t)rows * outputs);
    free(x); free(out); free(scratch); drop(m);
}

static void try_packing(int kind, int outputs, int blocks) {
    const traits t = TRAITS[kind];
    const int groups = t.has_factor ? SUPER : 1, inputs = blocks * groups * BLOCK;
    const size_t panels = (size_t)(outputs + LANES - 1) / LANES;
    uint8_t *from = filled((size_t)outputs * blocks * LAYOUTS[kind].bytes);
    uint8_t *weights = malloc(panels * blocks * groups * block_bytes(t)), *scales = malloc(panels * scale_bytes(t, (size_t)blocks * groups));
    bridle_pack(from, weights, scales, kind, outputs, inputs, 1);
    free(from); free(weights); free(scales);
}

static void *pool(int kv, size_t n) {       // keys or values of a type
    float *x = floats(n);
    if (kv == KV_FLOAT32) return x;
    uint8_t *out = malloc(kv_bytes(kv) * n);
    for (size_t i = 0; i < n; i++) if (kv == KV_INT8) out[i] = (uint8_t)i; else memcpy(out + 2 * i, (uint8_t *)(x + i) + 2, 2);
    free(x);
    return out;
}

// `variant`: bit 0 norms behind the parts, bit 1 the other activation, bit 2 sinks and a soft-cap, bit 3 gated heads.
static void try_layers(int kind, int tokens, int before, int heads, int kv_heads, int dim, int window, int kv, int variant) {
    const int hidden = 256, gates = 512, inner = heads * dim, gated = variant >> 3 & 1;
    const int width = ((1 + gated) * heads + 2 * kv_heads) * dim, context = tokens + before, turned = gated ? dim / 2 : dim;
    const size_t numbers = (size_t)context * kv_heads * dim;
    layer l = {.norm = floats(hidden), .last_norm = variant & 1 ? floats(hidden) : NULL, .mlp_norm = floats(hidden),
               .mlp_last_norm = variant & 1 ? floats(hidden) : NULL, .head_norm = floats((size_t)(heads + kv_heads) * dim),
               .sinks = variant & 4 ? floats(heads) : NULL, .keys = pool(kv, numbers), .values = pool(kv, numbers),
               .key_scales = kv == KV_INT8 ? floats((size_t)context * kv_heads) : NULL,
               .value_scales = kv == KV_INT8 ? floats((size_t)context * kv_heads) : NULL,
               .out = random_matrix(TRAITS[kind].has_factor ? Q8_0 : kind, hidden, inner),
               .down = random_matrix(kind, hidden, gates), .rotation = 1 + (variant & 1), .window = window, .kv = kv, .activation = variant >> 1 & 1,
               .is_norm_of_all_heads = variant & 1, .eps = 1e-6f, .mlp_eps = 1e-6f, .head_eps = 1e-6f, .scale = 0.1f,
               .softcap = variant & 4 ? 5.0f : 0.0f, .share = variant & 2 ? 0.5f : 1.0f, .has_gate = gated};
    if (TRAITS[kind].has_factor) {              // matrices of several types, as files have them
        const int parts[] = {(1 + gated) * inner, kv_heads * dim, kv_heads * dim}, kinds[] = {kind, Q6_K, Q8_0};
        for (int i = 0; i < 3; i++) l.qkv[l.num_qkv++] = random_matrix(kinds[i], parts[i], hidden);
        for (int i = 0; i < 2; i++) l.gate_up[l.num_gate_up++] = random_matrix(i ? Q4_0 : kind, gates, hidden);
    } else {
        l.qkv[l.num_qkv++] = random_matrix(kind, width, hidden);
        l.gate_up[l.num_gate_up++] = random_matrix(kind, 2 * gates, hidden);
    }
    int64_t *slots = malloc(8 * tokens), *rows = malloc(8 * ROW_FIELDS), *spans = malloc(8 * 4);
    const int per_chunk = QUERIES * kv_heads / heads, first = context / 2, tables = l.rotation;
    for (int i = 0; i < tokens; i++) slots[i] = before + i < first ? context - first + before + i : before + i - first;
    spans[0] = context - first; spans[1] = first; spans[2] = 0; spans[3] = context - first;   // the cache in two parts, turned over
    const int begin = first ? 0 : 1;
    rows[OFFSET] = 0; rows[LENGTH] = tokens; rows[CONTEXT] = context; rows[FIRST_SPAN] = begin; rows[FIRST_CHUNK] = 0;
    const int widest = 2 * gates > width ? 2 * gates : width;
    size_t room = scratch_size(l.qkv[0], tokens);
    if (scratch_size(l.out, tokens) > room) room = scratch_size(l.out, tokens);
    if (scratch_size(l.down, tokens) > room) room = scratch_size(l.down, tokens);
    step s = {floats((size_t)tables * tokens * turned), floats((size_t)tables * tokens * turned), slots, rows, spans,
              floats((size_t)tokens * hidden), floats((size_t)tokens * hidden), floats((size_t)tokens * widest),
              floats((size_t)tokens * inner), floats((size_t)tokens * inner), floats((size_t)tokens * hidden), malloc(room), {0},
              tokens, 1, (tokens + per_chunk - 1) / per_chunk * kv_heads, hidden, heads, kv_heads, dim, turned, 1};
    bridle_layers(&s, &l, 1);
    tell("layers", s.hidden, (size_t)tokens * hidden);
    for (int part = 0; part < PARTS; part++) bridle_part(&s, &l, part);
    for (int i = 0; i < tokens * hidden; i++) if (s.hidden[i] != s.hidden[i]) { printf("layer: not a number\n"); exit(1); }
    for (int i = 0; i < l.num_qkv; i++) drop(l.qkv[i]);
    for (int i = 0; i < l.num_gate_up; i++) drop(l.gate_up[i]);
    drop(l.out); drop(l.down);
    free((void *)l.norm); free((void *)l.last_norm); free((void *)l.mlp_norm); free((void *)l.mlp_last_norm);
    free((void *)l.head_norm); free((void *)l.sinks); free(l.keys); free(l.values); free(l.key_scales); free(l.value_scales);
    free((void *)s.cos); free((void *)s.sin); free(slots); free(rows); free(spans);
    free(s.hidden); free(s.normed); free(s.wide); free(s.attended); free(s.mixed); free(s.kept); free(s.scratch);
}

// A layer with a mixer, another one beside it, and a network without gates, over two sequences of four slots; the first one's
// state is saved on the way. `variant`: bit 0 inputs in another order, bit 1 factors and no norm.
static void try_mixer(int kind, int first, int second, int groups, int copies, int size, int columns, int variant) {
    const int is_scan = kind == MAMBA, ordered = variant & 1, scaled = variant >> 1 & 1;
    const int tokens = first + second, heads = groups * copies * (is_scan ? columns : 1), hidden = 280, gates = 40, taps = 3;
    if (is_scan) columns = 1;
    const int inner = heads * columns, rank = 5, parameters = rank + 2 * size;
    const int channels = kind == SHORT_CONVOLUTION || is_scan ? inner : 2 * groups * size + inner;
    const int width = kind == SHORT_CONVOLUTION ? 3 * channels : is_scan ? 2 * channels : channels + inner + heads * (kind == DELTA_NET ? 2 : 1);
    const size_t numbers = (size_t)4 * heads * size * columns;
    int32_t *places = malloc(4 * (size_t)heads);
    for (int h = 0; h < heads; h++) places[h] = heads - 1 - h;
    const int32_t runs[] = {channels, width - channels, 0, channels};
    const matrix within[] = {random_matrix(FLOAT32, parameters, channels), random_matrix(FLOAT32, channels, rank)};
    float *norm = floats(is_scan ? parameters : inner), *factors = floats(width > gates ? width : gates);
    mixer m = {floats(channels * taps), floats(channels), floats(heads), floats((size_t)heads * size), floats(heads),
               scaled && kind != DELTA_NET ? NULL : norm, within, places, runs,
               floats((size_t)4 * taps * channels), floats(numbers), kind, channels, taps, taps, groups, heads, size, columns, ordered ? 2 : 0, 1e-6f, 0, INFINITY};
    for (int h = 0; h < heads * size; h++) ((float *)m.fall)[h] = -fabsf(m.fall[h]);
    layer l = {.norm = floats(hidden), .mlp_norm = floats(hidden), .mixer = &m, .out = random_matrix(FLOAT32, hidden, inner),
               .down = random_matrix(FLOAT32, hidden, gates), .activation = RELU2, .eps = 1e-6f, .mlp_eps = 1e-6f, .share = 1,
               .factors = scaled ? factors : NULL, .beside = KEEPS};
    l.qkv[l.num_qkv++] = random_matrix(FLOAT32, width, hidden);
    l.gate_up[l.num_gate_up++] = random_matrix(FLOAT32, gates, hidden);
    const int64_t stretches[] = {0, first - 1, 1, 2, first - 1, 1, 0, 2, first, second, 0, 0}, all[] = {1, 1, 2, 0}, saves[] = {2, 3};
    stretch table[2];
    step s = {.hidden = floats((size_t)tokens * hidden), .normed = floats((size_t)tokens * hidden), .wide = floats((size_t)tokens * (width > gates ? width : gates)),
              .attended = floats((size_t)tokens * inner), .mixed = floats((size_t)tokens * (ordered ? width : channels)),
              .kept = floats((size_t)tokens * hidden), .scratch = malloc(4 * (size_t)tokens * (inner > hidden ? inner : hidden)),
              .states = {stretches, all, saves, table, 2}, .tokens = tokens, .hidden_size = hidden, .parallel = 1};
    layer layers[] = {l, l, l};
    layers[1].beside = READS; layers[1].num_gate_up = 0; layers[2].num_qkv = 0; layers[2].beside = ALONE;
    bridle_layers(&s, layers, 3);
    tell("mixer", s.hidden, (size_t)tokens * hidden);
    tell("states", m.inputs, (size_t)4 * taps * channels);
    for (int i = 0; i < tokens * hidden; i++) if (s.hidden[i] != s.hidden[i]) { printf("mixer: not a number\n"); exit(1); }
    drop(l.qkv[0]); drop(l.gate_up[0]); drop(l.out); drop(l.down); drop(within[0]); drop(within[1]);
    free((void *)m.taps); free((void *)m.bias); free((void *)m.shift); free((void *)m.fall); free((void *)m.skip); free(norm); free(factors);
    free(places); free(m.inputs); free(m.states); free((void *)l.norm); free((void *)l.mlp_norm);
    free(s.hidden); free(s.normed); free(s.wide); free(s.attended); free(s.mixed); free(s.kept); free(s.scratch);
}

// Two sequences, of which the second one has no state yet. A size is also that of a part of a head; rows lie apart.
static void try_recurrent(int first, int second, int groups, int copies, int size, int wide) {
    const int tokens = first + second, heads = groups * copies, apart = 3, inner = heads * size;
    const size_t numbers = (size_t)heads * size * wide;
    float *states[] = {floats(numbers), floats(numbers)};
    const stretch stretches[] = {{0, first, 0, states[0]}, {first, second, 1, states[1]}};
    const size_t row = (size_t)heads * (size > wide ? size : wide) + apart;
    float *a = floats(tokens * row), *b = floats(tokens * row), *c = floats(tokens * row), *steps = floats((size_t)tokens * inner);
    float *rates = floats(numbers + (size_t)tokens * heads), *skip = floats(inner), *out = malloc(4 * (size_t)tokens * heads * (size > wide ? size : wide));
    for (int i = 0; i < tokens * inner; i++) steps[i] = steps[i] < 0 ? steps[i] / 2 : -steps[i] / 2;
    delta_rule rule = {a, b, c, steps, rates, out, stretches, NULL, NULL, NULL, NULL, NULL,
                       row, row, row, inner, heads, 0, 2, groups, heads, size, wide, size, 0};
    bridle_delta_rule(&rule, 1);
    tell("delta", out, (size_t)tokens * heads * wide);
    rule.decays = 1; rule.decay_stride = heads;
    bridle_delta_rule(&rule, 1);
    tell("delta", states[0], numbers);
    for (size_t i = 0; i < numbers; i++) rates[i] = fabsf(rates[i]);
    bridle_state_space(&(state_space){a, steps, rates, b, c, skip, out, stretches, row, row, row, 2, groups, heads, wide, size}, 1);
    tell("space", out, (size_t)tokens * heads * wide);
    bridle_scan(&(scan){a, steps, rates, b, c, skip, a, out, stretches, row, inner, row, row, row, 2, inner, wide}, 1);
    tell("scan", out, (size_t)tokens * inner);
    bridle_convolve(&(convolution){a, rates, skip, out, stretches, row, 2, inner, wide > 4 ? 4 : wide, wide > 4 ? 4 : wide, 1}, 1);
    tell("conv", out, (size_t)tokens * inner);
    for (int i = 0; i < tokens * inner; i++) if (out[i] != out[i]) { printf("recurrent: not a number\n"); exit(1); }
    free(states[0]); free(states[1]); free(a); free(b); free(c); free(steps); free(rates); free(skip); free(out);
}

static void try_sampling(int rows, int blocks, int num_best, int kind) {
    const int columns = blocks * BLOCK_COLUMNS;
    float *logits = floats((size_t)rows * columns), *best = floats(rows), *ones = floats(rows);
    for (int i = 0; i < rows * columns; i++) logits[i] = kind == 1 ? -INFINITY : kind == 2 && i % 3 ? NAN : logits[i] * 9;
    const int wide = 4 + 2 * num_best;
    double *uniform = malloc(8 * rows), *totals = malloc(8 * rows), *sums = malloc(8 * (size_t)rows * blocks);
    double *told = malloc(8 * (size_t)rows * wide);
    int64_t *where = malloc(8 * rows), *tokens = malloc(8 * rows);
    float *maxima = malloc(4 * (size_t)rows * blocks), *found = malloc(4 * (size_t)rows * wide);
    for (int i = 0; i < rows; i++) {
        where[i] = rows - 1 - i; uniform[i] = i ? 1.0 - 0x1p-53 : 0; ones[i] = 1; tokens[i] = i % columns; totals[i] = -1;
    }
    bridle_survey(&(survey){logits, tokens, totals, maxima, told, columns, num_best}, rows, 1);
    for (int i = 0; i < rows * wide; i++) found[i] = i % wide == wide - 1 ? 0 : (float)told[i];      // totals are rounded
    tell("told", found, kind == 0 ? (size_t)rows * wide : 0);
    for (int i = 0; i < rows; i++) best[i] = num_best ? found[(size_t)where[i] * wide + 2] : 0;
    bridle_draw(&(draws){logits, best, ones, uniform, where, NULL, NULL, NULL, tokens, totals, sums, NULL, columns}, rows, 1);
    const uint8_t **masks = malloc(sizeof *masks * rows);
    int64_t *sizes = malloc(8 * rows), *places = malloc(8 * rows);
    for (int i = 0; i < rows; i++) {                // of all lengths, up to beyond the last column
        sizes[i] = (int64_t)columns / 8 - 37 * i + 3 < 0 ? 0 : (int64_t)columns / 8 - 37 * i + 3;
        uint8_t *mask = malloc(sizes[i] + 1);
        for (int64_t k = 0; k < sizes[i]; k++) mask[k] = i % 3 == 2 ? 0xff : (uint8_t)(k * 37 % 256 * (k / 40 % 2));
        masks[i] = i % 4 == 3 ? NULL : mask;
        if (!masks[i]) free(mask);
    }
    for (int less = 0; less < 3; less++) {          // rows may end within a block
        bridle_search(&(search){logits, where, masks, sizes, best, places, columns, columns - 97 * less}, rows, 1);
        for (int i = 0; i < rows; i++) found[i] = (float)places[i];
        tell("places", found, kind == 0 ? rows : 0);
    }
    for (int i = 0; i < rows; i++) if (!masks[i]) { masks[i] = malloc(1); sizes[i] = 0; }
    float *work = malloc(4 * (size_t)rows * columns);
    memcpy(work, logits, 4 * (size_t)rows * columns);
    bridle_allow(&(allowance){work, where, masks, sizes, columns}, rows, 1);
    double left = 0;
    for (size_t i = 0; i < (size_t)rows * columns; i++) left += work[i] > -INFINITY ? 1 : 0;
    best[0] = (float)left;
    tell("allowed", best, kind == 0 ? 1 : 0);
    for (int i = 0; i < rows; i++) free((void *)masks[i]);
    free(masks); free(sizes); free(places); free(work);
    int64_t *top_k = malloc(8 * rows);
    double *top_p = malloc(8 * rows);
    float *floors = floats(rows);
    for (int i = 0; i < rows; i++) { top_k[i] = i % 3 ? 0 : num_best; top_p[i] = i % 2 ? 0.99 : 1; floors[i] = i % 4 ? -INFINITY : -2; }
    bridle_draw(&(draws){logits, best, ones, uniform, where, top_k, top_p, floors, tokens, totals, sums, maxima, columns}, rows, 1);
    for (int i = 0; i < rows; i++) { best[i] = (float)tokens[i]; ones[i] = (float)(totals[i] / UNIT); }
    tell("drawn", best, rows); tell("totals", ones, rows);
    free(top_k); free(top_p); free(floors);
    free(logits); free(best); free(ones); free(uniform); free(totals); free(sums); free(where); free(tokens); free(told);
    free(maxima); free(found);
}

int main(int count, char **arguments) {
    bridle_threads(2);
    tells = count > 1 && !strcmp(arguments[1], "figures");
    if (count > 1 && !tells) {              // what must be found: a result for which there is no room
        const matrix m = random_matrix(Q8_0, 40, 64);
        float *x = floats(64 * 3), *out = floats(40 * 3 - 1);
        bridle_linear(&m, x, malloc(scratch_size(m, 3)), out, 3, 0);
        return 0;
    }
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int outputs = 1; LAYOUTS[kind].bytes && outputs < 50; outputs += 7) try_packing(kind, outputs, 1 + outputs % 3);
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int outputs = 1; outputs < 50; outputs += 7)
            for (int rows = 1; rows < 30; rows += rows < 6 ? 1 : 5)
                try_linear(kind, outputs, kind == INT8 || kind == FLOAT32 ? 5 * outputs : 512, rows);
    const int shapes[][5] = {{1, 0, 2, 1, 64}, {1, 200, 7, 1, 64}, {5, 63, 8, 2, 32}, {40, 3, 4, 4, 128}, {3, 130, 32, 1, 16}, {2, 9, 2, 2, 256}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int turn = 0; turn < 28; turn++) {
            const int kinds[] = {INT8, Q8_0, Q4_0, FLOAT32, Q4_K, Q5_K, Q6_K};
            try_layers(kinds[turn % 7], shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], shapes[i][4], turn % 3 * 37, turn % 3,
                       turn % 16);
        }
    for (int rows = 1; rows < 12; rows += 5)
        for (int blocks = 1; blocks < 40; blocks += 13)
            for (int turn = 0; turn < 9; turn++) try_sampling(rows, blocks, turn / 3 * 64, turn % 3);
    for (int size = 1; size < 130; size += size < 40 ? 13 : 44)
        for (int wide = 1; wide < 80; wide += wide < 20 ? 7 : 29)
            for (int turn = 0; turn < 3; turn++) try_recurrent(1 + 4 * turn, 5 - 2 * turn, 1 + turn % 2, 1 + turn, size, wide);
    for (int kind = SHORT_CONVOLUTION; kind <= MAMBA; kind++)
        for (int turn = 0; turn < 9; turn++) try_mixer(kind, 2 + turn, 1 + turn % 4, 1 + turn % 2, 1 + turn % 3, 1 + 7 * turn, 3 + 13 * turn, turn % 4);
    printf("all ran\n");
    return 0;
}
