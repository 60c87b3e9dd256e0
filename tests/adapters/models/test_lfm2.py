from typing import Any

import pytest
from transformers import AutoModelForCausalLM, Lfm2Config

from adapters.models.hybrid.lfm2 import Lfm2
from engine.errors import StartupError

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_multiple_of": 7},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
        {"block_auto_adjust_ff_dim": False},
    ],
)
def test_the_width_of_the_mlp_is_that_of_transformers(changes: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(Lfm2Config(**CONFIG, **changes))
    width = model.model.layers[0].feed_forward.w1.out_features
    assert Lfm2({**CONFIG, **changes}).shape.inner_size == width


def test_layers_with_attention_are_named_by_number_or_by_type() -> None:
    by_number = Lfm2({**CONFIG, "full_attn_idxs": [1]}).shape.recurrent
    types = ["conv", "full_attention", "conv"]
    assert by_number == Lfm2({**CONFIG, "layer_types": types}).shape.recurrent
    assert [each is None for each in by_number] == [False, True, False]


@pytest.mark.parametrize(
    ("field", "value"), [("full_attn_idxs", "1"), ("layer_types", ["conv", "mamba", "conv"])]
)
def test_other_layers_are_refused_by_the_name_of_the_field(field: str, value: object) -> None:
    with pytest.raises(StartupError, match=field):
        Lfm2({**CONFIG, field: value})


def test_the_fields_of_older_checkpoints_are_read() -> None:
    old = {name: value for name, value in CONFIG.items() if name != "intermediate_size"}
    assert Lfm2({**old, "block_ff_dim": 100}).shape == Lfm2(CONFIG).shape
