"""Defaults that a `ModelConfig` takes from the machine: device, threads, and types of weights and of the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bridle.cgroups import num_cores
from bridle.config import ModelConfig
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def choose_device(name: str) -> torch.device:
    """Return the torch device with this name; `auto` is CUDA if the machine has a CUDA device. Raises `InvalidRequest`
    if the device is missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device is {name!r}; must be auto, cpu, cuda or cuda:N", "device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device is {name!r}; only cpu and cuda are supported", "device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device is {name!r}; this machine has {torch.cuda.device_count()} CUDA devices", "device")
    return device


def choose_devices(name: str, count: int) -> list[torch.device]:
    """Return a device for each of `count` processes that share a model: consecutive GPUs from `name` on, or the CPU for
    all. Raises `InvalidRequest` if there are too few GPUs."""
    first = choose_device(name)
    if first.type == "cpu":
        return [first] * count
    begin, found = first.index or 0, torch.cuda.device_count()
    if begin + count > found:
        start = f" from {first} on" if begin else ""
        raise InvalidRequest(f"shards is {count}; each needs a GPU, and there are {found - begin}{start}", "shards")
    return [torch.device("cuda", begin + rank) for rank in range(count)]


def choose_threads(num_threads: int | None) -> None:
    """Set the number of compute threads. The default is torch's choice, limited to the processors that this process may
    use. By default, torch counts all cores of the machine. In a container with two of sixty-four cores, torch's threads
    would mostly wait for each other."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif torch.get_num_threads() > (cores := num_cores()):
        torch.set_num_threads(cores)


def choose_dtype(config: ModelConfig, settings: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the data type for `config.dtype`. `auto` is float32 on a CPU. On other devices, `auto` is the checkpoint's
    own type if it is a half-precision type, otherwise bfloat16. With half precision, a GPU uses its matrix units, and
    reads half as many bytes."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return settings.dtype if settings.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def check_quantization(quantization: str, device: torch.device) -> None:
    """Raise `InvalidRequest` if `device` does not support this quantization of weights."""
    if quantization == "fp8":
        from bridle.model.float8 import check_float8

        check_float8(device)
    elif quantization not in ("none", "auto") and device.type != "cpu":
        raise InvalidRequest(f"quantization {quantization!r} needs a CPU; the device is {device}", "quantization")


def choose_kv_dtype(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of keys and values in the KV cache. Raises `InvalidRequest` if the kernels of this device do not
    support the type."""
    wanted = dtype if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype]
    if wanted is not dtype and device.type != "cpu":
        raise InvalidRequest(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; on {device} it must be 'auto' or the type of the weights, "
            f"{str(dtype).removeprefix('torch.')}",
            "kv_cache_dtype",
        )
    return wanted
