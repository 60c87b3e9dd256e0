from pathlib import Path

from adapters.dialects import load_chat_template
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerSettings
from tests.examples.running import run_module


def test_training_writes_a_checkpoint_that_answers(tmp_path: Path) -> None:
    size = ("--steps", "2", "--batch-tokens", "256", "--threads", "1")
    run_module("builtin_model.train", "--out", tmp_path, *size)
    worker = Worker.load(WorkerSettings(str(tmp_path)), lambda what, done, total: None)
    assert worker.report.architecture == "LlamaForCausalLM"
    assert load_chat_template(tmp_path) is not None


def test_the_built_in_model_is_evaluated_through_a_server(server_url: str) -> None:
    size = ("--each", "1", "--max-tokens", "16")
    shown = run_module("builtin_model.evaluate", "--url", server_url, *size)
    assert "overall" in shown
