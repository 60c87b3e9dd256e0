"""The launches over keys and values of each KV head: of decodes by our Triton kernel, of any
requests by FA2. CUDA graphs contain one for each kind and size."""

import torch

from adapters.attention.flashinfer.decodes import DecodeLaunch
from adapters.attention.flashinfer.launches import (
    CapturedLaunch,
    Geometry,
    GraphLaunch,
    Launch,
    MixedLaunch,
)
from adapters.attention.flashinfer.ports import Library
from adapters.attention.flashinfer.tables import TableSizes
from adapters.attention.flashinfer.workspace import Workspaces
from engine.worker.ports import StepLimits


class HeadLaunches:
    """See `Launches`. The launch of a graph is made at its first use, which comes before any
    request."""

    def __init__(
        self, library: Library, geometry: Geometry, sizes: TableSizes, limits: StepLimits
    ) -> None:
        """Decodes are FA2's without our kernels, and in batch-invariant mode. Raises
        `StartupError` naming the limit that needs too much memory."""
        self._library = library
        self._geometry = geometry
        self._work = Workspaces(library, geometry, sizes, limits)
        self.indices = self._work.indices
        kernels = None if geometry.spec.is_batch_invariant else library.decode_kernels()
        wrapper = library.mixed(self._work.parts)
        self.mixed: Launch = MixedLaunch(geometry, wrapper, library.event())
        self.decodes: Launch = self.mixed
        if kernels is not None:
            self.decodes = DecodeLaunch(geometry, library, kernels, sizes.rows)
        self._kernels = kernels
        self._captured: dict[tuple[int, bool], GraphLaunch] = {}

    def captured(self, size: int, *, is_mixed: bool) -> GraphLaunch:
        """The launch of a graph of `size` rows."""
        key = size, is_mixed
        if key not in self._captured:
            self._captured[key] = (self._mixed_of if is_mixed else self._decodes_of)(size)
        return self._captured[key]

    def _mixed_of(self, size: int) -> GraphLaunch:
        """The launch of `size` rows of any requests."""
        with torch.inference_mode(False):  # as below
            wrapper = self._work.captured_mixed(size)
        disables = self._disables_splits(size)
        event = self._library.event()
        return MixedLaunch(self._geometry, wrapper, event, size=size, disables_splits=disables)

    def _decodes_of(self, size: int) -> GraphLaunch:
        """The launch of `size` decodes."""
        with torch.inference_mode(False):  # buffers are written in and outside of inference mode
            if self._kernels is not None:
                return DecodeLaunch(self._geometry, self._library, self._kernels, size)
            wrapper = self._work.captured(size)
        disables = self._disables_splits(size)
        event = self._library.event()
        return CapturedLaunch(self._geometry, wrapper, event, disables_splits=disables)

    def _disables_splits(self, size: int) -> bool:
        return self._geometry.disables_splits(size, self._library.num_processors)
