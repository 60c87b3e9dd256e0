"""Decorators that make a coroutine function a test which an event loop of our own runs."""

from collections.abc import Awaitable, Callable, Coroutine
from functools import update_wrapper
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from engine.simulated.virtual_loop import run_virtual

P = ParamSpec("P")
T = TypeVar("T")


def plays(
    play: Callable[[Callable[[T], Awaitable[None]]], object],
) -> Callable[[Callable[Concatenate[T, P], Awaitable[None]]], Callable[P, None]]:
    """The first parameter is what `play` gives to a scene; the others are pytest's."""

    def decorate(scene: Callable[Concatenate[T, P], Awaitable[None]]) -> Callable[P, None]:
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            play(lambda first: scene(first, *args, **kwargs))

        update_wrapper(test, scene)
        _, *others = signature(scene).parameters.values()
        test.__signature__ = Signature(others)  # type: ignore[attr-defined] # read by pytest
        return test

    return decorate


def in_virtual_time(scene: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """It runs as fast as it can, on a clock of its own."""

    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(scene(*args, **kwargs))

    return update_wrapper(test, scene)
