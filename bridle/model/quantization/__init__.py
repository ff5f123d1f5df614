"""Reads quantized checkpoints that other programs wrote: AWQ, GPTQ, FP8 and compressed-tensors. `schemes.py` reads a
checkpoint's `quantization_config`, and `weights.py` its packed weights. While a checkpoint is read, its weights are
converted to forms that bridle's kernels support. `bridle quantize --type int8` writes a checkpoint in a form that the
kernels support."""
