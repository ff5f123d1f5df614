"""The steps between logits and tokens, one concern per module: rows (gather, bias, mask), penalties, DRY,
filters (top-k, top-p, min-p, typical-p), cuts (top-n-sigma, dynamic temperature, XTC), Mirostat, draw,
log-probabilities. `bridle.model.sampler` puts them in order.

Every step computes each row separately, and every sum that affects a choice is exact. So a row's result has the same
bits in any batch.
"""
