"""Multi-token prediction: one more layer behind a model, which predicts the token after the next.

DeepSeek-V3 (arXiv:2412.19437, section 2.2); Qwen3-Next and Qwen3.5 store it as `mtp.*`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.model.layers import Decoder
from engine.worker.ports import Linear, Norm, StepContext


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """An `MtpModel`; `decoder` has its one layer and final norm, and the model's embedding and
    head."""

    decoder: Decoder
    embedding_norm: Norm
    features_norm: Norm
    join: Linear  # [hidden, 2 * hidden]

    def layers(self, ids: Tensor, features: Tensor, context: StepContext) -> Tensor:
        embedded = self.embedding_norm(self.decoder.embed(ids, context.positions))
        joined = self.join(torch.cat((embedded, self.features_norm(features)), dim=1))
        return self.decoder.layers(joined, context)

    def features(self, hidden: Tensor) -> Tensor:
        return self.decoder.features(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)
