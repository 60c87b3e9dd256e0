"""The kernel of RoPE and cache write under Triton's interpreter against plain torch."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import FP8, CacheRows
from engine.worker.model.rope import rope_angles
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

rope = interpreted("rope_and_cache_write")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int


SHAPES = (Shape(4, 2, 64), Shape(14, 2, 64), Shape(12, 12, 64), Shape(32, 8, 128), Shape(3, 1, 80))


@dataclass
class Case:
    """Adjacent q, k, v of some tokens, and a cache with other content."""

    qkv: Tensor
    shape: Shape
    cache: CacheRows
    angles: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        shape: Shape,
        slots: list[int],
        kept: torch.dtype,
        *,
        dtype: torch.dtype = torch.bfloat16,
        has_rope: bool = True,
        rotated: int | None = None,
    ) -> "Case":
        tokens, half = len(slots), (rotated or shape.dim) // 2
        qkv = noise(tokens, shape.heads + 2 * shape.kv_heads, shape.dim, dtype=dtype)
        page = 16 * shape.kv_heads * shape.dim
        pages = [
            noise(4, page + 32, seed=seed, dtype=torch.float32)  # pages lie apart
            .to(kept)[:, :page]
            .view(4, 16, shape.kv_heads, shape.dim)
            for seed in (1, 2)
        ]
        inverse = 1 / 10_000.0 ** (torch.arange(half) / half)
        rope = rope_angles(torch.arange(100, 100 + tokens) * 7, inverse) if has_rope else None
        scales = (0.5, 1.7) if kept == FP8 else (1.0, 1.0)
        cache = CacheRows(torch.tensor(slots), pages[0], pages[1], *scales)
        return cls(qkv, shape, cache, None if rope is None else (rope.cos, rope.sin))

    def copy(self) -> "Case":
        pages = self.cache.keys.clone(), self.cache.values.clone()
        cache = self.cache._replace(keys=pages[0], values=pages[1])
        return Case(self.qkv.clone(), self.shape, cache, self.angles)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self.shape.heads, self.shape.kv_heads, self.shape.kv_heads]
        q, k, v = torch.split(self.qkv, sizes, dim=1)
        return q, k, v


def check(case: Case) -> None:
    """Both ways write the same rows, and nothing else."""
    plain = case.copy()
    before = case.copy()
    rope.rope_and_cache_write(*case.parts(), case.angles, case.cache)
    reference.rope_and_cache_write(*plain.parts(), plain.angles, plain.cache)
    torch.testing.assert_close(case.parts()[0], plain.parts()[0], rtol=1e-2, atol=1e-2)
    slots = case.cache.slots
    others = torch.ones(64, dtype=torch.bool).index_fill_(0, slots, False)
    for found, wanted, old in zip(
        case.cache[1:3], plain.cache[1:3], before.cache[1:3], strict=True
    ):
        assert isinstance(found, Tensor)
        assert isinstance(wanted, Tensor)
        assert isinstance(old, Tensor)
        found, wanted, old = (each.flatten(0, 1) for each in (found, wanted, old))
        relative = 0.13 if found.dtype == FP8 else 1e-2  # a step of 3 mantissa bits
        kept = found[slots].float(), wanted[slots].float()
        torch.testing.assert_close(*kept, rtol=relative, atol=1e-2)
        assert torch.equal(found[others].view(torch.uint8), old[others].view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", [torch.bfloat16, FP8])
def test_the_shapes_of_the_model_families(shape: Shape, kept: torch.dtype) -> None:
    check(Case.of(shape, [5, 63, 0, 17], kept))


def test_float16_and_models_without_rope() -> None:
    check(Case.of(SHAPES[0], [3, 9], torch.float16, dtype=torch.float16))
    check(Case.of(SHAPES[2], [3, 9], torch.bfloat16, has_rope=False))


@pytest.mark.parametrize("rotated", [2, 16, 48, 62])
@pytest.mark.parametrize("kept", [torch.bfloat16, FP8])
def test_the_dimensions_behind_those_that_are_rotated_stay(rotated: int, kept: torch.dtype) -> None:
    case = Case.of(SHAPES[1], [5, 63, 0], kept, rotated=rotated)
    before = case.qkv.clone()
    check(case)
    assert torch.equal(case.qkv[:, :, rotated:], before[:, :, rotated:])
    assert not torch.equal(case.parts()[0][..., :rotated], before[:, :14, :rotated])


@pytest.mark.parametrize("has_rope", [False, True])
def test_q_can_go_to_a_contiguous_tensor_and_stays_as_it_was(has_rope: bool) -> None:
    """The decode kernel that packs heads knows no strides of q."""
    case = Case.of(SHAPES[1], [5, 63, 0], torch.float16, dtype=torch.float16, has_rope=has_rope)
    q, k, v = case.parts()
    plain, before = case.copy(), q.clone()
    found, wanted = (torch.full(q.shape, torch.nan, dtype=q.dtype) for _ in range(2))
    rope.rope_and_cache_write(q, k, v, case.angles, case.cache, found)
    reference.rope_and_cache_write(*plain.parts(), plain.angles, plain.cache, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(q, before)
    torch.testing.assert_close(case.cache.keys, plain.cache.keys, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("has_rope", [False, True])
def test_heads_of_q_can_be_widened_with_zeros(has_rope: bool) -> None:
    """Attention kernels know few head sizes."""
    case = Case.of(SHAPES[4], [5, 63, 0], torch.float16, dtype=torch.float16, has_rope=has_rope)
    plain = case.copy()
    found, wanted = (torch.full((3, 3, 128), torch.nan, dtype=torch.float16) for _ in range(2))
    rope.rope_and_cache_write(*case.parts(), case.angles, case.cache, found)
    reference.rope_and_cache_write(*plain.parts(), plain.angles, plain.cache, wanted)
    assert torch.equal(found[..., 80:], torch.zeros(3, 3, 48, dtype=torch.float16))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(case.cache.keys, plain.cache.keys, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_are_finite_where_another_head_may_read_them(dtype: torch.dtype) -> None:
    case = Case.of(SHAPES[4], [5, 63, 0], dtype, dtype=dtype, has_rope=False)
    case.parts()[1][0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    plain, q_out = case.copy(), torch.empty((3, 3, 128), dtype=dtype)
    rope.rope_and_cache_write(*case.parts(), None, case.cache, q_out)
    reference.rope_and_cache_write(*plain.parts(), None, plain.cache, q_out.clone())
    most = torch.finfo(dtype).max
    assert case.cache.keys[0, 5, 0, :3].tolist() == [0.0, most, -most]
    assert torch.equal(case.cache.keys, plain.cache.keys)


def test_layers_that_read_the_kv_of_others_rotate_q_only() -> None:
    case = Case.of(SHAPES[1], [5, 63, 0], torch.bfloat16)
    q, before = case.parts()[0], case.copy()
    wanted = before.parts()[0].clone()
    rope.rope_and_cache_write(q, None, None, case.angles, case.cache)
    reference.rope_and_cache_write(wanted, None, None, case.angles, before.cache)
    torch.testing.assert_close(q, wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(case.cache.keys, before.cache.keys)
    assert torch.equal(case.parts()[1], before.parts()[1])


@pytest.mark.parametrize("heads", [4, 5])
def test_latent_vectors_are_keys_without_values(heads: int) -> None:
    """RoPE turns the 64 numbers before a latent vector. q may go to the first of more heads."""
    case = Case.of(Shape(heads, 1, 576), [5, 63, 0], torch.bfloat16, rotated=64)
    plain, before = case.copy(), case.copy()
    whole = torch.full((2, 3, 8, 576), torch.nan, dtype=torch.bfloat16)
    for write, made, q_out in zip((rope, reference), (case, plain), whole, strict=True):
        q, k, _ = made.parts()
        to = q_out[:, :heads] if heads == 5 else None
        write.rope_and_cache_write(q, k, None, made.angles, made.cache, to)
    assert torch.equal(whole.isnan(), whole[:1].isnan().expand_as(whole))
    assert whole[..., heads:, :].isnan().all()
    pairs = (case.qkv, plain.qkv), (case.cache.keys, plain.cache.keys), whole.nan_to_num()
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert not torch.equal(case.cache.keys, before.cache.keys)
    assert torch.equal(case.cache.values, before.cache.values)


@settings(deadline=None, max_examples=10)
@given(
    slots=st.lists(st.integers(0, 63), min_size=1, max_size=9, unique=True),
    heads=st.integers(1, 3),
    group=st.integers(1, 5),
    half=st.sampled_from([4, 12, 32]),
)
def test_any_slots_and_groups(slots: list[int], heads: int, group: int, half: int) -> None:
    check(Case.of(Shape(heads * group, heads, 2 * half), slots, torch.bfloat16))
