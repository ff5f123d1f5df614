"""Tensor parallelism: one model over several processes. Each process has a part of every linear layer, according to the
model's tensor-parallel plan in transformers. In a column-parallel layer, a process has a part of the outputs. In a
row-parallel layer, a process has a part of the inputs, and the processes then add up their results. Each attention head
belongs to one process. The output head is split by tokens, and each process gets the logits of all tokens. All
processes run the same passes at the same time, and each has all embeddings and norms. `torch.distributed` gives the
rank of this process, and does the communication.

A layer has three implementations: transformers, lean, and fused. In each implementation, a layer sums over processes
twice per pass, on rows of the same size and type, so processes may use different ones. CUDA graphs pad steps, so either
all processes use graphs or none does (`all_agree`). While implementations of a layer are compared, sums over processes
are skipped (`unsummed`), because another process may not run the same comparison. On GPUs, a sum over processes is
queued in the compute stream, and the host does not wait for the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bridle.errors import ShardUnavailable, UnsupportedModel
from bridle.model.support_checks import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: The time limit of a collective in seconds. The supervisor notices processes that end or hang, and then ends the
#: group. A process that still imports or loads on a busy machine may come minutes later than the others.
COLLECTIVE_SECONDS = 600.0
#: The change to a layer for each style of the plans in transformers; other styles are refused.
_STYLES = {
    "colwise": "split",
    "rowwise": "sum",
    "replicated_with_grad_allreduce": "keep",
    "colwise_gather_output": "keep",  # of recurrent layers, which each process computes whole, with all states
}
#: True if row-parallel layers sum the parts of all processes.
is_summing: ContextVar[bool] = ContextVar("is_summing", default=True)


def join_group(store: Path, rank: int, num_ranks: int, device: torch.device) -> None:
    """Connect to the other processes, which use the file `store` to find each other. Each process has its own device.
    Blocks until all processes have connected and computed a test sum. Raises `ShardUnavailable` if the processes cannot
    connect."""
    is_cpu = device.type == "cpu"
    if is_cpu:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
    try:
        dist.init_process_group(
            "gloo" if is_cpu else "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=None if is_cpu else device,  # NCCL connects at once, with this GPU
        )
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones)
        found = int(ones)
    except RuntimeError as error:
        raise ShardUnavailable(f"rank {rank} on {device} cannot reach the other ranks: {error}") from error
    if found != num_ranks:
        raise ShardUnavailable(f"rank {rank} on {device} counts {found} ranks; must be {num_ranks}")


def num_ranks() -> int:
    """Return the number of processes that share the model: 1 unless this process has joined a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def read_plan(settings: PreTrainedConfig, count: int) -> dict[str, str]:
    """Return transformers' tensor-parallel plan for a model family, after checks that `count` processes can share the
    model. Raises `UnsupportedModel` with the reason."""
    settings = text_config(settings)  # each process keeps a tower whole
    family, plan = settings.model_type, getattr(settings, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(f"model type {family!r} has no tensor-parallel plan; set shards to 1")
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown:
        raise UnsupportedModel(
            f"the tensor-parallel plan of model type {family!r} has the unsupported style {unknown[0]!r}; "
            "set shards to 1"
        )
    num_heads = settings.num_attention_heads
    num_kv_heads = getattr(settings, "num_key_value_heads", None) or num_heads
    for what, number in (("key-value heads", num_kv_heads), ("attention heads", num_heads)):
        if number % count:
            raise UnsupportedModel(f"the model has {number} {what}, which {count} shards cannot share evenly")
    return dict(plan)


def split_model(model: nn.Module, plan: dict[str, str]) -> None:
    """Reduce each layer that the plan names to this process's part. Raises `UnsupportedModel` if a layer cannot be
    split among the processes."""
    rank, count = dist.get_rank(), dist.get_world_size()
    body = model.base_model
    assert isinstance(body, nn.Module)
    found = set()
    for name, module in list(body.named_modules()):
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        action = _STYLES.get(plan.get(pattern, ""))
        if action is None:
            continue
        found.add(pattern)
        if action != "keep":
            _replace(body, name, _split(name, module, action, rank, count))
    if missing := sorted(set(plan) - found):
        raise UnsupportedModel(f"the tensor-parallel plan names {missing[0]!r}, which {type(model).__name__} lacks")
    _split_head(model, rank, count)


def _split_head(model: Any, rank: int, count: int) -> None:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return  # a module of transformers that is kept whole
    part = VocabParallelHead(head, rank, count)
    roots: list[nn.Module] = [model, model.inner] if isinstance(getattr(model, "inner", None), nn.Module) else [model]
    for root in roots:
        for name, module in list(root.named_modules()):
            if module is head:
                _replace(root, name, part)


def share_of_bytes(tensor_bytes: Mapping[str, int], plan: Mapping[str, str], count: int) -> float:
    """Return the share of a checkpoint's bytes that each of `count` processes keeps."""
    split = {pattern for pattern, style in plan.items() if _STYLES[style] != "keep"}
    kept = total = 0.0
    for name, size in tensor_bytes.items():
        layer = re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0])
        total += size
        kept += size / count if layer == "lm_head" or any(layer.endswith(pattern) for pattern in split) else size
    return kept / total if total else 1.0


@contextmanager
def unsummed() -> Iterator[None]:
    """In this `with` block, row-parallel layers in this thread return the result of this process without the sum over
    processes. Comparisons of layer implementations run in this block."""
    token = is_summing.set(False)
    try:
        yield
    finally:
        is_summing.reset(token)


def _split(name: str, module: nn.Module, action: str, rank: int, count: int) -> nn.Module:
    if not isinstance(module, nn.Linear):
        raise UnsupportedModel(f"layer {name} is a {type(module).__name__}; only linear layers can be split")
    dim = 0 if action == "split" else 1
    if module.weight.shape[dim] % count:
        raise UnsupportedModel(f"layer {name} of {tuple(module.weight.shape)} cannot be split into {count} parts")
    weight = module.weight.chunk(count, dim)[rank].clone()
    share = Share(dim, rank, count)
    if action == "sum":
        return shared(RowParallel(weight, module.bias), share)
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device="meta")
    part.weight = nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        part.bias = nn.Parameter(module.bias.chunk(count)[rank].clone(), requires_grad=False)
    return shared(part, share)


def _replace(body: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(body.get_submodule(parent), child, part)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a linear layer that a process has: some of its outputs (`dim` 0) or some of its inputs (`dim` 1)."""

    dim: int = 0
    rank: int = 0
    count: int = 1


def share_of(module: nn.Module) -> Share:
    """Return the part of a layer that this process has; the whole layer if it was not split."""
    share = vars(module).get("share", Share())
    assert isinstance(share, Share)
    return share


def shared(module: nn.Module, share: Share) -> nn.Module:
    """Record that `module` computes the part `share` of a layer, and return the module."""
    vars(module)["share"] = share
    return module


class RowParallel(nn.Module):
    """A linear layer whose inputs are split over the processes. Each process computes its part of the sum. `add(out,
    rows)` may change this process's part before the parts are summed."""

    add: Callable[[Tensor, Tensor], None] | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)  # [out, in / ranks]
        self.bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer: [..., in / ranks] -> [..., out], the same in every process."""
        out = nn.functional.linear(rows, self.weight)
        if self.add is not None:
            self.add(out, rows)
        if is_summing.get():
            dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


class VocabParallelHead(nn.Module):
    """An output head whose vocabulary is split over the processes. Each process computes the logits of its part of the
    vocabulary; the last parts may be empty. All processes then get the logits of all tokens."""

    def __init__(self, head: nn.Linear, rank: int, count: int) -> None:
        super().__init__()
        self.in_features, self.out_features = head.in_features, head.out_features
        self._rank, self._count = rank, count
        size = -(-head.out_features // count)
        self.weight = nn.Parameter(_rows_of(head.weight, rank, size), requires_grad=False)  # [V / ranks, hidden]
        self.bias = None if head.bias is None else nn.Parameter(_rows_of(head.bias, rank, size), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute logits: [..., hidden] -> [..., V], the same in every process."""
        part = nn.functional.linear(rows.reshape(-1, self.in_features), self.weight, self.bias)  # [R, V / ranks]
        num_rows, size = part.shape
        whole = part.new_zeros(self._count * num_rows, size)
        if is_summing.get():
            gather = (
                getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            )  # its name before torch 2.13
            gather(whole, part)
        else:
            whole[self._rank * num_rows :][:num_rows] = part
        logits = whole.view(self._count, num_rows, size).transpose(0, 1).reshape(num_rows, self._count * size)
        logits = logits[:, : self.out_features].contiguous()
        return logits.view(*rows.shape[:-1], self.out_features)


def _rows_of(weight: Tensor, rank: int, size: int) -> Tensor:
    """Return `size` rows from `rank * size` on of a weight [V, ...]; rows after the last one are zeros."""
    part = weight.detach()[rank * size : (rank + 1) * size]
    rows = part.new_zeros(size, *part.shape[1:])
    rows[: len(part)] = part
    return rows


def all_agree(is_right: bool, device: torch.device) -> bool:
    """Return whether `is_right` is true in all processes. All processes get the same result, so that they take the same
    path in the code. Processes on different paths would wait for each other forever."""
    return bool(agree_on_least(int(is_right), device))


def agree_on_least(number: int, device: torch.device) -> int:
    """Return the smallest of the values that the processes pass as `number`."""
    if num_ranks() == 1:
        return number
    least = torch.tensor(number, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)
