from pathlib import Path

import pytest

from engine.lora import LoraSpec
from engine.step import SampleSpec, Step, StepId
from tests.engine.worker.cuda.launching import on_stand_ins
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.models.loras import make_lora


def decode(driver: Driver, loras: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The tokens of a prompt and five decodes of one request for each adapter."""
    feeds, found = [[3 + i, 7, 11] for i in range(len(loras))], []
    for number in range(6):
        entries = tuple(
            driver.entry(i, feed, SampleSpec(GREEDY))._replace(lora_id=lora_id)
            for i, (feed, lora_id) in enumerate(zip(feeds, loras, strict=True))
        )
        found.append(driver.worker.run(Step(StepId(number), entries)).tokens)
        feeds = [[token] for token in found[-1]]
    return found


@pytest.mark.parametrize(
    ("cuda_graphs", "weights"), [(True, "float32"), (False, "float32"), (True, "int4")]
)
def test_tokens_are_those_of_the_cpu_and_steps_with_adapters_replay_no_graph(
    tmp_path: Path, cuda_graphs: bool, weights: str
) -> None:
    base = make_checkpoint(tmp_path / "base")
    cpu = load_worker(base, weights=weights, activation_bits="14")
    on_gpu = on_stand_ins(base, cuda_graphs=cuda_graphs, max_batch_size=6, weights=weights)
    for lora_id in (1, 2):
        spec = LoraSpec(lora_id, "it", str(make_lora(tmp_path / str(lora_id), seed=lora_id)))
        assert cpu.load_lora(spec).error == on_gpu.worker.load_lora(spec).error == ""
    for loras, replays in (((1, 1, 2), 0), ((0, 1, 2), 0), ((0, 0, 0, 0, 2), 0), ((0, 0), 6)):
        before = sum(graph.num_replays for graph in on_gpu.device.streams.graphs)
        found = decode(Driver(on_gpu), loras)  # type: ignore[arg-type]
        assert found == decode(Driver(cpu), loras)
        after = sum(graph.num_replays for graph in on_gpu.device.streams.graphs)
        assert after - before == replays * cuda_graphs
