"""Byte-level BPE as data: GPT-2's alphabet of bytes, and merges as tiktoken's ranks.

Hugging Face merges the *pairs* that a list names; tiktoken merges any two neighbours whose
concatenation has a rank. Both give the same ids if merging a token's own text by ranks ends in a
pair that the list names. (The text of two neighbours that merge into t has been merged so far as
if it stood alone, because nothing crossed its borders; so only that one pair can ever meet.)
`merge_table` checks this for every token instead of believing it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from adapters.tokenizers.definition import NotRepresentable, Section

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each of the 256 bytes: printable ones stand for themselves."""
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    alphabet = {chr(byte): byte for byte in _PRINTABLE}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """Token strings of a byte-level vocabulary to the bytes that they stand for."""

    def __init__(self) -> None:
        alphabet = byte_alphabet()
        # Latin-1 then maps each character to its byte, and fails for characters outside.
        strangers = {code: 0xFFFF for code in range(256) if chr(code) not in alphabet}
        self._table = strangers | {ord(char): byte for char, byte in alphabet.items()}

    def strict(self, token: str) -> bytes | None:
        """The bytes, or None if a character is no byte's."""
        try:
            return token.translate(self._table).encode("latin-1")
        except UnicodeEncodeError:
            return None

    def loose(self, token: str) -> bytes:
        """As Hugging Face decodes: a token with a foreign character is its own text."""
        found = self.strict(token)
        return token.encode() if found is None else found


@dataclass(frozen=True, slots=True)
class MergeTable:
    """What tiktoken needs: a rank for each token's bytes.

    `ids[rank]` is the id; it is None where ranks *are* ids, which needs ids in merge order.
    """

    ranks: dict[bytes, int]
    ids: list[int] | None


def merge_table(model: Section, vocab: Mapping[str, int], added: Iterable[str]) -> MergeTable:
    """Ranks that give the ids of this BPE `model`. Raises `NotRepresentable` if there are none.

    `vocab` may hold tokens that no merge reaches; they are left out, unless the model looks
    whole pieces up first (`ignore_merges`), as tiktoken always does.
    """
    splits = _splits(model["merges"])
    places = {token: place for place, token in enumerate(splits)}
    alphabet = byte_alphabet()
    if missing := [char for char in alphabet if char not in vocab]:
        raise NotRepresentable(f"no token for the bytes {missing}")
    looks_up = bool(model.get("ignore_merges"))
    reached: list[str] = []
    for token, pairs in splits.items():
        pair = last_pair(token, places)
        if pair in pairs or (pair is None and looks_up):
            reached.append(token)
        elif pair is not None:
            raise NotRepresentable(f"{token!r} would be merged from {pair}, which is no merge")
    whole: list[str] = []
    if looks_up:
        known = {*splits, *added, *alphabet}
        whole = [t for t in vocab if t not in known and _is_only_whole(t, places, alphabet)]
    return _ranked([*alphabet], reached, whole, vocab)


def last_pair(token: str, places: Mapping[str, int]) -> tuple[str, str] | None:
    """The two parts that merging `token`'s own characters comes to before the last merge.

    None if merging stops earlier. The lowest place merges first, the leftmost among equals.
    """
    parts = list(token)
    never = len(places)
    pairs = [places.get(a + b, never) for a, b in pairwise(parts)]
    while len(parts) > 2:
        lowest = min(pairs)
        if lowest == never:
            return None
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pairs[at]
        if at > 0:
            pairs[at - 1] = places.get(parts[at - 1] + parts[at], never)
        if at < len(pairs):
            pairs[at] = places.get(parts[at] + parts[at + 1], never)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _splits(merges: Iterable[str | list[str]]) -> dict[str, list[tuple[str, str]]]:
    """Each merged token's pairs, tokens in the order of their merges."""
    splits: dict[str, list[tuple[str, str]]] = {}
    newest = ""
    for merge in merges:
        left, _, right = (
            merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
        )
        token = left + right
        if token in splits and token != newest:
            raise NotRepresentable(f"merges into {token!r} are not neighbours in the list")
        splits.setdefault(token, []).append((left, right))
        newest = token
    return splits


def _is_only_whole(token: str, places: Mapping[str, int], alphabet: Mapping[str, int]) -> bool:
    """Whether `token` is found by looking a whole piece up, and only so."""
    if any(char not in alphabet for char in token):
        return False
    if last_pair(token, places) is not None:
        raise NotRepresentable(f"{token!r} has no merge but tiktoken would merge it")
    return True


def _ranked(
    single: list[str], reached: list[str], whole: list[str], vocab: Mapping[str, int]
) -> MergeTable:
    tokens = [*single, *reached, *whole]
    if strays := [token for token in tokens if token not in vocab]:
        raise NotRepresentable(f"merges into {strays[:3]}, which are no tokens")
    read = TokenBytes()
    as_bytes = [found for token in tokens if (found := read.strict(token)) is not None]
    if len(as_bytes) < len(tokens):
        raise NotRepresentable("a merge has a character that is no byte's")
    ids = [vocab[token] for token in tokens]
    merged = ids[len(single) : len(single) + len(reached)]
    if all(a < b for a, b in pairwise(merged)):
        return MergeTable(dict(zip(as_bytes, ids, strict=True)), None)
    return MergeTable({token: rank for rank, token in enumerate(as_bytes)}, ids)
