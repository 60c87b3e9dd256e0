"""What layers are made of on a GPU."""

import torch
from torch import Tensor

from engine.worker.operators import TorchOperators


class PlainOperators(TorchOperators):
    """Plain torch, for a model that is computed at `place`."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._place)
