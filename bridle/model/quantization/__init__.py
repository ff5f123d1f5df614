"""Checkpoints whose weights were quantized by others: AWQ, GPTQ, FP8 and compressed-tensors. They are turned into forms
that the kernels here have while they are read; `--type int8` writes one of them.
"""
