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
        self._divided: dict[int, GraphLaunch] = {}
        self._mixed: dict[int, GraphLaunch] = {}

    def decodes(self, size: int) -> GraphLaunch:
        """The launch of `size` decodes."""
        if size not in self._decodes:
            self._decodes[size] = self._launch(size, divides=not self._disables_splits(size))
        return self._decodes[size]

    def may_divide(self, size: int) -> bool:
        """Whether there is another launch of `size` decodes, for requests of unequal lengths: where
        the first one does not divide keys. A window makes lengths equal. All ranks find the
        same."""
        spec = self._geometry.spec
        is_even = size == 1 or spec.window is not None or spec.is_batch_invariant
        return not is_even and self._disables_splits(size)

    def divided(self, size: int) -> GraphLaunch:
        """The launch of `size` decodes of unequal lengths; `may_divide` is true."""
        if size not in self._divided:
            self._divided[size] = self._launch(size, divides=True)
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

    def _launch(self, size: int, *, divides: bool) -> GraphLaunch:
        with torch.inference_mode(False):  # buffers are written in and outside of inference mode
            if self._kernels is not None:
                library, kernels = self._library, self._kernels
                return DecodeLaunch(self._geometry, library, kernels, size, divides=divides)
            wrapper = self._work.captured(size)
        disables = self._disables_splits(size)
        event = self._library.event()
        return CapturedLaunch(self._geometry, wrapper, event, disables_splits=disables)

    def _disables_splits(self, size: int) -> bool:
        return self._geometry.disables_splits(size, self._library.num_processors)
