from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from adapters.models.hybrid.falcon_h1 import FalconH1
from adapters.models.hybrid.granite_hybrid import GraniteHybrid, GraniteMoeHybrid, granite_hybrid
from adapters.models.hybrid.nemotron_h import NemotronH
from engine.errors import StartupError
from engine.worker.ports import MambaShape, Shard
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Placement
from tests.engine.worker.process.driving import load_worker
from tests.models.checkpoints import make_checkpoint

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "layer_types": ["mamba", "mamba", "attention"],
}


def test_layers_have_their_old_and_new_names() -> None:
    new = ["linear_attention", "linear_attention", "full_attention"]
    old = granite_hybrid(CONFIG).shape
    assert old == granite_hybrid({**CONFIG, "layer_types": new}).shape
    shape = MambaShape(1, 8, 16, 8, 4)
    assert old.recurrent == (shape, shape, None)


def test_a_model_with_attention_only_has_no_states() -> None:
    shape = granite_hybrid({**CONFIG, "layer_types": ["attention"] * 3}).shape
    assert shape.recurrent_layers == ()
    assert shape.attention_layers == (0, 1, 2)


@pytest.mark.parametrize(("count", "family"), [(0, GraniteHybrid), (4, GraniteMoeHybrid)])
def test_a_model_may_have_experts(count: int, family: type) -> None:
    found = granite_hybrid({**CONFIG, "num_local_experts": count})
    assert type(found) is family
    assert (found.shape.experts is None) == (count == 0)
    assert found.shape.inner_size == (40 if count else 48)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["mamba", "conv", "attention"]),
        ("layer_types", None),
        ("mamba_n_heads", 7),
        ("mamba_d_head", 16),
        ("mamba_n_groups", 3),
        ("hidden_act", "gelu"),
        ("time_step_limit", [0.001, 0.1]),
        ("position_embedding_type", "alibi"),
    ],
)
def test_other_models_are_refused_by_the_name_of_a_field(field: str, value: object) -> None:
    with pytest.raises(StartupError, match="mamba_n_heads" if "mamba" in field else field):
        granite_hybrid({**CONFIG, field: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate=True"),
        ({"projectors_bias": True}, "projectors_bias"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ({"mamba_d_ssm": 60}, "mamba_n_heads=8"),
    ],
)
def test_other_forms_of_falcon_h1_are_refused(changes: dict[str, Any], named: str) -> None:
    own = {**CONFIG, "mamba_d_ssm": 48}
    shape = FalconH1(own).shape
    assert shape.recurrent == (MambaShape(1, 8, 16, 6, 4),) * 3
    assert shape.attention_layers == (0, 1, 2)
    with pytest.raises(StartupError, match=named):
        FalconH1({**own, **changes})


def test_layers_of_nemotron_h_are_named_by_a_pattern_or_by_their_types() -> None:
    own = {**CONFIG, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 2}
    del own["layer_types"]
    by_pattern = NemotronH({**own, "hybrid_override_pattern": "M-MM*-*"}).shape
    types = ["mamba", "mlp", "linear_attention", "mamba", "attention", "mlp", "full_attention"]
    assert by_pattern == NemotronH({**own, "layers_block_type": types}).shape
    mamba = MambaShape(2, 8, 16, 6, 4)
    assert by_pattern.recurrent == (mamba, mamba, mamba, None, None)


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("-M*", "layer 0 is an MLP"),
        ("M--*", "layer 2 is an MLP"),
        ("ME*", "experts"),
        ("MX*", "hybrid_override_pattern"),
        ("", "hybrid_override_pattern"),
    ],
)
def test_other_patterns_of_nemotron_h_are_refused(pattern: str, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        NemotronH({**CONFIG, "layer_types": None, "hybrid_override_pattern": pattern})


@pytest.mark.parametrize("limit", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]])
def test_time_steps_without_limits_are_accepted(limit: object) -> None:
    assert granite_hybrid({**CONFIG, "time_step_limit": limit}).shape.recurrent_layers


@pytest.mark.parametrize(
    "variant", ["granite_hybrid", "granite_hybrid_moe", "bamba", "falcon_h1_norm", "nemotron_h"]
)
def test_all_parameters_are_counted(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, variant)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    report = load_worker(tmp_path).report
    assert report.num_parameters == sum(each.numel() for each in model.parameters())


def test_ranks_that_cannot_share_the_groups_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "granite_hybrid_groups")
    shape = Checkpoint.open(str(tmp_path)).family.shape
    with pytest.raises(StartupError, match="2 groups of recurrent layers"):
        Shard.of(shape, Placement(num_ranks=4), None)
