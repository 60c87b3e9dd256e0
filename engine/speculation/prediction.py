"""The `prediction` of a request, a text that its output is expected to repeat, as drafts.

The output is followed through the predicted text token by token. Where they differ, the place is
kept, so that inserted tokens are skipped, and the last tokens of the output are looked up in the
prediction, so that it is found again behind removed or replaced ones.
"""

from engine.request import Request
from engine.speculation.proposers import NO_PROPOSAL, Proposal
from engine.speculation.settings import LOOKUP_MAX, LOOKUP_MIN
from engine.speculation.token_index import TokenIndex
from engine.step import RequestId


class _Place:
    """How far one output has got in its prediction: `at` is the place of its next token, and
    `length` tokens before it are equal."""

    def __init__(self, prediction: tuple[int, ...]) -> None:
        self.prediction = TokenIndex(LOOKUP_MIN)
        self.prediction.extend(prediction)
        self.at = 0
        self.length = LOOKUP_MIN  # the beginning of an output counts as a match
        self.num_read = 0  # output tokens

    def read(self, output: list[int]) -> None:
        """Follow the tokens of the output that were not read yet."""
        predicted = self.prediction.tokens
        for position in range(self.num_read, len(output)):
            if self.at < len(predicted) and predicted[self.at] == output[position]:
                self.at += 1
                self.length += 1
            else:
                self._find(output[max(0, position + 1 - LOOKUP_MAX) : position + 1])
        self.num_read = len(output)

    def _find(self, tail: list[int]) -> None:
        match = self.prediction.find(tail)
        self.length = match.length
        if match.length:
            ahead = [end for end in match.ends if end >= self.at]
            self.at = 1 + min(ahead, default=match.ends[0])


class PredictionProposer:
    """Proposes the next tokens of `RequestSpec.prediction`."""

    name = "prediction"

    def __init__(self) -> None:
        self._places: dict[RequestId, _Place] = {}

    def propose(self, request: Request, count: int) -> Proposal:
        if not request.spec.prediction:
            return NO_PROPOSAL
        place = self._places.get(request.request_id)
        if place is None:
            place = self._places[request.request_id] = _Place(request.spec.prediction)
        place.read(request.output)
        tokens = place.prediction.tokens[place.at : place.at + count]
        return Proposal(tuple(tokens), place.length)

    def forget(self, request: Request) -> None:
        self._places.pop(request.request_id, None)
