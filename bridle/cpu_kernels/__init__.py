"""Quantized arithmetic for CPUs: features of the processor, number formats, and kernels in C and in plain torch.

This package works on tensors and bytes, and does not know models, sequences or steps. If no shipped object fits the
processor, plain torch computes everything in this package.
"""
