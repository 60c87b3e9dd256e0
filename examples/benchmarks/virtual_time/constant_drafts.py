"""Texts, guesses and drafts for the sweep of constants: what speculation meets, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from engine.cost.model import CostModel
from engine.request import Request, RequestSpec
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.trace import Arrival
from engine.step import Step, StepEntry, StepResult

VOCABULARY = 1000
RATIO = 0.1  # of the draft model's seconds to the model's
LOOP_SECONDS = (3e-4, 2e-5)  # of an iteration with drafts, and of each draft
WARM_UP_SECONDS = 0.02  # of the first drafts of a size


@dataclass(frozen=True, slots=True)
class Answer(Arrival):
    """A request with a known answer; the draft model guesses this share of its tokens."""

    text: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    skill: float = 0.0

    def spec(self, index: int) -> RequestSpec:
        return replace(Arrival.spec(self, index), prediction=self.prediction)


def edits(arrivals: Sequence[Arrival], random: Random) -> list[Arrival]:
    """Predictions that differ from the answer in every twentieth token; a third are unrelated."""
    found: list[Arrival] = []
    for one in arrivals:
        text = _words(one.output_len, random)
        prediction = [word for word in text for _ in range(random.choice([1] * 38 + [0, 2]))]
        if random.random() < 1 / 3:
            prediction = [*_words(one.output_len, random)]
        found.append(
            Answer(one.at, one.prompt_len, one.output_len, (), None, text, tuple(prediction))
        )
    return found


def repeats(arrivals: Sequence[Arrival], random: Random) -> list[Arrival]:
    """Answers of phrases of 4 to 64 tokens that recur, between as many new ones."""
    phrases = [_words(random.randint(4, 64), random) for _ in range(30)]
    found: list[Arrival] = []
    for one in arrivals:
        text: list[int] = []
        while len(text) < one.output_len:
            text += random.choice(phrases)
            text += _words(random.randint(0, 40), random)
        answer = tuple(text[: one.output_len])
        found.append(Answer(one.at, one.prompt_len, one.output_len, (), None, answer))
    return found


def modelled(arrivals: Sequence[Arrival], random: Random) -> list[Arrival]:
    """Answers of which a draft model guesses most tokens, some or hardly any."""
    return [
        Answer(
            one.at,
            one.prompt_len,
            one.output_len,
            text=_words(one.output_len, random),
            skill=random.choice([0.85, 0.6, 0.1]),
        )
        for one in arrivals
    ]


def _words(count: int, random: Random) -> tuple[int, ...]:
    return tuple(random.randrange(VOCABULARY) for _ in range(count))


class DraftedCost:
    """A machine (`StepCost`) whose model does not know what proposals and drafts take."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._sizes: set[int] = set()
        self._num_drafts = 0  # of the last step

    def proposals(self, step: Step) -> float:
        """Seconds of the draft model."""
        specs = [entry.proposal for entry in step.entries if entry.proposal is not None]
        if not specs:
            return 0.0
        passes = [sum([len(spec.tokens) + 2 * (spec.num_tokens > 0) for spec in specs])]
        deepest = max([spec.num_tokens for spec in specs])
        passes += [sum([spec.num_tokens > depth for spec in specs]) for depth in range(1, deepest)]
        return RATIO * sum(map(self._model.tokens, passes))

    def step(self, step: Step) -> float:
        self._num_drafts = sum([entry.num_drafts for entry in step.entries])
        is_new = self._num_drafts > 0 and step.num_tokens not in self._sizes
        if is_new:
            self._sizes.add(step.num_tokens)
        return self._model.step(step) + self.proposals(step) + is_new * WARM_UP_SECONDS

    def idle(self, num_entries: int) -> float:
        more = LOOP_SECONDS[0] + LOOP_SECONDS[1] * self._num_drafts if self._num_drafts else 0.0
        return self._model.idle(num_entries) + more


class Drafting(SimulatedExecutor):
    """Answers with the texts of the arrivals, and proposes as many right tokens as their skill."""

    def __init__(self, model: CostModel, random: Random, lookahead: int) -> None:
        self._machine = DraftedCost(model)
        super().__init__(self._machine, next_token=self._next, lookahead=lookahead)
        self._random = random
        self._answers: dict[int, tuple[int, Answer]] = {}  # with the prompt's length

    def accepted(self, request: Request, arrival: Arrival) -> None:
        """The request of an arrival was accepted."""
        assert isinstance(arrival, Answer), "its text is known"
        self._answers[request.request_id] = (arrival.prompt_len, arrival)

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        result, at = super().run(step, now)
        accepted = iter(result.num_accepted)
        proposals: list[tuple[int, ...]] = []
        for entry in step.entries:
            behind = 1 + (next(accepted) if entry.num_drafts else 0)
            if entry.proposal is not None:
                proposals.append(self._guess(entry, behind, entry.proposal.num_tokens))
        seconds = self._machine.proposals(step)
        return replace(result, proposals=tuple(proposals), proposal_seconds=seconds), at

    def _place(self, entry: StepEntry) -> tuple[int, Answer]:
        """The place in the answer of the token behind the entry's own."""
        prompt_len, answer = self._answers[entry.request_id]
        return entry.start + len(entry.tokens) - entry.num_drafts - prompt_len, answer

    def _next(self, entry: StepEntry) -> int:
        place, answer = self._place(entry)
        return answer.text[place]

    def _guess(self, entry: StepEntry, behind: int, count: int) -> tuple[int, ...]:
        place, answer = self._place(entry)
        known = answer.text[place + behind : place + behind + count]
        return tuple(
            token if self._random.random() < answer.skill else VOCABULARY for token in known
        )
