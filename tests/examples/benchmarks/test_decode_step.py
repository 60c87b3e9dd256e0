from pathlib import Path

import numpy as np

from examples.benchmarks.layers.decode_step import StepReplays, load
from tests.models.checkpoints import make_checkpoint


def test_parts_of_a_step_are_replayed(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path, max_position_embeddings=256))
    replays = StepReplays(load(model, "int8", 2), 2)
    assert len(replays.weights) == replays.is_linear.sum() > 0
    reads = replays.reads(replays.weights)
    for table in (replays.table, replays.table[replays.is_linear], reads, replays.emptied()):
        assert np.shape(table)[1] == np.shape(replays.table)[1]
        assert replays.of(table)() > 0
    assert replays.head() > 0
    assert replays.step() > 0
