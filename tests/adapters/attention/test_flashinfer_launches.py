import torch

from engine.worker.model.layout import padded
from engine.worker.model.rope import rope_angles
from engine.worker.ports import RopeAngles, StepLimits
from tests.adapters.attention.flashinfer_cases import Made, Paged, make

DECODES = tuple((3 + 5 * number, 1) for number in range(16))
PREFILL = (0, 300)
WIDE = StepLimits(max_requests=32, max_tokens=512, max_model_len=512)


def angles(tokens: int) -> RopeAngles:
    return rope_angles(torch.arange(tokens) + 5, 1 / 10.0 ** (torch.arange(4) / 4))


def run(made: Made, tokens: int) -> torch.Tensor:
    made.stand_in.catch_up()
    shape = (tokens, 8, 8)
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(made.spec.dtype)
    q, k, v = torch.split(qkv, [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, angles(tokens))


def planned_splits(made: Made, size: int) -> bool:
    """Whether the plan of a captured batch size lets FlashInfer split keys."""
    layout = Paged(DECODES[:size], 4).layout()
    made.attention.plan_captured(padded(layout, size, spare_block=200))
    return not made.last_plan("captured")["disable_split_kv"]


def test_keys_are_split_only_in_graphs_that_do_not_fill_the_gpu() -> None:
    """The stand-in has 4 multiprocessors, and the model 2 KV heads: 4 rows fill it."""
    made = make(200, 4, has_decode_kernels=False)
    assert [planned_splits(made, size) for size in (1, 4, 5, 8)] == [True, True, False, False]


def test_in_batch_invariant_mode_no_keys_are_split_and_all_rows_have_the_tile_of_decodes() -> None:
    """FlashInfer chooses the tile by the mean of the requests, of which there are as many as
    rows."""
    made = make(200, 4, limits=WIDE, is_batch_invariant=True)
    assert not planned_splits(made, 1)
    made.attention.plan(Paged(((5, 1), PREFILL), 4).layout())
    plan = made.last_plan("mixed")
    assert plan["disable_split_kv"]
    assert plan["qo_indptr"].tolist() == [0, 1, *[301] * 300]
