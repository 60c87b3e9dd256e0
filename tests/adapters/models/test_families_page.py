import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from adapters.models import FAMILIES
from adapters.models.base.pooling import GENERATORS
from tests.adapters.gguf.test_logits import VARIANTS as GGUF_VARIANTS
from tests.adapters.models.test_in_the_engine import VARIANTS as ENGINE_VARIANTS
from tests.engine.worker.cuda.test_device import VARIANTS as GPU_VARIANTS
from tests.engine.worker.lora.test_lora_logits import VARIANTS as LORA_VARIANTS
from tests.engine.worker.model.test_shards import VARIANTS as SHARD_VARIANTS
from tests.models.checkpoints import OTHER_CONFIG, VARIANTS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "adapters" / "models" / "FAMILIES.md").read_text()
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \|((?: [✓—] \|)+)$", re.M)
NAMED = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")
# Parametrised over the variants of a list, in the order of the columns.
COLUMNS = (
    *(VARIANTS, VARIANTS, SHARD_VARIANTS, GGUF_VARIANTS, ENGINE_VARIANTS),
    *(LORA_VARIANTS, GPU_VARIANTS),
)


def architectures(variants: object) -> set[str]:
    """The `architectures` entries of the checkpoints of these variants."""
    assert isinstance(variants, dict | tuple)
    configs = {VARIANTS[each][0] for each in variants if each not in OTHER_CONFIG}
    types = (getattr(transformers, config).model_type for config in configs)
    others = {OTHER_CONFIG[each]["architectures"][0] for each in variants if each in OTHER_CONFIG}
    return {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[each] for each in types} | others


def test_every_family_that_generates_has_a_row() -> None:
    generators = {name for name in FAMILIES if name.endswith(GENERATORS)}
    assert {name for name, _ in ROW.findall(PAGE)} == generators


@pytest.mark.parametrize(("architecture", "cells"), ROW.findall(PAGE))
def test_each_cell_is_ticked_if_its_test_covers_the_family(architecture: str, cells: str) -> None:
    ticks = [cell.strip() == "✓" for cell in cells.strip("| ").split("|")]
    assert ticks == [architecture in architectures(variants) for variants in COLUMNS]


def test_each_column_names_a_test_that_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) == len(COLUMNS) + 8
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), name
