import asyncio

import pytest

from engine.simulated.virtual_loop import run_virtual


def test_work_for_a_thread_is_done_at_once() -> None:
    async def main() -> tuple[int, float]:
        number = await asyncio.to_thread(sum, [1, 2, 3])
        return number, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (6, 0.0)


def test_an_error_of_such_work_is_raised_where_it_is_awaited() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "x")

    run_virtual(main())
