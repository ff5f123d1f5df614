"""Quantized arithmetic for CPUs: processor features, quantized number formats, and kernels in C and plain torch.

This package works on tensors and bytes; it has no notion of models, sequences or steps. If no shipped object fits the
processor, all functions of this package run in plain torch.
"""
