"""Reads and checks a checkpoint's `quantization_config`: the method, and the parameters that the tensors do not
contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridle.errors import UnsupportedModel

#: Supported quantization methods.
METHODS = ("awq", "gptq", "fp8", "fbgemm_fp8", "mxfp4", "modelopt", "compressed-tensors")
_FORMATS = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of a checkpoint. `zero_offset` is added to the zero points that the checkpoint stores. `block`
    has the two sizes of an FP8 block."""

    method: str
    bits: int = 8
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def read_scheme(config: Any) -> Scheme:
    """Return the scheme in a configuration. Raises `UnsupportedModel` for an unsupported format; the error names the
    method."""
    fields = config if isinstance(config, dict) else config.to_dict()
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    reader = _READERS.get(method)
    if reader is None:
        raise UnsupportedModel(
            f"the checkpoint is quantized by {method}; supported are {', '.join(METHODS)} and GGUF files. Load the "
            "original weights, with quantization='int8' if memory is short"
        )
    return reader(fields)


def _awq(fields: dict[str, Any]) -> Scheme:
    version, bits = str(fields.get("version", "gemm")).lower().rpartition(".")[2], fields.get("bits", 4)
    if version != "gemm" or bits != 4:
        raise UnsupportedModel(
            f"the checkpoint is quantized by AWQ in form {version!r} with {bits} bits; only gemm with 4 is supported"
        )
    return Scheme("awq", 4)


def _gptq(fields: dict[str, Any]) -> Scheme:
    bits, form = fields.get("bits"), str(fields.get("checkpoint_format", "gptq"))
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"the checkpoint is quantized by GPTQ in form {form!r} with {bits} bits; "
            "only gptq and gptq_v2 with 2, 4 or 8 are supported"
        )
    return Scheme("gptq", bits, zero_offset=1 if form == "gptq" else 0)


def _fp8(fields: dict[str, Any]) -> Scheme:
    block = fields.get("weight_block_size")
    if block is None:
        return Scheme("fp8")
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise UnsupportedModel(f"weight_block_size is {block!r}; must be two positive numbers")
    return Scheme("fp8", block=(block[0], block[1]))


def _modelopt(fields: dict[str, Any]) -> Scheme:
    kind = str(fields.get("quant_algo") or (fields.get("quantization") or {}).get("quant_algo"))
    if kind not in ("FP8", "NVFP4"):
        raise UnsupportedModel(f"the checkpoint is quantized by ModelOpt as {kind!r}; supported are FP8 and NVFP4")
    return Scheme("modelopt")


def _compressed(fields: dict[str, Any]) -> Scheme:
    if (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnsupportedModel("the checkpoint's weights are sparse (compressed-tensors), which is not supported")
    if (fields.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModel("the checkpoint's weights are rotated (compressed-tensors), which is not supported")
    groups = fields.get("config_groups") or {}
    found = {group.get("format") or fields.get("format") for group in groups.values()} or {fields.get("format")}
    wrong = sorted(str(form) for form in found if form not in _FORMATS)
    if wrong:
        raise UnsupportedModel(
            f"compressed-tensors format {wrong[0]!r} is not supported; known are {', '.join(_FORMATS)}"
        )
    blocks = {tuple(group["weights"].get("block_structure") or ()) for group in groups.values() if group.get("weights")}
    block = next((block for block in blocks if block), None)
    return Scheme("compressed-tensors", block=None if block is None else (int(block[0]), int(block[1])))


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": lambda fields: Scheme("mxfp4", 4),
    "compressed-tensors": _compressed,
}
