"""A language whose next token is a function of all tokens before it.

The digest of a position names all tokens up to it, the salt and the LoRA adapter. It is what a slot
of KV holds after that position was computed, so wrong content is seen when it is read.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import RequestSpec

NUM_TOKENS = 7
END = 6
POISON = NUM_TOKENS  # sampled from content that could not be read; no text has it
UNREADABLE = 0  # the digest of such content
MAX_GROUPS = 16
_MASK = (1 << 60) - MAX_GROUPS
_SALTS = ("", "x", "y")


def root_of(spec: "RequestSpec") -> int:
    """The digest before the first token. (Hashes of numbers are the same in every process.)"""
    lora_id = 0 if spec.lora is None else int(spec.lora.digest, 16)
    return hash((1, _SALTS.index(spec.salt), lora_id)) & _MASK


def extend(digest: int, tokens: "Iterable[int]") -> list[int]:
    """The digests after each of the tokens; content that cannot be read makes all unreadable."""
    digests = []
    for token in tokens:
        digest = hash((digest, token)) & _MASK if digest else UNREADABLE
        digests.append(digest)
    return digests


def next_token(digest: int, last: int, banned: tuple[int, ...] = ()) -> int:
    """The token after a position. Texts repeat themselves often enough for drafts to be right."""
    if digest == UNREADABLE:
        return POISON
    number = digest >> 8
    share = number % 1000
    if share < 30:
        token = END
    elif share < 600:
        token = (last + 1) % 3
    else:
        token = number // 1000 % NUM_TOKENS
    while token in banned:
        token = (token + 1) % NUM_TOKENS
    return token


def contents_of(spec: "RequestSpec") -> list[int]:
    """What stands at each position of the prompt: a token, or a row of an image."""
    contents = list(spec.prompt)
    for media in spec.media:
        image = int.from_bytes(media.digest[:4], "little")
        for row in range(media.num_tokens):
            contents[media.start + row] = hash((image, row))
    return contents


class Text:
    """A prompt and the output that follows it, computed as far as it is asked for; it goes on
    behind the end of the request."""

    def __init__(self, spec: "RequestSpec", num_groups: int) -> None:
        self.spec = spec
        self.root = root_of(spec)
        self.tokens: list[int] = []
        self.digests: list[int] = []
        # What slots hold: KV of different layer groups differs.
        self.in_group: list[list[int]] = [[] for _ in range(num_groups)]
        self._append(spec.prompt, contents_of(spec))

    def reach(self, length: int) -> None:
        """Know at least so many tokens."""
        spec = self.spec
        while len(self.tokens) < length:
            is_early = len(self.tokens) - len(spec.prompt) < spec.min_tokens
            banned = tuple(spec.end_ids) if is_early else ()
            token = next_token(self.digests[-1], self.tokens[-1], banned)
            self._append([token], [token])

    def output(self, count: int) -> list[int]:
        """The first tokens of the output."""
        first = len(self.spec.prompt)
        self.reach(first + count)
        return self.tokens[first : first + count]

    def digest_before(self, position: int) -> int:
        """The digest of all tokens before a position."""
        return self.digests[position - 1] if position else self.root

    def _append(self, tokens: "Iterable[int]", contents: "Iterable[int]") -> None:
        digests = extend(self.digest_before(len(self.digests)), contents)
        self.tokens += tokens
        self.digests += digests
        for group, held in enumerate(self.in_group):
            held += [digest + group for digest in digests]
