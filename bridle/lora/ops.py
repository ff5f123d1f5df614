"""Adds the results of adapters, `rows @ A @ B`, to the outputs of a step's linear layers. Each row is multiplied by the
A and B of its own adapter. Rows of one adapter are adjacent and form a *segment*. There are two implementations of the
product: `torch_ops` in plain torch, and `fused` for CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bridle.errors import InternalError
from bridle.lora.weights import PlacedAdapter


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` (exclusive) of a step, which belong to `adapter`."""

    start: int
    stop: int
    adapter: PlacedAdapter

    @property
    def length(self) -> int:
        return self.stop - self.start


class Product(Protocol):
    """Interface of the product of some row segments of a step, at the sites that their adapters change."""

    @property
    def sites(self) -> Iterable[int]: ...

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        """Add the adapters' results for `rows` [T, in] to `out` [T, columns], in place."""
        ...


class Multiplier(Protocol):
    """Interface of an object that makes the products of a step."""

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        """Return the products that multiply these segments of rows by their adapters."""
        ...


class AdapterKernel(Multiplier, Protocol):
    """Interface of a kernel that multiplies adapters."""

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Do slow work for the first adapter of a shape, such as compiling kernels. The thread that loaded the adapter
        to the device calls this method before steps use the adapter."""
        ...

    def clear(self) -> None:
        """Free memory that is cached between steps."""
        ...


class AdapterStep:
    """The adapters of one step. `add` adds the results of the adapters to a layer's outputs. `num_tokens` is the number
    of rows of the step."""

    def __init__(self, segments: Sequence[Segment], num_tokens: int, kernel: Multiplier) -> None:
        self.num_tokens = num_tokens
        self.num_added = 0
        self.by_site: dict[int, list[Product]] = {}
        for product in kernel.products(segments):
            for site in product.sites:
                self.by_site.setdefault(site, []).append(product)

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        """Add the adapters' results for `rows` to the site's outputs `out`, in place. `rows` and `out` may have leading
        dimensions of size one."""
        flat_rows = rows.reshape(-1, rows.shape[-1])
        flat_out = out.view(-1, out.shape[-1])
        if flat_rows.shape[0] != self.num_tokens:
            raise InternalError(
                f"a layer with an adapter got {flat_rows.shape[0]} rows; the step has {self.num_tokens} tokens"
            )
        for product in self.by_site[site]:
            product.add(site, flat_out, flat_rows)
        self.num_added += 1
