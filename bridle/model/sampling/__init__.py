"""The steps between logits and tokens, one concern per module: rows (gather, bias, mask), penalties, DRY,
filters (top-k, top-p, min-p, typical-p), cuts (top-n-sigma, dynamic temperature, XTC), Mirostat, draw,
log-probabilities. `bridle.model.sampler` puts them in order.

Every step treats a row on its own, and every sum that decides something is exact, so that a row's result is
bitwise the same whatever shares its batch.
"""
