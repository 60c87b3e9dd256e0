"""The launches that CUDA graphs contain, one for each kind and size: of decodes by our Triton
kernel, of any requests by FA2."""

import torch

from adapters.attention.flashinfer.decodes import DecodeLaunch
from adapters.attention.flashinfer.launches import (
    CapturedLaunch,
    Geometry,
    GraphLaunch,
    MixedLaunch,
)
from adapters.attention.flashinfer.ports import DecodeKernels, Library
from adapters.attention.flashinfer.workspace import Workspaces


class CapturedLaunches:
    """Makes the launch of a graph at its first use, which comes before any request."""

    def __init__(
        self,
        library: Library,
        geometry: Geometry,
        work: Workspaces,
        kernels: DecodeKernels | None,
    ) -> None:
        """Decodes are FA2's without our kernels."""
        self._library = library
        self._geometry = geometry
        self._work = work
        self._kernels = kernels
        self._decodes: dict[int, GraphLaunch] = {}
        self._mixed: dict[int, GraphLaunch] = {}

    def decodes(self, size: int) -> GraphLaunch:
        """The launch of `size` decodes."""
        if size not in self._decodes:
            self._decodes[size] = self._launch(size)
        return self._decodes[size]

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

    def _launch(self, size: int) -> GraphLaunch:
        with torch.inference_mode(False):  # buffers are written in and outside of inference mode
            if self._kernels is not None:
                return DecodeLaunch(self._geometry, self._library, self._kernels, size)
            wrapper = self._work.captured(size)
        disables = self._disables_splits(size)
        event = self._library.event()
        return CapturedLaunch(self._geometry, wrapper, event, disables_splits=disables)

    def _disables_splits(self, size: int) -> bool:
        return self._geometry.disables_splits(size, self._library.num_processors)
