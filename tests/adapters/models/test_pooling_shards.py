"""Models that embed, cut over stages and ranks: the vectors of one worker."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.worker.process.worker import Worker
from tests.adapters.models.test_encoders import PROMPTS, WHOLE
from tests.adapters.models.test_pooled_decoders import a_worker, vectors
from tests.engine.worker.process.fleet import Fleet, fleet
from tests.models.checkpoints import make_checkpoint
from tests.models.encoders import VARIANTS, describe_pooling, make_encoder


def vectors_of(workers: Fleet, **fields: Any) -> list[Any]:
    return vectors(cast("Worker", workers), PROMPTS, **fields)


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("variant", ["bert", "xlm_roberta", "modernbert", "qwen3"])
def test_vectors_are_those_of_one_worker(
    tmp_path: Path, variant: str, stages: int, ranks: int
) -> None:
    is_encoder = variant in VARIANTS
    if is_encoder:
        make_encoder(variant).save_pretrained(tmp_path)
        describe_pooling(tmp_path, "mean_tokens", normalizes=True)
    else:
        make_checkpoint(tmp_path, variant)
    bounds = WHOLE if is_encoder else {"max_batch_tokens": 16, "max_batch_size": 4}
    expected = vectors(a_worker(tmp_path, attention="cpu"), PROMPTS, **bounds)
    with fleet(tmp_path, stages, ranks, attention="cpu", task="embed") as workers:
        found = vectors_of(workers, **bounds)
    for own, one in zip(found, expected, strict=True):
        if ranks == 1:
            assert own.tobytes() == one.tobytes()
        else:
            assert np.abs(own - one).max() < 1e-5
