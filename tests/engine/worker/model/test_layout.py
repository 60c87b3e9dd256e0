"""The ragged layout, computed by hand; steps with slots out of range are rejected."""

from dataclasses import fields

import numpy as np
import pytest

from engine.step import LAST_TOKEN, RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.model import layout
from engine.worker.model.layout import LayoutLimits, build_layout, padded

LIMITS = LayoutLimits(vocab_size=100, max_positions=64, num_blocks=10, block_size=4)


def entry(start: int, tokens: tuple[int, ...], blocks: list[int], specs: bool = True) -> StepEntry:
    spec = SampleSpec(SamplingParams()) if specs else None
    return StepEntry(RequestId(7), start, tokens, np.array(blocks, "<i4").tobytes(), spec)


def step(*entries: StepEntry) -> Step:
    return Step(StepId(0), entries)


def test_a_mixed_step_on_paper() -> None:
    layout = build_layout(
        step(
            entry(4, (50,), [3, 9, 8]),  # one more block than it needs yet
            entry(3, (51,), [5]),
            entry(2, (60, 61, 62), [7, 2], specs=False),
            entry(0, (70, 71), [0]),
        ),
        LIMITS,
    )
    assert layout.token_ids.tolist() == [50, 51, 60, 61, 62, 70, 71]
    assert layout.positions.tolist() == [4, 3, 2, 3, 4, 0, 1]
    assert layout.slots.tolist() == [36, 23, 30, 31, 8, 0, 1]
    assert layout.qo_indptr.tolist() == [0, 1, 2, 5, 7]
    assert layout.kv_len.tolist() == [5, 4, 5, 2]
    assert layout.kv_indptr.tolist() == [0, 2, 3, 5, 6]
    assert layout.kv_indices.tolist() == [3, 9, 5, 7, 2, 0]
    assert layout.kv_last_page_len.tolist() == [1, 4, 1, 2]
    assert layout.sampled_rows.tolist() == [0, 1, 6]
    assert layout.num_decodes == 2
    assert (layout.num_requests, layout.num_tokens) == (4, 7)


def test_index_arrays_have_the_types_that_attention_kernels_take() -> None:
    layout = build_layout(step(entry(0, (1, 2), [1])), LIMITS)
    assert {getattr(layout, name).dtype.name for name in ("token_ids", "positions", "slots")} == {
        "int64"
    }
    names = ("qo_indptr", "kv_len", "kv_indptr", "kv_indices", "kv_last_page_len")
    assert {getattr(layout, name).dtype.name for name in names} == {"int32"}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (step(), "needs entries"),
        (step(entry(0, (), [1])), "needs tokens"),
        (step(entry(0, (100,), [1])), "token ids"),
        (step(entry(0, (-2,), [1])), "token ids"),
        (step(entry(64, (1,), list(range(9)) * 2)), "positions"),
        (step(entry(-1, (1, 2), [1])), "positions"),
        (step(entry(0, (1,), [10])), "block ids"),
        (step(entry(0, (1,), [-1])), "block ids"),
        (step(entry(4, (1,), [1])), "request 7: 1 blocks do not cover 5 tokens"),
    ],
)
def test_an_index_out_of_bounds_is_rejected(wrong: Step, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build_layout(wrong, LIMITS)


def test_few_decodes_have_the_layout_that_many_have(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, tokens = [0, 1, 3, 4, 9], [7, LAST_TOKEN, 0, 5, LAST_TOKEN]
    rows = zip(starts, tokens, strict=True)
    decodes = [entry(start, (token,), [1, 5, 2, 6]) for start, token in rows]
    batch = step(*decodes[:3], *[each._replace(lora_id=3) for each in decodes[3:]])
    few = build_layout(batch, LIMITS)
    monkeypatch.setattr(layout, "FEW_DECODES", 0)
    many = build_layout(batch, LIMITS)
    for field in fields(few):
        one, other = getattr(few, field.name), getattr(many, field.name)
        np.testing.assert_array_equal(one, other, field.name)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None), field.name


def test_padding_adds_requests_of_one_token_in_the_spare_block() -> None:
    layout = build_layout(step(entry(4, (50,), [3, 9]), entry(3, (51,), [5])), LIMITS)
    wide = padded(layout, 4, spare_block=10)
    assert wide.token_ids.tolist() == [50, 51, 0, 0]
    assert wide.positions.tolist() == [4, 3, 0, 0]
    assert wide.slots.tolist() == [36, 23, 40, 40]
    assert wide.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert wide.kv_len.tolist() == [5, 4, 1, 1]
    assert wide.kv_indptr.tolist() == [0, 2, 3, 4, 5]
    assert wide.kv_indices.tolist() == [3, 9, 5, 10, 10]
    assert wide.kv_last_page_len.tolist() == [1, 4, 1, 1]
    assert wide.sampled_rows.tolist() == [0, 1]
    assert (wide.num_requests, wide.num_decodes, wide.is_decode_only) == (4, 4, True)
    arrays = ("slots", "qo_indptr", "kv_len", "kv_indptr", "kv_indices", "kv_last_page_len")
    for name in arrays:
        assert getattr(wide, name).dtype == getattr(layout, name).dtype


def test_padding_behind_a_prompt_is_no_decode() -> None:
    layout = build_layout(step(entry(4, (50,), [3, 9]), entry(0, (1, 2), [1])), LIMITS)
    wide = padded(layout, 5, spare_block=10)
    assert wide.qo_indptr.tolist() == [0, 1, 3, 4, 5]
    assert wide.kv_len.tolist() == [5, 2, 1, 1]
    assert wide.kv_indices.tolist() == [3, 9, 1, 10, 10]
    assert wide.sampled_rows.tolist() == layout.sampled_rows.tolist()
    assert (wide.num_requests, wide.num_decodes, wide.is_decode_only) == (4, 1, False)
    with pytest.raises(AssertionError, match="more rows than they are padded to"):
        padded(layout, 2, spare_block=10)
