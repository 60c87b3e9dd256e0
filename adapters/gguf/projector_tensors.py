"""The tensors of a GGUF file and of the mmproj file of its image encoder as one checkpoint."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from adapters.gguf.blocks import FORMATS, stored_weight
from adapters.gguf.file import GgufFile, TensorEntry
from adapters.gguf.floats import FLOATS, drop, read_floats, stored_rows
from adapters.gguf.projector import POSITIONS, VISION, projector_of
from adapters.gguf.projector_names import (
    BIAS,
    DEEPSTACK,
    DEEPSTACK_LIST,
    FIRST_FRAME,
    JOINED,
    PATCHES,
    QKV,
    SECOND_FRAME,
    SOFT_NORM,
    WEIGHT,
    ProjectorNames,
)
from adapters.gguf.tensors import GgufTensors, Kind, floats_of
from engine.worker.ports import PreferredFormat, Weight


@dataclass(frozen=True, slots=True)
class _Source:
    """The stored tensors that one of Hugging Face's consists of, one after the other, or as the
    frames of patches; `offset` is added."""

    entries: tuple[TensorEntry, ...]
    are_frames: bool = False
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.entries[0].shape
        if self.are_frames:
            return (*first[:2], len(self.entries), *first[2:])
        return (sum(each.shape[0] for each in self.entries), *first[1:])

    @property
    def format(self) -> str | None:
        """The format in which the engine computes a linear with it as it is stored; else None."""
        kinds = {each.kind for each in self.entries}
        kind = self.entries[0].kind
        is_stored = len(kinds) == 1 and kind in FORMATS and len(self.shape) == 2
        return FORMATS[kind].layout.name if is_stored else None


class ProjectorTensors:
    """The encoder's tensors by their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.sources = dict(_sources(self.file, projector_of(self.file).names))

    @property
    def formats(self) -> Set[str]:
        """The formats of its quantized linears."""
        return {each.format for each in self.sources.values() if each.format is not None}

    @property
    def matrix_kinds(self) -> Set[Kind]:
        """The types of all matrices of linears."""
        tensors = self.file.tensors.items()
        return {each.kind for name, each in tensors if len(each.shape) == 2 and name != POSITIONS}

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        """Some rows and columns, in float32 if a matrix is quantized and they are not all."""
        source = self.sources[name]
        sizes = tuple(
            len(range(*each.indices(size))) for each, size in zip(index, source.shape, strict=False)
        )
        if source.format is None or sizes != source.shape:
            return self._floats(source)[index]
        rows = [stored_rows(self.file, each, range(each.shape[0])) for each in source.entries]
        return stored_weight(torch.cat(rows), source.entries[0].kind, source.shape[1])

    def _floats(self, source: _Source) -> Tensor:
        parts = [self._stored(entry) for entry in source.entries]
        if source.are_frames:
            return torch.stack(parts, dim=2)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole + source.offset if source.offset else whole

    def _stored(self, entry: TensorEntry) -> Tensor:
        return read_floats(self.file, entry, range(prod(entry.shape[:-1]))).view(entry.shape)


class JoinedTensors:
    """`CheckpointFiles` of both files."""

    def __init__(self, text: Path, projector: Path) -> None:
        self._text, self._projector = GgufTensors(text), ProjectorTensors(projector)

    @property
    def names(self) -> Set[str]:
        return self._text.names | self._projector.sources.keys()

    @property
    def files(self) -> Sequence[Path]:
        return (*self._text.files, self._projector.file.path)

    @property
    def preferred_format(self) -> PreferredFormat:
        """That of the decoder; if it is computed as it is stored, so is the encoder. Floats have
        the encoder's dtype where all matrices of the decoder are quantized."""
        preferred = self._text.preferred_format
        stored = {*preferred.stored, *self._projector.formats} if preferred.stored else ()
        kinds = self._text.matrix_kinds & FLOATS.keys() or self._projector.matrix_kinds
        return preferred._replace(stored=tuple(sorted(stored)), floats=floats_of(kinds))

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._projector.sources.get(name)
        return self._text.shape(name) if source is None else source.shape

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        if name in self._projector.sources:
            return self._projector.read(name, index)
        return self._text.read(name, index)

    def drop_pages(self) -> None:
        self._text.drop_pages()
        drop(self._projector.file)


def _sources(file: GgufFile, names: ProjectorNames) -> Iterator[tuple[str, _Source]]:
    """The Hugging Face names, with what they consist of; an unknown tensor keeps its own name."""
    width = file.integer(f"{VISION}embedding_length")
    rest = dict(file.tensors)
    for own, name in names.whole.items():
        yield name, _Source((rest.pop(own),), offset=-1.0 if own == SOFT_NORM else 0.0)
    if names.has_frames:
        frames = (rest.pop(FIRST_FRAME), rest.pop(SECOND_FRAME))
        yield f"{PATCHES}{WEIGHT}", _Source(frames, are_frames=True)
    for own, name in names.parts.items():
        yield from _both(rest, own, name)
    for layer in range(file.integer(f"{VISION}block_count") or 0):
        at, behind = f"v.blk.{layer}.", f"{names.blocks}{layer}."
        renamed = _right_way_round(file.tensors, at, width)
        for own, part in names.block.items():
            yield from _both(rest, f"{at}{renamed.get(own, own)}", f"{behind}{part}")
        if names.joined:
            yield from _joined(rest, at, f"{behind}{names.joined}")
    added = sorted({int(own.split(".")[2]) for own in rest if own.startswith("v.deepstack.")})
    for place, layer in enumerate(added):
        for own, part in DEEPSTACK.items():
            yield from _both(rest, f"v.deepstack.{layer}.{own}", f"{DEEPSTACK_LIST}{place}.{part}")
    yield from ((own, _Source((entry,))) for own, entry in rest.items())


def _both(rest: dict[str, TensorEntry], own: str, name: str) -> Iterator[tuple[str, _Source]]:
    for kind in (WEIGHT, BIAS):
        if f"{own}{kind}" in rest:
            yield f"{name}{kind}", _Source((rest.pop(f"{own}{kind}"),))


def _joined(rest: dict[str, TensorEntry], at: str, name: str) -> Iterator[tuple[str, _Source]]:
    """q, k and v as one linear, which older files have in three tensors."""
    yield from _both(rest, f"{at}{JOINED}", name)
    for kind in (WEIGHT, BIAS):
        parts = [f"{at}{part}{kind}" for part in QKV]
        if all(part in rest for part in parts):
            yield f"{name}{kind}", _Source(tuple(rest.pop(part) for part in parts))


def _right_way_round(
    tensors: Mapping[str, TensorEntry], at: str, width: int | None
) -> Mapping[str, str]:
    """Old files have the names of the MLP's two linears the wrong way round."""
    up, down = (tensors.get(f"{at}ffn_{each}{WEIGHT}") for each in ("up", "down"))
    if up is None or down is None or up.shape[-1] == width or down.shape[-1] != width:
        return {}
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
