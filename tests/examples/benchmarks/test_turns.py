from threading import Thread

from examples.benchmarks.real_engine.counted import Turns


def test_runs_alternate_and_the_longer_one_goes_on_alone() -> None:
    turns = Turns(2)
    order: list[int] = []

    def run(number: int, num_steps: int) -> None:
        with turns.taking(number) as pass_turn:
            for _ in range(num_steps):
                order.append(number)
                pass_turn()

    threads = [Thread(target=run, args=(number, steps)) for number, steps in ((0, 4), (1, 2))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(timeout=10.0)
    assert order == [0, 1, 0, 1, 0, 0]
