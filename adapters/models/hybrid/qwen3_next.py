"""Qwen3-Next: Qwen 3.5 MoE, but the rows of two projections lie together by key head.

in_proj_qkvz    for each key head: q, k, v of its value heads, z of its value heads
in_proj_ba      for each key head: b of its value heads, a of its value heads
"""

from itertools import pairwise

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.hybrid.qwen3_5_moe import Qwen35Moe
from engine.worker.ports import DeltaShape, LinearWeight, Routing, TensorSlice


class Qwen3Next(Qwen35Moe):
    """`Qwen3NextForCausalLM`; layers with a dense MLP between the sparse ones are not supported."""

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("decoder_sparse_step", 1)
        fields.reject_unless("mlp_only_layers", [])
        return Routing(
            fields.integer("num_experts_per_tok", 10),
            renormalizes=fields.flag("norm_topk_prob", True),
        )

    def _delta_inputs(
        self, projections: Projections, at: str, whole: DeltaShape
    ) -> list[LinearWeight]:
        shard, per_key = projections.shard, whole.num_value_heads // whole.num_key_heads
        heads, hidden = shard.even(whole.num_key_heads), shard.shape.hidden_size
        values = per_key * whole.value_dim

        def of_heads(name: str, *widths: int) -> list[LinearWeight]:
            """The rows of this rank's heads: those of the first width of all heads first."""
            ends = [sum(widths[:count]) for count in range(len(widths) + 1)]
            shape = (whole.num_key_heads * ends[-1], hidden)
            return [
                projections.weights.weight(
                    TensorSlice(
                        f"{at}.in_proj_{name}.weight",
                        shape,
                        rows=range(head * ends[-1] + start, head * ends[-1] + stop),
                    )
                )
                for start, stop in pairwise(ends)
                for head in heads.run
            ]

        qkvz = of_heads("qkvz", whole.key_dim, whole.key_dim, values, values)
        return [*qkvz, *of_heads("ba", per_key, per_key)]
