"""Quantized arithmetic for CPUs: features of the processor, number formats, and kernels in C and in plain torch.

This package works on tensors and bytes; it has no notion of models, sequences or steps. If no shipped object fits the
processor, all functions of this package run in plain torch.
"""
