"""Addition of adapters to the outputs of linear layers in a step: `rows @ A @ B`, each row with its own A and B.
Rows of one adapter are adjacent and form a *segment*. The product of segments depends on the device:
`torch_product` is the plain implementation, `fused` that for CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bridle.errors import InternalError
from bridle.lora.weights import PlacedAdapter


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to before `stop` of a step belong to `adapter`."""

    start: int
    stop: int
    adapter: PlacedAdapter

    @property
    def length(self) -> int:
        return self.stop - self.start


class Product(Protocol):
    """Product of some segments of a step, at the sites that the segments' adapters change."""

    @property
    def sites(self) -> Iterable[int]: ...

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        """Add the adapters' results for `rows` [T, in] to `out` [T, columns], in place."""
        ...


class Multiplier(Protocol):
    """Factory of the products of a step."""

    def products(self, segments: Sequence[Segment]) -> list[Product]:
        """Return the products that compute these segments."""
        ...


class AdapterKernel(Multiplier, Protocol):
    """A kernel that multiplies adapters."""

    def prepare(self, adapter: PlacedAdapter) -> None:
        """Do work that is slow only the first time, such as compiling kernels. Called before steps use the adapter, by
        the thread that placed it."""
        ...

    def clear(self) -> None:
        """Free memory that is cached for further steps."""
        ...


class AdapterStep:
    """The adapters of one step, and the addition of their results. `num_tokens` is the number of the step's rows."""

    def __init__(self, segments: Sequence[Segment], num_tokens: int, kernel: Multiplier) -> None:
        self.num_tokens = num_tokens
        self.num_added = 0
        self.by_site: dict[int, list[Product]] = {}
        for product in kernel.products(segments):
            for site in product.sites:
                self.by_site.setdefault(site, []).append(product)

    def add(self, site: int, out: Tensor, rows: Tensor) -> None:
        """Add to the outputs of a site in place. `out` and `rows` may have leading dimensions of one."""
        flat_rows = rows.reshape(-1, rows.shape[-1])
        flat_out = out.view(-1, out.shape[-1])
        if flat_rows.shape[0] != self.num_tokens:
            raise InternalError(
                f"a layer with an adapter was called with {flat_rows.shape[0]} of {self.num_tokens} rows"
            )
        for product in self.by_site[site]:
            product.add(site, flat_out, flat_rows)
        self.num_added += 1
