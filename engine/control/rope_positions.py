"""The positions along three axes that RoPE turns the tokens of a prompt with images by (M-RoPE).

Text has the same position on all axes. An image has the position of the token before it plus one on
the first axis, and the rows and columns of its tokens are added to that on the others. What follows
has the largest position so far plus one on all axes, so positions fall behind the tokens' numbers:
text behind the images has its number plus a shift.
"""

from array import array
from itertools import product
from typing import NamedTuple

from engine.media import Media


class RopePositions(NamedTuple):
    """The positions of a prompt; those behind the last image, and of the output, are shifted
    numbers."""

    axes: "tuple[array[int], array[int], array[int]]"  # up to the end of the last image
    shift: int

    @property
    def stop(self) -> int:
        """The end of the last image."""
        return len(self.axes[0])

    @classmethod
    def of(cls, media: tuple[Media, ...], merge: int) -> "RopePositions":
        """`merge` is the number of patches along each side that one token stands for."""
        axes, start, position = (array("i"), array("i"), array("i")), 0, 0
        for image in media:
            text = range(position, position + image.start - start)
            position = text.stop
            frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
            sides = [range(position, position + size) for size in (frames, rows, columns)]
            for axis, places in zip(axes, zip(*product(*sides), strict=True), strict=True):
                axis.extend(text)
                axis.extend(places)
            position += max(frames, rows, columns)
            start = image.end
        return cls(axes, position - start)

    def between(self, start: int, stop: int) -> bytes:
        """The positions of tokens `[start, stop)` as in `EntryMedia`."""
        behind = range(max(start, self.stop) + self.shift, stop + self.shift)
        parts = [axis[start : min(stop, self.stop)] + array("i", behind) for axis in self.axes]
        return b"".join([part.tobytes() for part in parts])
