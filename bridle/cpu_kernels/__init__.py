"""Quantized arithmetic for CPUs: features of the processor, number formats, and kernels in C and in plain torch.

This package knows tensors and bytes, nothing of models, sequences or steps. Where no shipped object fits the processor,
everything here runs as plain torch.
"""
