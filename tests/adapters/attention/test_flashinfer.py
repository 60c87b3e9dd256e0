import pytest
import torch
from torch import Tensor

from adapters.attention.flashinfer import workspace as flashinfer_workspace
from engine.errors import StartupError
from engine.worker.model.layout import padded
from engine.worker.ports import RaggedLayout, RopeAngles, StepLimits
from tests.adapters.attention.flashinfer_cases import Made, Paged, make


def noise(rows: int, seed: int = 1) -> Tensor:
    return torch.randn((rows, 8, 8), generator=torch.Generator().manual_seed(seed))


def run(made: Made, fused: Tensor, turn: RopeAngles | None = None) -> Tensor:
    made.stand_in.catch_up()
    q, k, v = torch.split(fused.to(made.spec.dtype), [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, turn)


def expected(made: Made, layout: RaggedLayout, i: int, q: Tensor) -> Tensor:
    """Textbook attention of a decode over what lies in the cache."""
    length, first = int(layout.kv_len[i]), int(layout.kv_indptr[i])
    pages = torch.from_numpy(layout.kv_indices[first : int(layout.kv_indptr[i + 1])]).long()
    keys, values = (
        whole[0][pages].flatten(0, 1)[:length].double().repeat_interleave(2, dim=1)
        for whole in (made.cache.keys, made.cache.values)
    )
    start = 0 if made.spec.window is None else max(0, length - made.spec.window)
    scores = torch.einsum("hd,khd->hk", q.double(), keys[start:]) * made.spec.scale
    scores = scores * made.spec.k_scale
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values[start:]) * made.spec.v_scale


def assert_decodes(
    made: Made, layout: RaggedLayout, fused: Tensor, found: Tensor, tolerance: float = 1e-5
) -> None:
    right = [expected(made, layout, i, fused[i, :4]) for i in range(len(layout.kv_len))]
    torch.testing.assert_close(
        found[: len(right)].double(), torch.stack(right), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("window", [None, 5])
def test_every_replay_reads_the_step_that_was_planned_for_it(window: int | None) -> None:
    made = make(60, 4, window=window)
    fused = noise(8)  # one address for all replays, as in a graph
    for turn in range(12):
        count = 1 + turn % 5
        step = Paged(tuple((3 * turn + i, 1) for i in range(count)), 4, seed=turn)
        layout = step.layout()
        baked = made.attention.plan_captured(padded(layout, 8, spare_block=60))
        fused.copy_(noise(8, turn))
        found = run(made, fused)
        assert_decodes(made, layout, fused, found)
        assert baked == made.attention.plan_captured(padded(layout, 8, spare_block=60))


def test_padding_writes_to_the_spare_page_alone() -> None:
    made = make(20, 4)
    step = Paged(((5, 1), (9, 1)), 4)
    before, fused = made.cache.keys[0].clone(), noise(8)
    made.attention.plan_captured(padded(step.layout(), 8, spare_block=20))
    run(made, fused)
    changed = (made.cache.keys[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted({step.slots(0)[-1] // 4, step.slots(1)[-1] // 4, 20})


@pytest.mark.parametrize("left", [torch.nan, torch.inf])
def test_what_an_earlier_request_left_behind_in_a_page_harms_no_other(left: float) -> None:
    """The kernel reads keys of the next token behind a head, which is narrower than its own."""
    made = make(60, 4)
    made.attention.plan(Paged(((0, 4),), 4).layout())
    run(made, torch.full((4, 8, 8), left))
    layout, fused = Paged(((0, 1),), 4).layout(), noise(1)
    made.attention.plan(layout)
    assert_decodes(made, layout, fused, run(made, fused))


def test_graphs_of_several_sizes_and_eager_steps_take_turns() -> None:
    made = make(60, 4)
    for turn, size in enumerate((2, 8, 0, 2, 4, 0, 8, 2)):
        layout = Paged(((7 + turn, 1), (30 - turn, 1)), 4, seed=turn).layout()
        fused = noise(size or 2, turn)
        if size:
            made.attention.plan_captured(padded(layout, size, spare_block=60))
        else:
            made.attention.plan(layout)
        found = run(made, fused)
        assert_decodes(made, layout, fused, found)


def test_captured_wrappers_keep_their_buffers_and_share_the_indices() -> None:
    made = make(60, 4, has_decode_kernels=False)
    layout = Paged(((7, 1), (30, 1)), 4).layout()
    places = []
    for size in (8, 2, 8, 2):
        made.attention.plan_captured(padded(layout, size, spare_block=60))
        plan = made.last_plan("captured")
        places.append(plan["indices"].data_ptr())
    assert len(set(places)) == 1
    sizes = [given for name, given in made.stand_in.calls if name == "workspace_size"]
    assert [len(given["last_page_len"]) for given in sizes] == [128], "asked once, for the largest"


def test_the_workspace_is_asked_for_with_the_soft_cap_of_the_kernel_that_runs() -> None:
    made = make(60, 4, has_decode_kernels=False)
    made.attention.plan_captured(padded(Paged(((7, 1),), 4).layout(), 2, spare_block=60))
    asked, planned = made.last_plan("workspace_size"), made.last_plan("captured")
    assert asked["logits_soft_cap"] == planned["logits_soft_cap"]


def test_the_host_does_not_wait_while_the_device_is_a_step_behind() -> None:
    made = make(60, 4)
    layout = Paged(((7, 1), (30, 3)), 4).layout()
    for turn in range(6):
        made.attention.plan(layout)
        run(made, noise(4, turn))
    assert made.stand_in.log == []


def test_plans_ahead_of_the_device_wait_for_their_own_cuts() -> None:
    made = make(60, 4)
    for seed in range(3):
        made.attention.plan(Paged(((7, 1), (30, 3)), 4, seed=seed).layout())
    assert made.stand_in.log == ["waited", "waited"]


def test_a_run_needs_a_plan_of_as_many_rows() -> None:
    made = make(60, 4)
    with pytest.raises(AssertionError, match="plan comes before run"):
        run(made, noise(2))
    made.attention.plan(Paged(((7, 1), (30, 3)), 4).layout())
    with pytest.raises(AssertionError, match="plan comes before run"):
        run(made, noise(3))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("has_kernels", [False, True])
def test_keys_and_values_can_lie_in_eight_bits(
    scales: tuple[float, float], has_kernels: bool
) -> None:
    half, fp8 = torch.bfloat16, torch.float8_e4m3fn
    made = make(60, 4, kv_dtype=fp8, dtype=half, scales=scales, has_decode_kernels=has_kernels)
    layout, fused = Paged(((7, 1), (30, 1)), 4).layout(), noise(2) * 3
    made.attention.plan(layout)
    found = run(made, fused)
    if not has_kernels:
        given = made.last_plan("run")
        assert (given["k_scale"], given["v_scale"]) == scales
        plan = made.last_plan("mixed")
        assert plan["q_data_type"] == plan["o_data_type"] == torch.bfloat16
        assert plan["kv_data_type"] == torch.float8_e4m3fn
    rounded = fused.to(torch.bfloat16)
    for i, slot in enumerate(layout.slots.tolist()):
        for cache, part, scale in zip(
            (made.cache.keys[0], made.cache.values[0]),
            (rounded[i, 4:6], rounded[i, 6:]),
            scales,
            strict=True,
        ):
            kept = (part / scale).to(torch.float8_e4m3fn)
            assert torch.equal(cache.flatten(0, 1)[slot].float(), kept.float())
    assert_decodes(made, layout, rounded, found, 1e-2)


def test_what_is_beyond_eight_bits_becomes_their_largest() -> None:
    made = make(60, 4, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16)
    layout = Paged(((7, 1),), 4).layout()
    made.attention.plan(layout)
    fused = noise(1)
    fused[0, 4, 0], fused[0, 4, 1] = 1e4, -1e4
    run(made, fused)
    kept = made.cache.keys[0].flatten(0, 1)[int(layout.slots[0])].float()
    assert kept[0, :2].tolist() == [448.0, -448.0]


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (StepLimits(4096, 4096, 2_000_000), r"max_batch_size=4096 .*max_model_len=2000000"),
        (StepLimits(8, 2_000_000, 64), "max_batch_tokens=2000000"),
        (StepLimits(1_000_000, 64, 64), "max_batch_size=1000000"),
    ],
)
def test_limits_whose_tables_are_too_large_are_named(limits: StepLimits, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        make(4, 64, limits=limits)


def test_a_batch_that_needs_too_much_room_to_work_in_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer_workspace, "MAX_BYTES", 1 << 20)
    with pytest.raises(StartupError, match=r"max_batch_size=4096 needs \d+ MiB"):
        make(4, 64, limits=StepLimits(4096, 64, 64))
