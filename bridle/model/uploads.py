"""Numbers on their way to a device, such that the host does not wait for it.

A copy from ordinary memory waits until the GPU has come to it; one from pinned memory is a command like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`, which has it when it comes to use it; on a CPU it may be the same memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_list(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Plain numbers, likewise."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)
