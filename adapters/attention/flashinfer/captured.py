"""The launches that CUDA graphs contain, one for each kind and size: of decodes by FA2 or XQA, of
any requests by FA2."""

import torch

from adapters.attention.flashinfer.decode_choice import (
    FA2,
    XQA,
    DecodeChoice,
    DecodeTrial,
    Pages,
    Times,
)
from adapters.attention.flashinfer.divided import DividedLaunch
from adapters.attention.flashinfer.fit import unsupported_packed
from adapters.attention.flashinfer.launches import (
    CapturedLaunch,
    Geometry,
    GraphLaunch,
    MixedLaunch,
)
from adapters.attention.flashinfer.packed import DenseTables, PackedLaunch, workspace_bytes
from adapters.attention.flashinfer.ports import Library
from adapters.attention.flashinfer.tables import PARTS_PER_ROW, PageTableArenas, TableSizes
from adapters.attention.flashinfer.workspace import Workspaces
from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials, file_of


class CapturedLaunches:
    """Makes the launch of a graph at its first use, which comes before any request."""

    def __init__(
        self,
        library: Library,
        geometry: Geometry,
        pages: Pages,
        num_blocks: int,
        work: Workspaces,
        arenas: PageTableArenas,
        wanted: str,
    ) -> None:
        """`pages` are the keys and values of each layer, `wanted` is a kernel's name or AUTO.
        Raises `StartupError` if it cannot be used."""
        spec = geometry.spec
        assert spec.limits is not None, "attention on a GPU needs the step limits"
        self._library = library
        self._geometry = geometry
        self._work = work
        self._trial = DecodeTrial(library, geometry, pages, num_blocks, arenas)
        why_not = unsupported_packed(
            spec, geometry.kv_dtype, geometry.page_size, library.capability
        )
        path = file_of(spec.choices, *library.names, "decode attention")
        notes = file_of(spec.choices, *library.names, "kernel trials")
        trials = KernelTrials(ChoiceFile(notes), library.synchronize)
        self._choice = DecodeChoice(wanted, why_not, _shape(geometry), ChoiceFile(path), trials)
        sizes = TableSizes.of(spec.limits, geometry.page_size)
        self._packed = self._packed_launch(sizes) if self._choice.may_use_xqa else None
        self._merge = library.merge_parts()
        self._decodes: dict[int, GraphLaunch] = {}
        self._divided: dict[int, GraphLaunch] = {}
        self._mixed: dict[int, GraphLaunch] = {}

    def decodes(self, size: int) -> GraphLaunch:
        """The launch of `size` decodes."""
        if size not in self._decodes:
            self._decodes[size] = self._chosen(size)
        return self._decodes[size]

    def may_divide(self, size: int) -> bool:
        """Whether there is another launch of `size` decodes, for requests of unequal lengths.

        FA2 divides keys of so few requests that they do not fill the GPU by itself; XQA, which may
        compute any size, divides those of all requests into equally many parts. A window makes
        lengths equal. All ranks find the same, whatever they have measured.
        """
        spec = self._geometry.spec
        if size == 1 or spec.window is not None or spec.is_batch_invariant:
            return False
        return self._disables_splits(size) or self._packed is not None

    def divided(self, size: int) -> GraphLaunch:
        """The launch of `size` decodes of unequal lengths; `may_divide` is true."""
        if size not in self._divided:
            self._divided[size] = self._divided_launch(size)
        return self._divided[size]

    def mixed(self, size: int) -> GraphLaunch:
        """The launch of `size` rows of any requests."""
        if size not in self._mixed:
            with torch.inference_mode(False):  # as below
                wrapper = self._work.captured_mixed(size)
            disables = self._disables_splits(size)
            event = self._library.event()
            self._mixed[size] = MixedLaunch(
                self._geometry, wrapper, event, size=size, disables_splits=disables
            )
        return self._mixed[size]

    def _chosen(self, size: int) -> GraphLaunch:
        launches: dict[str, GraphLaunch] = {FA2: self._planned_launch(size)}
        if self._packed is not None:
            launches[XQA] = self._packed
        indices = self._work.indices

        def verify() -> None:
            self._trial.verify(size, launches[FA2], launches[XQA], indices)

        def measure(name: str) -> Times:
            return self._trial.times(size, launches[name], indices)

        return launches[self._choice.of(size, verify, measure)]

    def _planned_launch(self, size: int) -> CapturedLaunch:
        with torch.inference_mode(False):  # buffers are written in and outside of inference mode
            wrapper = self._work.captured(size)
        disables = self._disables_splits(size)
        event = self._library.event()
        return CapturedLaunch(self._geometry, wrapper, event, disables_splits=disables)

    def _divided_launch(self, size: int) -> GraphLaunch:
        """Decodes are FA2's alone where it divides keys, or where our kernel cannot be used."""
        merge = self._merge
        if merge is None or not self._disables_splits(size):
            return self._planned_launch(size)
        parts = self._planned_launch(PARTS_PER_ROW * size)
        with torch.inference_mode(False):  # as above
            return DividedLaunch(self._geometry, parts, merge, self._library, size)

    def _disables_splits(self, size: int) -> bool:
        return self._geometry.disables_splits(size, self._library.num_processors)

    def _packed_launch(self, sizes: TableSizes) -> PackedLaunch:
        spec, library = self._geometry.spec, self._library
        group = spec.num_heads // spec.num_kv_heads
        size = workspace_bytes(library.num_processors, group, spec.head_dim)
        workspace = library.on_device(size, torch.uint8)
        tables = DenseTables(library, sizes)
        return PackedLaunch(self._geometry, library.packed_decode(workspace), tables)


def _shape(geometry: Geometry) -> str:
    spec = geometry.spec
    window = "" if spec.window is None else f", window of {spec.window}"
    return (
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}, "
        f"{str(spec.dtype).removeprefix('torch.')}, pages of {geometry.page_size}{window}"
    )
