"""The optimizer of the training script: Muon for the matrices, Adam for embeddings and norms.

Weights that compute are 16-bit; the exact ones are kept here in fp32 and rounded into the model after each
step. All state is plain tensors under plain names, so a checkpoint needs nothing but safetensors.
"""

from __future__ import annotations

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that pushes all singular values towards 1."""


class Optimizer:
    """Steps a model's weights; `lr` is Muon's rate, and Adam's is `lr * adam_ratio`."""

    def __init__(
        self, model: nn.Module, *, momentum: float = 0.95, adam_ratio: float = 0.2, decay: float = 0.05
    ) -> None:
        """Weights are named by `model.named_parameters()`; tied ones appear once."""
        self._weights = dict(model.named_parameters())
        self._momentum, self._adam_ratio, self._decay = momentum, adam_ratio, decay
        self._state: dict[str, torch.Tensor] = {}
        for name, weight in self._weights.items():
            self._state[f"master.{name}"] = weight.detach().float().clone()
            self._state[f"first.{name}"] = torch.zeros_like(weight, dtype=torch.float32)
            if not _is_matrix(name, weight):
                self._state[f"second.{name}"] = torch.zeros_like(weight, dtype=torch.float32)

    def state(self) -> dict[str, torch.Tensor]:
        """All state by name; the tensors are the live ones."""
        return self._state

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over a state written by `state` and rounds its weights into the model.

        Raises `KeyError` if a tensor of this model is missing.
        """
        for name, tensor in self._state.items():
            tensor.copy_(state[name])
        self._round()

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """One update from the gradients in the model, which are then cleared; `number` counts from 1."""
        for name, weight in self._weights.items():
            if weight.grad is None:
                continue
            grad = weight.grad.float()
            if _is_matrix(name, weight):
                self._step_muon(name, grad, lr)
            else:
                self._step_adam(name, grad, lr * self._adam_ratio, number)
            weight.grad = None
        self._round()

    def _step_muon(self, name: str, grad: torch.Tensor, lr: float) -> None:
        master, first = self._state[f"master.{name}"], self._state[f"first.{name}"]
        first.lerp_(grad, 1 - self._momentum)
        update = orthogonalize(grad.lerp(first, self._momentum))
        master.mul_(1 - lr * self._decay)
        master.add_(update, alpha=-lr * max(1.0, grad.shape[0] / grad.shape[1]) ** 0.5)

    def _step_adam(self, name: str, grad: torch.Tensor, lr: float, number: int) -> None:
        master = self._state[f"master.{name}"]
        first, second = self._state[f"first.{name}"], self._state[f"second.{name}"]
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.05)
        scale = (second / (1 - 0.95**number)).sqrt_().add_(1e-8)
        master.addcdiv_(first / (1 - 0.9**number), scale, value=-lr)

    def _round(self) -> None:
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._state[f"master.{name}"])


def orthogonalize(matrix: torch.Tensor, num_iterations: int = 5) -> torch.Tensor:
    """The matrix (m, n) with its singular values pushed to about 1, as fp32; computed in bf16."""
    a, b, c = NEWTON_SCHULZ
    x: torch.Tensor = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.t() if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.t()  # (m, m) with m <= n
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.t() if is_tall else x).float()


def _is_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name
