import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from adapters.attention.flashinfer.backend import (
    Fa2FlashInferAttention,
    FlashInferAttention,
    XqaFlashInferAttention,
)
from adapters.attention.flashinfer.decode_choice import FA2, XQA, Times, faster
from adapters.attention.flashinfer.fit import unsupported_packed
from adapters.attention.flashinfer.packed import dense_places
from adapters.attention.flashinfer.tables import PageTables
from engine.errors import KernelFaulted, StartupError
from engine.worker.model.layout import padded
from engine.worker.ports import AttentionSpec, StepLimits
from tests.adapters.attention.flashinfer_cases import Made, Paged, decodes, make, paged

HALF = torch.bfloat16
HOPPER = (9, 0)
LIMITS = StepLimits(max_requests=8, max_tokens=128, max_model_len=128)
STEP = Paged(((7, 1), (30, 1), (12, 1)), 16)


def on_hopper(**changes: Any) -> Made:
    """A backend over 60 pages of 16 tokens."""
    options: dict[str, Any] = {"capability": HOPPER, "dtype": HALF, "kv_dtype": HALF, "dim": 64}
    return make(60, 16, **{**options, **changes})


def step(made: Made, size: int, paged: Paged = STEP) -> torch.Tensor:
    """The output of a captured step, for the rows that are not padding."""
    made.attention.plan_captured(padded(paged.layout(), size, spare_block=60))
    made.stand_in.catch_up()
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn((size, 8, 64), generator=generator).to(made.spec.dtype)
    q, k, v = torch.split(qkv, [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, None)[: len(paged.requests)]


def kernel(made: Made, size: int) -> str:
    """The kernel that computes a captured step."""
    step(made, size)
    names = [name for name, _ in made.stand_in.calls if name in ("run", "xqa")]
    return names[-1]


@settings(deadline=None, max_examples=25)
@given(one=paged(decodes))
def test_pages_are_where_the_dense_table_has_them(one: Paged) -> None:
    layout = one.layout()
    tables, width = PageTables.of(layout), 80
    dense = np.full(len(one.requests) * width, -1)
    dense[dense_places(tables, width)] = layout.kv_indices
    for row, pages in zip(dense.reshape(-1, width), one.tables, strict=True):
        used = row[row >= 0]
        assert used.tolist() == pages[: len(used)]
        assert (row[len(used) :] == -1).all()


@pytest.mark.parametrize("window", [None, 9])
def test_both_kernels_compute_the_same_step_by_step(window: int | None) -> None:
    found = []
    for kind in (Fa2FlashInferAttention, XqaFlashInferAttention):
        made = on_hopper(kind=kind, window=window)
        made.cache.keys[0].normal_(generator=torch.Generator().manual_seed(1))
        outs = [step(made, 4)]
        made.cache.keys[0].normal_(generator=torch.Generator().manual_seed(1))
        made.cache.values[0].normal_(generator=torch.Generator().manual_seed(2))
        outs += [step(made, 8, STEP._replace(seed=seed)) for seed in range(3)]
        found.append(torch.stack(outs[1:]))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_the_faster_kernel_is_used_and_the_log_names_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = on_hopper()
    with caplog.at_level(logging.INFO):
        assert kernel(made, 4) == "xqa"
    (line,) = [each for each in caplog.messages if each.startswith("decode attention of")]
    assert line == (
        "decode attention of 4 decodes, 4/2 heads of 64, bfloat16, pages of 16: xqa (a layer "
        "takes fa2 2000000.0 us at 128; xqa 1000000.0 us at 128)"
    )
    made.stand_in.slowness["xqa"] = 1.99  # less than MIN_GAIN
    assert kernel(made, 8) == "run"
    assert kernel(made, 4) == "xqa", "a batch size keeps its kernel, and so does its graph"


def test_a_later_start_uses_the_file_and_measures_nothing(tmp_path: Path) -> None:
    assert kernel(on_hopper(choices=str(tmp_path)), 4) == "xqa"
    (path,) = tmp_path.glob("*attention.json")
    assert path.name == "standing-gpu-flashinfer-0-decode-attention.json"
    assert json.loads(path.read_text()) == {
        "4 decodes, 4/2 heads of 64, bfloat16, pages of 16": "xqa"
    }
    made = on_hopper(choices=str(tmp_path))
    made.stand_in.slowness["xqa"] = 9.0
    assert kernel(made, 4) == "xqa"
    path.write_text("{")
    made = on_hopper(choices=str(tmp_path))
    made.stand_in.slowness["xqa"] = 9.0
    assert kernel(made, 4) == "run", "a damaged file is measured again"


def test_flags_override_the_measurement() -> None:
    fa2 = on_hopper(kind=Fa2FlashInferAttention)
    assert kernel(fa2, 4) == "run"
    xqa = on_hopper(kind=XqaFlashInferAttention)
    xqa.stand_in.slowness["xqa"] = 9.0
    assert kernel(xqa, 4) == "xqa"
    assert "xqa" not in [name for name, _ in fa2.stand_in.calls]


@pytest.mark.parametrize(
    ("error", "factor", "reason"),
    [
        ("nvcc failed\nwith a long report", 1.0, "nvcc failed"),
        ("", 2.0, "relative error 1 against FA2"),
    ],
)
def test_a_kernel_that_fails_or_computes_something_else_is_named_and_not_used(
    caplog: pytest.LogCaptureFixture, error: str, factor: float, reason: str
) -> None:
    made = on_hopper()
    made.stand_in.packed_error, made.stand_in.packed_factor = error, factor
    assert [kernel(made, size) for size in (8, 4)] == ["run", "run"]
    assert f"decode attention is FA2's: XQA failed: {reason}" in caplog.messages
    wanted = on_hopper(kind=XqaFlashInferAttention)
    wanted.stand_in.packed_error, wanted.stand_in.packed_factor = error, factor
    with pytest.raises(StartupError, match=f"attention 'flashinfer-xqa' cannot be used: {reason}"):
        step(wanted, 4)


def test_a_kernel_that_faults_ends_this_start_and_is_left_out_of_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = on_hopper(choices=str(tmp_path))
    made.stand_in.packed_faults = True
    with pytest.raises(KernelFaulted, match="'xqa' made the GPU fault: CUDA error"):
        step(made, 4)
    later = on_hopper(choices=str(tmp_path))
    later.stand_in.packed_faults = True
    assert kernel(later, 4) == "run"
    assert "xqa" not in [name for name, _ in later.stand_in.calls]
    (line,) = [each for each in caplog.messages if "XQA failed" in each]
    (notes,) = tmp_path.glob("*kernel-trials.json")
    assert line.endswith(f"earlier start; remove {notes} to try it again")


def test_a_kernel_that_cannot_be_timed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_hopper()

    def fails(work: object) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(made.stand_in, "seconds", fails)
    assert kernel(made, 4) == "run"


def test_choices_that_cannot_be_kept_end_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").write_text("")
    made = on_hopper(choices=str(tmp_path / "a file" / "below"))
    assert [kernel(made, size) for size in (8, 4)] == ["xqa", "xqa"]
    lines = [each for each in caplog.messages if "are not kept for later starts" in each]
    assert len(lines) == 2, "one for each file"


def test_the_trial_leaves_the_cache_as_it_was() -> None:
    made = on_hopper()
    for part in (*made.cache.keys, *made.cache.values):
        part.zero_()
    layout = padded(STEP.layout(), 4, spare_block=60)
    made.attention.plan_captured(layout)
    assert not any(part.any() for part in (*made.cache.keys, *made.cache.values))


def test_what_a_graph_contains_does_not_change_while_requests_grow() -> None:
    made = on_hopper()
    before = made.attention.plan_captured(padded(STEP.layout(), 4, spare_block=60))
    step(made, 4)
    addresses = [each["block_tables"].data_ptr() for name, each in made.stand_in.calls[-1:]]
    longer = Paged(((100, 1), (90, 1), (12, 1)), 16)
    step(made, 4, longer)
    assert [made.stand_in.calls[-1][1]["block_tables"].data_ptr()] == addresses
    assert made.attention.plan_captured(padded(longer.layout(), 4, spare_block=60)) == before


@pytest.mark.parametrize(
    ("spec", "kv_dtype", "page", "capability", "reason"),
    [
        ({}, HALF, 16, (9, 0), ""),
        ({"window": 64}, HALF, 128, (12, 0), ""),
        ({}, HALF, 16, (8, 9), "it needs compute capability 9.0, 10.0 or 12.0; the GPU has 8.9"),
        ({}, HALF, 24, (9, 0), "--block-size 24 is not supported, only 16, 32, 64, 128 are"),
        ({}, torch.float8_e4m3fn, 16, (9, 0), "it computes with fp8 queries over an fp8 KV cache"),
        ({"soft_cap": 50.0}, HALF, 16, (9, 0), "capped attention scores are not supported"),
        ({"is_batch_invariant": True}, HALF, 16, (9, 0), "which --batch-invariant excludes"),
        ({"has_sinks": True}, HALF, 16, (9, 0), "the sums of scores, which attention sinks need"),
        ({"head_dim": 96}, HALF, 16, (9, 0), "heads of 96 are computed as 128, by FA2 only"),
        ({"cache_head_dim": 256}, HALF, 16, (9, 0), "layers with different head sizes are not"),
    ],
)
def test_what_the_kernel_does_not_support_is_named(
    spec: dict[str, Any],
    kv_dtype: torch.dtype,
    page: int,
    capability: tuple[int, int],
    reason: str,
) -> None:
    given = {"head_dim": 128, "window": None, "dtype": HALF, **spec}
    made = AttentionSpec(32, 8, scale=1.0, **given)
    line = unsupported_packed(made, kv_dtype, page, capability)
    assert reason in line
    assert bool(reason) == bool(line)


def test_without_the_kernel_the_log_says_why_and_the_flag_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = "it needs compute capability 9.0, 10.0 or 12.0; the GPU has 8.0"
    with caplog.at_level(logging.INFO):
        assert kernel(on_hopper(capability=(8, 0)), 4) == "run"
    assert caplog.messages == [f"decode attention is FA2's: XQA cannot be used: {line}"]
    with pytest.raises(StartupError, match=f"attention 'flashinfer-xqa' cannot be used: {line}"):
        on_hopper(capability=(8, 0), kind=XqaFlashInferAttention)


def test_a_kernel_has_to_be_faster_on_average_over_the_contexts() -> None:
    slow = Times({1024: 1.0, 4096: 1.0})
    assert faster({FA2: slow, XQA: Times({1024: 1.2, 4096: 0.7})}) == XQA
    assert faster({FA2: slow, XQA: Times({1024: 1.2, 4096: 0.79})}) == FA2
    assert FlashInferAttention.decode_kernel == "auto"
