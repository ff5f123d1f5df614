"""Quantized checkpoints of other programs: AWQ, GPTQ, FP8 and compressed-tensors. `schemes.py` reads their
`quantization_config`, `weights.py` their codes. While a checkpoint is read, its weights are converted to forms that
bridle's kernels support. `bridle quantize --type int8` writes a checkpoint in such a form."""
