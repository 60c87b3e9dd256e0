"""Muon for the matrices, AdamW for embeddings and norms.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by its nearest orthogonal matrix,
found with a few Newton-Schulz steps; on so short a training it learns about twice as much a token.
"""

from typing import cast

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: singular values near one, same singular vectors."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return cast(Tensor, x.T if tall else x)


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": 0.95, "decay": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are unused
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"]
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(momentum, group["momentum"]))
                scale = 0.2 * max(weight.shape) ** 0.5  # the size of an AdamW update
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * scale)


def optimisers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [Muon(matrices, lr), adam]
