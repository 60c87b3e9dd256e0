"""Times: when a request arrived, was admitted, got its tokens and ended."""

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Seconds of the engine's clock; None until known, or if it never happens."""

    arrived_at: float
    images_wanted_at: float | None = None  # when it began to wait for its images to be encoded
    lacked_image_at: float | None = None  # when it last waited for one
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at
