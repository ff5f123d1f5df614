"""Quantized checkpoints of other programs: AWQ, GPTQ, FP8 and compressed-tensors. `schemes.py` reads their
`quantization_config`, `weights.py` their codes. They are turned into forms that the kernels here have while they are
read; `--type int8` writes one of them."""
