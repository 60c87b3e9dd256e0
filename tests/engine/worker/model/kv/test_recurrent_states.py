from engine.step import NO_STATE, Snapshot, StateSlots
from engine.worker.model.kv.recurrent_states import RecurrentStates, bytes_per_state, state_runs
from engine.worker.ports import DeltaShape


def test_the_state_after_a_snapshots_row_is_written_to_both_slots() -> None:
    slots = StateSlots(7, NO_STATE, (Snapshot(4, 2), Snapshot(10, 3)))
    runs, writes, _ = state_runs([StateSlots(1, 1), slots], [0, 1, 11])
    assert runs.tolist() == [[0, 1, 1], [1, 11, NO_STATE]]
    written = {row: each for row, each in enumerate(writes.tolist()) if max(each) != NO_STATE}
    assert written == {0: [1, NO_STATE], 4: [2, NO_STATE], 10: [7, 3]}


def test_rows_that_read_what_the_row_before_writes_are_one_run() -> None:
    rows = [StateSlots(4, 9), StateSlots(5, 4), StateSlots(9, 5), StateSlots(3, 3)]
    runs, writes, _ = state_runs(rows, [0, 1, 2, 3, 4])
    assert runs.tolist() == [[0, 3, 9], [3, 4, 3]]
    assert writes[:, 0].tolist() == [4, 5, 9, 3]


def test_the_bytes_of_a_state_are_those_of_its_tensors() -> None:
    shapes = (DeltaShape(2, 4, 8, 12, 4), DeltaShape(1, 1, 4, 4, 3))
    states = RecurrentStates(shapes, 3)
    assert sum(tensor.nbytes for tensor in states.tensors()) == 3 * bytes_per_state(shapes)
