"""The port of proposers, which guess the next tokens of a request."""

from typing import NamedTuple, Protocol

from engine.request import Request


class Proposal(NamedTuple):
    """Guessed next tokens. `length` is how many tokens before them were matched: the longer the
    match, the more likely the guess is right."""

    tokens: tuple[int, ...]
    length: int

    def before(self, end_ids: frozenset[int]) -> "Proposal":
        """The guess up to the first token that would end the output."""
        for count, token in enumerate(self.tokens):
            if token in end_ids:
                return Proposal(self.tokens[:count], self.length)
        return self


NO_PROPOSAL = Proposal((), 0)


class Proposer(Protocol):
    """Guesses from tokens alone; keeps what it needs of each request until `forget`."""

    @property
    def name(self) -> str: ...

    def propose(self, request: Request, count: int) -> Proposal:
        """Up to `count` tokens that may follow the request's last token; none if unknown."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...
