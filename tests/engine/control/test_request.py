import pytest

from engine.request import (
    TRANSITIONS,
    Abort,
    FinishReason,
    Move,
    Request,
    RequestSpec,
    State,
    Times,
)
from engine.step import RequestId, SamplingParams


def make(prompt_len: int = 3, max_tokens: int = 4) -> Request:
    spec = RequestSpec(tuple(range(prompt_len)), max_tokens, SamplingParams())
    return Request(RequestId(7), spec, Times(0.0))


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    request = make()
    with pytest.raises(AssertionError, match="commit while waiting"):
        request.move(Move.COMMIT)
    assert request.state is State.WAITING


def test_no_move_leads_out_of_a_terminal_state() -> None:
    assert not [state for state, _ in TRANSITIONS if state.is_terminal]


def test_every_state_but_the_first_can_be_reached() -> None:
    assert set(TRANSITIONS.values()) == set(State)


def test_every_live_state_can_reach_a_terminal_state() -> None:
    ends = {state for state in State if state.is_terminal}
    for _ in State:
        ends |= {state for (state, _), to in TRANSITIONS.items() if to in ends}
    assert ends == set(State)


def test_a_prompt_is_prefilled_and_its_output_decoded() -> None:
    request = make()
    assert (request.is_decoding, request.remaining) == (False, 3)
    request.num_computed = 2
    assert (request.is_decoding, request.remaining) == (False, 1)
    request.num_computed = 3
    request.output.append(9)
    assert (request.is_decoding, request.remaining) == (True, 1)


def test_after_a_preemption_prompt_and_output_are_prefilled_again() -> None:
    request = make()
    request.output += [9, 8]
    request.num_computed = 0
    assert (request.is_decoding, request.remaining) == (False, 5)


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 3), (2, 5), (3, 5), (4, 5), (0, 5)])
def test_tokens_run_from_the_prompt_into_the_output(start: int, stop: int) -> None:
    request = make()
    request.output += [90, 91]
    assert request.tokens(start, stop) == (0, 1, 2, 90, 91)[start:stop]


def test_the_last_output_token_needs_no_slot() -> None:
    assert make(prompt_len=3, max_tokens=4).spec.max_slots == 6


def test_a_stop_string_counts_as_finished() -> None:
    request = make()
    request.state = State.CANCELLED
    request.abort = Abort.STOP_STRING
    assert request.outcome == "finished"
    request.abort = Abort.CLIENT_GONE
    assert request.outcome == "cancelled"
    request.finish = FinishReason.LENGTH
    assert request.outcome == "finished"
