"""The steps between logits and tokens, each in its module. The modules are rows (gather, bias, mask), penalties, DRY,
filters (top-k, top-p, min-p, typical-p), truncation (top-n-sigma, dynamic temperature, XTC), Mirostat, draw, and
log-probabilities. `bridle.model.sampler` calls these modules in order.

Every step computes each row separately, and every sum that affects a choice is exact. So a row's result has the same
bits in any batch.
"""
