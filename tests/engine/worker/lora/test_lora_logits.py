from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.lora import LoraSpec
from engine.step import SampleSpec, Step, StepEntry, StepId
from engine.worker.cpu import recorded_decoder
from engine.worker.lora.loading import Loras
from engine.worker.lora.model import LoraModel
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.engine.worker.process.fleet import fleet
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import Gguf
from tests.models.loras import ALL, ATTENTION, adapted_model, logits_of, make_lora

CONFIGS: dict[str, dict[str, Any]] = {
    "all_linears": {},
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.(1|2)\.(self_attn\.(q|k)_proj|mlp\.down_proj)"},
    "rslora": {"use_rslora": True, "r": 8, "target_modules": ATTENTION},
    "rank_pattern": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"v_proj": 3, r"layers\.(0|2)\.mlp\.gate_proj": 20},
    },
    "some_layers": {"layers_to_transform": [0, 2]},
    "layers_pattern": {"layers_to_transform": 1, "layers_pattern": "layers"},
    "excluded": {"target_modules": ALL, "exclude_modules": ["k_proj"]},
}
VARIANTS = (
    *("llama", "qwen3", "qwen2", "llama_biases", "gpt2", "mistral_window", "opt", "phi3"),
    *("stablelm", "gemma3", "qwen3_5", "gpt_oss", "mixtral", "exaone4", "hunyuan", "seed_oss"),
    *("lfm2", "granite_hybrid", "bamba", "falcon_h1", "nemotron_h", "nemotron", "arcee"),
    *("starcoder2", "smollm3", "granite", "minicpm", "olmo2", "olmo3", "gemma2"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
GPT2: dict[str, Any] = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}


def text(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def load_lora(worker: Worker, lora_id: int, directory: Path) -> str:
    report = worker.load_lora(LoraSpec(lora_id, f"lora{lora_id}", str(directory)))
    assert report.error == ""
    assert report.num_bytes > 0
    return report.digest


class LoraDriver(Driver):
    """Runs pieces of `(request, tokens, lora_id)`."""

    def entries(self, *pieces: tuple[int, list[int], int]) -> tuple[StepEntry, ...]:
        spec = SampleSpec(GREEDY)
        return tuple(
            self.entry(request, tokens, spec)._replace(lora_id=lora_id)
            for request, tokens, lora_id in pieces
        )

    def mixed(self, *pieces: tuple[int, list[int], int]) -> torch.Tensor:
        logits = self.worker.logits(Step(StepId(0), self.entries(*pieces)))
        assert logits is not None
        return logits


def check_against_peft(worker: Any, variant: str, configs: list[dict[str, Any]]) -> None:
    """Each adapter's logits after a prompt, and after a decode step, are PEFT's."""
    models = [adapted_model(variant, seed, **c) for seed, c in enumerate(configs, 1)]
    base = models[0].get_base_model()
    driver = LoraDriver(worker)
    prompts = [text(5 + 3 * i, i) for i in range(len(models) + 1)]
    pieces = [(i, prompt[:-1], i) for i, prompt in enumerate(prompts)]
    driver.mixed(*pieces)
    found = driver.mixed(*[(i, prompt[-1:], i) for i, prompt in enumerate(prompts)])
    with models[0].disable_adapter():
        torch.testing.assert_close(found[0], logits_of(base, prompts[0]), rtol=2e-4, atol=2e-4)
    for i, model in enumerate(models, 1):
        expected = logits_of(model, prompts[i])
        torch.testing.assert_close(found[i], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("variant", "attention"), [("llama", "cpu"), ("qwen3", "reference")])
def test_logits_are_those_of_peft(tmp_path: Path, variant: str, attention: str) -> None:
    worker = load_worker(make_checkpoint(tmp_path / "base", variant), attention=attention)
    for seed, config in enumerate(CONFIGS.values(), 1):
        load_lora(worker, seed, make_lora(tmp_path / str(seed), variant, seed, **config))
    check_against_peft(worker, variant, list(CONFIGS.values()))


def test_factors_of_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    """The rows of GLM's q and k are not in the order of the checkpoint."""
    worker = load_worker(make_checkpoint(tmp_path / "base", "glm4"), attention="cpu")
    lora = make_lora(tmp_path / "q", "glm4", 1, target_modules=["q_proj"])
    refused = worker.load_lora(LoraSpec(1, "q", str(lora))).error
    assert "self_attn.q_proj.lora_A.weight: this model has no such linear for LoRA" in refused
    config = {"target_modules": ["o_proj", "down_proj"]}
    load_lora(worker, 1, make_lora(tmp_path / "others", "glm4", 1, **config))
    check_against_peft(worker, "glm4", [config])


@pytest.mark.parametrize("variant", VARIANTS[2:])
def test_other_families_have_the_logits_of_peft(tmp_path: Path, variant: str) -> None:
    worker = load_worker(make_checkpoint(tmp_path / "base", variant), attention="cpu")
    config: dict[str, Any] = GPT2 if variant == "gpt2" else {"target_modules": "all-linear"}
    if variant == "mixtral":  # PEFT's targets would be the experts too
        config = {"target_modules": ATTENTION}
    if variant in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):  # as mixtral
        config = {"target_modules": LATENT}
    if variant in ("falcon_h1", "nemotron_h"):  # PEFT refuses `out_proj` beside Mamba
        config = {"target_modules": [*ALL, "in_proj"]}
    load_lora(worker, 1, make_lora(tmp_path / "lora", variant, 1, **config))
    check_against_peft(worker, variant, [config])


def test_adapters_of_a_gguf_model_have_the_logits_of_peft(tmp_path: Path) -> None:
    """Its value heads lie in another order than the columns of an adapter."""
    variant, config = "qwen3_5_grouped", {"target_modules": "all-linear"}
    Gguf(variant).write(tmp_path / "model.gguf")
    worker = load_worker(tmp_path / "model.gguf", attention="cpu")
    load_lora(worker, 1, make_lora(tmp_path / "lora", variant, 1, **config))
    check_against_peft(worker, variant, [config])


def test_logits_over_quantized_weights_are_near_those_of_peft(tmp_path: Path) -> None:
    """Of the adapter's own share: that of the base model's weights is subtracted."""
    worker = load_worker(make_checkpoint(tmp_path / "base"), attention="cpu", weights="int8")
    load_lora(worker, 1, make_lora(tmp_path / "lora", "llama"))
    model, prompt = adapted_model("llama"), text(9, 9)
    found = [LoraDriver(worker).mixed((0, prompt, lora_id))[0] for lora_id in (0, 1)]
    with model.disable_adapter():
        base = logits_of(model, prompt)
    changes = found[1] - found[0], logits_of(model, prompt) - base
    assert torch.cosine_similarity(*changes, dim=0) > 0.995


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "llama_multi_query"])
def test_stages_and_ranks_have_the_logits_of_peft(
    tmp_path: Path, variant: str, shape: tuple[int, int]
) -> None:
    base = make_checkpoint(tmp_path / "base", variant)
    configs = [GPT2] if variant == "gpt2" else [{}, {"target_modules": ["v_proj", "up_proj"]}]
    paths = [make_lora(tmp_path / str(i), variant, i, **c) for i, c in enumerate(configs, 1)]
    with fleet(base, *shape, attention="cpu") as workers:
        for i, path in enumerate(paths, 1):
            assert len(set(workers.on_all(partial(load_lora, lora_id=i, directory=path)))) == 1
        check_against_peft(workers, variant, configs)


@pytest.fixture(scope="module", params=["float32", "int8", "int4"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """The adapters 1 and 2 over a Llama."""
    folder = tmp_path_factory.mktemp("lora")
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    base = make_checkpoint(folder / "base", "llama", **sizes)
    found = load_worker(base, attention="cpu", weights=str(request.param), kv_slots=4096)
    for seed in (1, 2):
        config = {} if seed == 1 else {"target_modules": ["k_proj", "down_proj"], "r": 16}
        load_lora(found, seed, make_lora(folder / str(seed), "llama", seed, base=sizes, **config))
    return found


def generate(driver: LoraDriver, request: int, prompt: list[int], lora_id: int) -> torch.Tensor:
    """The logits after a prompt and four decode steps of given tokens."""
    rows = [driver.mixed((request, prompt, lora_id))[0]]
    rows += [driver.mixed((request, [token], lora_id))[0] for token in (7, 8, 9, 10)]
    return torch.stack(rows)


def test_a_row_has_the_same_bits_beside_any_other_rows(worker: Worker) -> None:
    prompts = {request: text(9 + request, request) for request in range(6)}
    alone = {r: generate(LoraDriver(worker), r, p, r % 3) for r, p in prompts.items()}
    assert not torch.equal(alone[0], alone[3])
    driver = LoraDriver(worker, seed=5)
    rows: dict[int, list[torch.Tensor]] = {request: [] for request in prompts}
    late = {request: prompt for request, prompt in prompts.items() if request >= 4}
    first = {request: prompt for request, prompt in prompts.items() if request < 4}
    steps: list[dict[int, list[int]]] = [first]
    steps += [{r: [t] for r in first} | (late if t == 8 else {}) for t in (7, 8, 9, 10)]
    steps += [{r: [t] for r in late} for t in (7, 8, 9, 10)]
    for step in steps:
        decodes_first = sorted(step, key=lambda request: len(step[request]) > 1)
        found = driver.mixed(*[(r, step[r], r % 3) for r in decodes_first])
        for request, row in zip(decodes_first, found, strict=True):
            rows[request].append(row)
    for request, expected in alone.items():
        assert torch.equal(torch.stack(rows[request]), expected), request


def test_decodes_have_the_same_bits_replayed_or_not(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode() -> torch.Tensor:
        driver, tokens = LoraDriver(worker), [5, 6, 7, 8]
        return torch.stack(
            [driver.mixed(*[(r, [token], r % 3) for r in range(5)]) for token in tokens]
        )

    replayed = decode()
    monkeypatch.setattr(recorded_decoder, "MAX_ROWS", 0)
    assert torch.equal(decode(), replayed)


def test_logits_of_the_base_are_those_of_a_worker_without_adapters(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    plain, adapted = (load_worker(base, attention="cpu") for _ in range(2))
    load_lora(adapted, 1, make_lora(tmp_path / "lora"))
    prompt = text(20, 2)
    expected = generate(LoraDriver(plain), 0, prompt, 0)
    assert torch.equal(generate(LoraDriver(adapted), 0, prompt, 0), expected)
    mixed = LoraDriver(adapted)
    mixed.mixed((0, prompt, 0), (1, text(7, 7), 1))
    for i, token in enumerate((7, 8, 9, 10), 1):
        found = mixed.mixed((0, [token], 0), (1, [token], 1))
        assert torch.equal(found[0], expected[i])


def test_a_worker_that_can_have_no_adapters_reports_why(tmp_path: Path) -> None:
    worker = load_worker(make_checkpoint(tmp_path / "base"))
    model = worker.parts.stage.model
    assert isinstance(model, LoraModel)
    loras = Loras(model, TorchOperators(), dict, 64, "not with --batch-invariant")
    report = loras.load(LoraSpec(1, "sql", str(tmp_path)))
    assert report.error == "LoRA adapter 'sql': not with --batch-invariant"


def test_an_unloaded_adapter_is_freed_and_can_be_loaded_again(tmp_path: Path) -> None:
    worker = load_worker(make_checkpoint(tmp_path / "base"), attention="cpu")
    path, prompt = make_lora(tmp_path / "lora"), text(9, 9)
    digest = load_lora(worker, 1, path)
    expected = generate(LoraDriver(worker), 0, prompt, 1)
    worker.unload_lora(1)
    with pytest.raises(ValueError, match="not loaded"):
        LoraDriver(worker).mixed((0, prompt, 1))
    assert load_lora(worker, 2, path) == digest
    assert torch.equal(generate(LoraDriver(worker), 0, prompt, 2), expected)
