import json
from pathlib import Path

import pytest

from engine.lora import LoraReport, LoraSpec
from gateway.loras import LoraRegistry
from gateway.observe.metrics import LoraUsage
from tests.gateway.lora_loader import ScriptedLoader

NAMES = ("meta-llama/Llama-3.1-8B", "chat")


@pytest.mark.parametrize(
    ("config", "is_other"),
    [
        ({"base_model_name_or_path": "google/gemma-3-1b-it"}, True),
        ({"base_model_name_or_path": "/models/llama-3.1-8b"}, False),
        ({"base_model_name_or_path": "chat"}, False),
        ({"base_model_name_or_path": None}, False),
        ({}, False),
        ([], False),
    ],
)
def test_an_adapter_for_another_base_model_is_served_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: object, is_other: bool
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    registry = LoraRegistry(ScriptedLoader(), LoraUsage(1), NAMES, lambda *_: None)
    registry.start([LoraSpec(1, "mine", str(tmp_path))], [LoraReport(1, digest="0" * 64)], 0)
    assert "mine" in registry.served
    warnings = [record.getMessage() for record in caplog.records]
    expected = (
        "the LoRA adapter 'mine' was trained on google/gemma-3-1b-it, and this server serves "
        "meta-llama/Llama-3.1-8B"
    )
    assert warnings == ([expected] if is_other else [])


@pytest.mark.parametrize("path", ["/no/such/folder", "with a NUL \0"])
def test_files_that_cannot_be_read_are_the_workers_to_report(path: str) -> None:
    registry = LoraRegistry(ScriptedLoader(), LoraUsage(1), NAMES, lambda *_: None)
    registry.start([LoraSpec(1, "mine", path)], [LoraReport(1, digest="0" * 64)], 0)
    assert "mine" in registry.served
