"""Quantized arithmetic for CPUs: what the processor can do, the number formats, and kernels in C beside plain torch.

This package knows tensors and bytes, nothing of models, sequences or steps. Where no shipped object fits the processor,
everything here runs as plain torch.
"""
