"""The error with which a case ends."""


class Wrong(AssertionError):
    """The engine did what it must not do."""
