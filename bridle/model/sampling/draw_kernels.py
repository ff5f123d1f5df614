"""The Triton kernels of `bridle.model.sampling.device_draw`, which documents their order. Importing this module needs
Triton.

Pointers: `logits` [R, V]; `masks` [slots, words] of 32 tokens each; `counts` [slots, V] and `biases` [slots, V]. `ints`
[N, INTS] and `floats` [N, FLOATS] are the parameters of rows (`columns` names them). A row is cut into P parts of
`part` columns. The results of the parts are in `peaks`, `places`, `sums` and `equals` [N, P]. `work` [cut rows, V] has
the logits of rows with top-k or top-p (cut rows), and `heads` the best logits of these rows in order. Only integers are
summed (see `draw_numbers`), so sums are the same on any GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bridle.model.sampling.draw_numbers import (
    FLOATS,
    INTS,
    LEAST,
    LEAST_BITS,
    NEVER,
    PROMPT,
    SPAN,
    best_of,
    edge_of,
    penalized,
    steered,
    uniform_of,
    weigh,
)

# -- before the draw ---------------------------------------------------------------------------------------------


@triton.jit
def count_tokens(
    words: tl.tensor, histories: tl.tensor, kept: tl.tensor, counts: tl.tensor, vocab: tl.tensor, block: tl.constexpr
) -> None:
    """Count how often each token occurs in the output and in the prompt; append new tokens to the history. Program
    axes: histories, blocks of tokens."""
    slot = tl.program_id(0)
    span = histories + slot * SPAN
    place = tl.program_id(1) * block + tl.arange(0, block)
    is_token = place < tl.load(span + 2)
    num_kept, base = tl.load(span + 3), tl.load(span + 4)
    is_new = is_token & (place >= num_kept)
    token = tl.load(kept + base + place, is_token & (place < num_kept), -1)
    token = tl.where(is_new, tl.load(words + tl.load(span) + place - num_kept, is_new, -1), token)
    tl.store(kept + base + place, token, is_new & (base >= 0))
    is_token = is_token & (token >= 0) & (token < vocab)
    to = counts + slot.to(tl.int64) * vocab + token
    is_prompt = place < tl.load(span + 1)
    tl.atomic_or(to, tl.zeros_like(token) + PROMPT, is_token & is_prompt)
    tl.atomic_add(to, tl.zeros_like(token) + 1, is_token & (place >= tl.load(span + 1)))


@triton.jit
def place_biases(
    words: tl.tensor, addends: tl.tensor, biases: tl.tensor, vocab: tl.tensor, block: tl.constexpr
) -> None:
    """Write each bias value to the column of its token. Program axes: biases, blocks of tokens."""
    slot = tl.program_id(0)
    span = addends + slot * SPAN
    place = tl.program_id(1) * block + tl.arange(0, block)
    length = tl.load(span + 1)
    token = tl.load(words + tl.load(span) + place, place < length, -1)
    value = tl.load(words + tl.load(span) + length + place, place < length, 0).to(tl.float32, bitcast=True)
    tl.store(biases + slot.to(tl.int64) * vocab + token, value, (token >= 0) & (token < vocab))


@triton.jit(do_not_specialize=["mask_words", "num_parts"])
def find_peaks(
    logits: tl.tensor,
    ints: tl.tensor,
    floats: tl.tensor,
    masks: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    work: tl.tensor,
    vocab: tl.tensor,
    mask_words: tl.tensor,
    num_parts: tl.tensor,
    part: tl.constexpr,
) -> None:
    """Find the largest logit of each part of a row, and the first column that has it. Program axes: rows, parts."""
    row, number = tl.program_id(0), tl.program_id(1)
    ints += row * INTS
    column = number * part + tl.arange(0, part)
    is_column = column < vocab
    x = penalized(logits, ints, floats + row * FLOATS, masks, counts, biases, column, is_column, vocab, mask_words)
    is_none = tl.max((x != x).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(x == x, x, NEVER), 0)
    tl.store(peaks + row * num_parts + number, tl.where(is_none, float("nan"), peak))
    tl.store(places + row * num_parts + number, tl.min(tl.where(x == peak, column, 2147483647), 0))
    slot = tl.load(ints + 6)
    tl.store(work + slot.to(tl.int64) * vocab + column, x, is_column & (slot >= 0))


@triton.jit(do_not_specialize=["mask_words", "num_parts"])
def weigh_parts(
    logits: tl.tensor,
    ints: tl.tensor,
    floats: tl.tensor,
    masks: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    equals: tl.tensor,
    edges: tl.tensor,
    rooms: tl.tensor,
    vocab: tl.tensor,
    mask_words: tl.tensor,
    num_parts: tl.tensor,
    is_last: tl.constexpr,
    part: tl.constexpr,
    block_parts: tl.constexpr,
) -> None:
    """Compute the weight of each part of a row. Before the last call of this kernel, all logits in the part count. In
    the last call, logits above the bound of top-k and top-p (edge) and of min-p (floor) count. In the last call, the
    kernel also counts logits equal to the edge. Program axes: rows, parts."""
    row, number = tl.program_id(0), tl.program_id(1)
    ints += row * INTS
    floats += row * FLOATS
    temperature = tl.load(floats)
    best = best_of(peaks, row, num_parts, block_parts)
    if (temperature == 0) | (best != best) | (best == NEVER) | (best == float("inf")):
        return
    column = number * part + tl.arange(0, part)
    is_column = column < vocab
    x = penalized(logits, ints, floats, masks, counts, biases, column, is_column, vocab, mask_words)
    x = tl.div_rn(x - best, temperature + tl.zeros_like(x))
    weight = weigh(x)
    if is_last:
        edge, _ = edge_of(ints, edges, rooms)
        weight = tl.where((x > edge) & (x >= tl.load(floats + 1)), weight, 0)
        tl.store(equals + row * num_parts + number, tl.sum((x == edge).to(tl.int32), 0))
    tl.store(sums + row * num_parts + number, tl.sum(weight, 0))


@triton.jit
def _weight_to(
    work: tl.tensor, best: tl.tensor, temperature: tl.tensor, edge: tl.tensor, vocab: tl.tensor, part: tl.constexpr
) -> tl.tensor:
    """Return the total weight of the logits in a row of `work` that are at least `edge`."""
    found = tl.zeros((part,), tl.int64)
    for begin in range(0, vocab, part):
        column = begin + tl.arange(0, part)
        x = tl.load(work + column, column < vocab, NEVER)
        x = tl.div_rn(x - best, temperature + tl.zeros_like(x))
        found += tl.where(x >= edge, weigh(x), 0)
    return tl.sum(found, 0)


@triton.jit
def _searched(
    work: tl.tensor,  # of this row
    best: tl.tensor,
    temperature: tl.tensor,
    edge: tl.tensor,  # an edge that is too large
    above: tl.tensor,  # the weight above this edge
    wanted: tl.tensor,
    vocab: tl.tensor,
    part: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Search for the bound of top-p, which is the smallest logit that is kept. Return the largest bound at or above
    which the logits have at least the weight `wanted`. Also return how many logits equal to the bound are kept."""
    # The values are at most 0, so the bits of their absolute values have the same order as the absolute values.
    low = (0.0 - edge).to(tl.int32, bitcast=True) - 1
    high = low * 0 + LEAST_BITS
    while high - low > 1:
        middle = low + (high - low) // 2
        size = middle.to(tl.float32, bitcast=True)
        found = _weight_to(work, best, temperature, 0.0 - size, vocab, part)
        is_less = found.to(tl.float64) < wanted
        low = tl.where(is_less, middle, low)
        high = tl.where(is_less, high, middle)
        above = tl.where(is_less, found, above)
    edge = 0.0 - high.to(tl.float32, bitcast=True)
    each = tl.maximum(weigh(edge), 1).to(tl.float64)
    return edge, tl.maximum(tl.ceil((wanted - above.to(tl.float64)) / each).to(tl.int64), 1)


@triton.jit(do_not_specialize=["num_parts", "num_heads"])
def find_edges(
    ints: tl.tensor,
    floats: tl.tensor,
    doubles: tl.tensor,
    cut_rows: tl.tensor,
    heads: tl.tensor,
    work: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    edges: tl.tensor,
    rooms: tl.tensor,
    vocab: tl.tensor,
    num_parts: tl.tensor,
    num_heads: tl.tensor,
    part: tl.constexpr,
    block_parts: tl.constexpr,
    block_heads: tl.constexpr,
) -> None:
    """Find the bounds of top-k and top-p: the smallest logit that is kept, and how many logits equal to it are kept.
    Program axis: cut rows. Usually the bound of top-k and top-p is among the best logits. If the bound is not among the
    best logits, a bitwise search over the whole row finds it."""
    slot = tl.program_id(0)
    row = tl.load(cut_rows + slot)
    temperature = tl.load(floats + row * FLOATS)
    best = best_of(peaks, row, num_parts, block_parts)
    if (best != best) | (best == NEVER) | (best == float("inf")):
        return
    order = tl.arange(0, block_heads)
    x = tl.load(heads + slot * num_heads + order, order < num_heads, NEVER)
    x = tl.div_rn(x - best, temperature + tl.zeros_like(x))
    top_k = tl.load(ints + row * INTS + 5)
    is_among = order < tl.where(top_k > 0, tl.minimum(top_k, num_heads), num_heads)
    weight = tl.where(is_among, weigh(x), 0)
    number = tl.arange(0, block_parts)
    whole = tl.sum(tl.load(sums + row * num_parts + number, number < num_parts, 0), 0)
    whole = tl.where(top_k > 0, tl.sum(weight, 0), whole)
    wanted = tl.load(doubles + row) * whole.to(tl.float64)
    running = tl.cumsum(weight, 0)
    stays = is_among & ((running - weight).to(tl.float64) < wanted)
    length = tl.maximum(tl.sum(stays.to(tl.int32), 0), 1)
    edge = tl.min(tl.where(order < length, x, float("inf")), 0)
    room = (length - tl.sum((x > edge).to(tl.int32), 0)).to(tl.int64)
    if (top_k == 0) & (num_heads < vocab) & (tl.sum(weight, 0).to(tl.float64) < wanted):
        above = tl.sum(tl.where(x > edge, weight, 0), 0)
        work += slot.to(tl.int64) * vocab
        edge, room = _searched(work, best, temperature, edge, above, wanted, vocab, part)
    tl.store(edges + slot, edge)
    tl.store(rooms + slot, room)


# -- the draw ----------------------------------------------------------------------------------------------------


@triton.jit
def _offset(weight: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Return the first index at which the cumulative weights exceed `target`; the last index if they never do."""
    running = tl.cumsum(weight, 0)
    return tl.minimum(tl.sum((running <= target).to(tl.int32), 0), weight.shape[0] - 1)


@triton.jit
def _greedy(
    peaks: tl.tensor,  # of this row, like `places`
    places: tl.tensor,
    best: tl.tensor,
    num_parts: tl.tensor,
    block_parts: tl.constexpr,
) -> tl.tensor:
    """Return the first column that has the row's largest logit."""
    number = tl.arange(0, block_parts)
    peak = tl.load(peaks + number, number < num_parts, NEVER)
    return tl.min(tl.load(places + number, (number < num_parts) & (peak == best), 2147483647), 0).to(tl.int64)


@triton.jit(do_not_specialize=["mask_words", "num_parts"])
def pick(
    logits: tl.tensor,
    ints: tl.tensor,
    floats: tl.tensor,
    longs: tl.tensor,
    masks: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    equals: tl.tensor,
    edges: tl.tensor,
    rooms: tl.tensor,
    tokens: tl.tensor,  # [N] int64
    vocab: tl.tensor,
    mask_words: tl.tensor,
    num_parts: tl.tensor,
    part: tl.constexpr,
    block_parts: tl.constexpr,
) -> None:
    """Select the token of each row; -1 if no token can be sampled. Program axis: rows."""
    row = tl.program_id(0)
    ints += row * INTS
    floats += row * FLOATS
    temperature = tl.load(floats)
    best = best_of(peaks, row, num_parts, block_parts)
    if (best != best) | (best == NEVER) | (best == float("inf")):
        tl.store(tokens + row, tl.full((), -1, tl.int64))
        return
    if temperature == 0:
        token = _greedy(peaks + row * num_parts, places + row * num_parts, best, num_parts, block_parts)
        tl.store(tokens + row, token)
        return
    number = tl.arange(0, block_parts)
    is_part = number < num_parts
    edge, room = edge_of(ints, edges, rooms)
    floor = tl.load(floats + 1)
    is_cut = tl.load(ints + 6) >= 0
    each = tl.where(is_cut & (edge >= floor), weigh(tl.where(is_cut, edge, LEAST)), 0)
    tied = tl.load(equals + row * num_parts + number, is_part & is_cut, 0).to(tl.int64)
    before = tl.cumsum(tied, 0) - tied  # logits equal to the edge in earlier parts
    weight = tl.load(sums + row * num_parts + number, is_part, 0)
    weight += tl.minimum(tl.maximum(room - before, 0), tied) * each
    running = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    uniform = uniform_of(tl.load(longs + 2 * row), tl.load(longs + 2 * row + 1))
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = tl.minimum(tl.sum((is_part & (running <= target)).to(tl.int32), 0), num_parts - 1)
    rest = target - tl.sum(tl.where(number < chosen, weight, 0), 0)
    left = room - tl.sum(tl.where(number < chosen, tied, 0), 0)
    column = chosen * part + tl.arange(0, part)
    is_column = column < vocab
    x = penalized(logits, ints, floats, masks, counts, biases, column, is_column, vocab, mask_words)
    x = tl.div_rn(x - best, temperature + tl.zeros_like(x))
    is_equal = (x == edge) & is_cut
    stays = (x > edge) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= left))
    offset = _offset(tl.where(stays & (x >= floor), weigh(x), 0), rest)
    tl.store(tokens + row, (chosen * part + offset).to(tl.int64))


# -- what is told ------------------------------------------------------------------------------------------------


@triton.jit
def _key(x: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Encode logits and their columns as int64 keys. A larger logit has a larger key. Of equal logits, the first has
    the largest key. NaN counts as the largest logit."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FC00000)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - column)


@triton.jit
def _logit(key: tl.tensor) -> tl.tensor:
    """Return the logit of a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["mask_words"])
def copy_told(
    logits: tl.tensor,
    ints: tl.tensor,
    told: tl.tensor,  # [reporting rows, 2]: the row, and whether bias and mask count
    masks: tl.tensor,
    biases: tl.tensor,
    keys: tl.tensor,  # [reporting rows, V] int64
    vocab: tl.tensor,
    mask_words: tl.tensor,
    part: tl.constexpr,
) -> None:
    """Copy the logits of rows that report log-probabilities, encoded as keys. Program axes: reporting rows, parts."""
    slot = tl.program_id(0)
    ints += tl.load(told + 2 * slot) * INTS
    column = tl.program_id(1) * part + tl.arange(0, part)
    is_column = column < vocab
    if tl.load(told + 2 * slot + 1) != 0:
        x = steered(logits, ints, masks, biases, column, is_column, vocab, mask_words)
    else:
        x = tl.load(logits + tl.load(ints).to(tl.int64) * vocab + column, is_column, NEVER).to(tl.float32)
    tl.store(keys + slot.to(tl.int64) * vocab + column, _key(x, column), is_column)


@triton.jit(do_not_specialize=["num_parts", "num_best"])
def tell(
    told: tl.tensor,
    keys: tl.tensor,  # [reporting rows, V]
    tokens: tl.tensor,
    best: tl.tensor,  # [reporting rows, num_best], the largest keys
    chosen: tl.tensor,  # [reporting rows]
    told_sums: tl.tensor,  # [reporting rows, P] int64
    ranks: tl.tensor,  # [reporting rows, P] int64
    vocab: tl.tensor,
    num_parts: tl.tensor,
    num_best: tl.tensor,
    part: tl.constexpr,
) -> None:
    """Write, for each part of a row, its weight and the number of its logits that are larger than the sampled token's.
    Also write the sampled token's logit. Program axes: rows that report log-probabilities, parts."""
    slot, number = tl.program_id(0), tl.program_id(1)
    keys += slot.to(tl.int64) * vocab
    token = tl.maximum(tl.load(tokens + tl.load(told + 2 * slot)), 0)
    value = _logit(tl.load(keys + token))
    column = number * part + tl.arange(0, part)
    x = tl.where(column < vocab, _logit(tl.load(keys + column, column < vocab, 0)), NEVER)
    shifted = x - _logit(tl.load(best + slot * num_best))
    weight = weigh(tl.where(shifted == shifted, shifted, LEAST))
    tl.store(told_sums + slot * num_parts + number, tl.sum(weight, 0))
    tl.store(ranks + slot * num_parts + number, tl.sum((x > value).to(tl.int64), 0))
    if number == 0:
        tl.store(chosen + slot, value)
