"""Which layers of a model share block tables, and which share the memory of a KV tensor.

Layers that keep the KV of the same tokens form a group; a group has at most as many layers as fit
in a block. Layers of different groups share KV tensors, since no block belongs to two groups:

    layers   0 full   1 window   2 window   3 full   4 window   5 window
    group    0        1          2          0        1          2
    tensor   0        0          0          1        1          1
"""

from dataclasses import dataclass
from typing import Self

from engine.errors import StartupError
from engine.worker.ports import ModelShape

MAX_WASTE = 8  # at most one in so many layers of a block is unused


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The layer groups of a model; `of_layer` has the group of each layer, counted over all stages,
    None for a recurrent layer.

    `windows` has the sliding window of each group, None for one that keeps the KV of all tokens. An
    encoder keeps no KV and has no groups: all its layers use the same tensor, one after the other.
    """

    windows: tuple[int | None, ...]
    of_layer: tuple[int | None, ...]
    sources: tuple[int, ...]  # the layer whose KV each layer reads: its own, or an earlier one's

    @classmethod
    def of(cls, shape: ModelShape) -> Self:
        """Equally large groups, as large as they can be without much waste.

        Neighbours of one kind are in different groups, so that a stage has layers of all groups.
        """
        if not shape.is_causal:
            return cls((), (0,) * shape.num_layers, tuple(range(shape.num_layers)))
        options = shape.layer_attention
        kept = {n: options[n].window for n in shape.attention_layers}
        own = [n for n in kept if options[n].kv_layer is None]
        if not own:
            raise StartupError("a model without attention layers is not supported")
        found = sorted({kept[n] for n in own}, key=_full_first)
        layers = {window: [n for n in own if kept[n] == window] for window in found}
        counts = {window: len(places) for window, places in layers.items()}
        size = next(n for n in range(max(counts.values()), 0, -1) if _fits(n, counts))
        windows: list[int | None] = []
        of_layer: list[int | None] = [None] * shape.num_layers
        for window, places in layers.items():
            num_groups = -(-len(places) // size)
            for number, layer in enumerate(places):
                of_layer[layer] = len(windows) + number % num_groups
            windows += [window] * num_groups
        sources = tuple(
            layer if each.kv_layer is None else each.kv_layer for layer, each in enumerate(options)
        )
        return cls(tuple(windows), tuple(of_layer[source] for source in sources), sources)

    @property
    def keeps_all(self) -> bool:
        """Whether there is one group, which keeps the KV of all tokens."""
        return self.windows == (None,)

    def tensors(self, span: range) -> tuple[int, ...]:
        """For each attention layer of a stage, the number of the KV tensor that it uses."""
        if not self.windows:
            return (0,) * len(span)
        counts = [0] * len(self.windows)
        places: dict[int, int] = {}
        for layer in span:
            source, group = self.sources[layer], self.of_layer[layer]
            if group is None:
                continue
            if source == layer:
                places[layer] = counts[group]
                counts[group] += 1
            else:
                places[layer] = places[source]
        return tuple(places.values())

    @property
    def shares_kv(self) -> bool:
        """Whether some layers read the KV of others."""
        return self.sources != tuple(range(len(self.sources)))

    def in_stage(self, span: range) -> tuple[int, ...]:
        """The group of each attention layer of a stage."""
        groups = self.of_layer[span.start : span.stop]
        return tuple(group for group in groups if group is not None)


def _full_first(window: int | None) -> int:
    return -1 if window is None else window


def _fits(size: int, counts: dict[int | None, int]) -> bool:
    """Whether groups of `size` layers waste little of a block: over all groups, and over those that
    keep the KV of all tokens, which need most blocks for long contexts."""
    used = {window: -(-count // size) * size for window, count in counts.items()}
    is_dense = (sum(used.values()) - sum(counts.values())) * MAX_WASTE <= sum(counts.values())
    full = counts.get(None, 0)
    return is_dense and (used.get(None, 0) - full) * MAX_WASTE <= full
