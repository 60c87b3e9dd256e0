"""Byte-level BPE as data: GPT-2's byte alphabet, and merges as tiktoken's ranks.

Hugging Face merges the *pairs* in a list; tiktoken merges any two adjacent parts whose
concatenation has a rank. Both give the same ids if merging a token's own text by ranks ends in a
pair of the list: the text of two parts that merge into token t has so far been merged as if it
were alone, since no merge crossed its borders, so only that one pair can occur. `merge_table`
checks this for every token.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from adapters.tokenizers.definition import MergeTable, NotRepresentable, Section

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each of the 256 bytes; printable bytes are their own characters."""
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    alphabet = {chr(byte): byte for byte in _PRINTABLE}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """Converts the token strings of a byte-level vocabulary to bytes."""

    def __init__(self) -> None:
        alphabet = byte_alphabet()
        # Latin-1 then maps each character to its byte, and fails for characters outside.
        other_codes = {code: 0xFFFF for code in range(256) if chr(code) not in alphabet}
        self._table = other_codes | {ord(char): byte for char, byte in alphabet.items()}

    def strict(self, token: str) -> bytes | None:
        """The bytes, or None if a character is outside the byte alphabet."""
        try:
            return token.translate(self._table).encode("latin-1")
        except UnicodeEncodeError:
            return None

    def loose(self, token: str) -> bytes:
        """The bytes; a token with a character outside the alphabet is its own text, as in Hugging
        Face's decoder."""
        found = self.strict(token)
        return token.encode() if found is None else found


def merge_table(model: Section, vocab: Mapping[str, int], added: Iterable[str]) -> MergeTable:
    """The ranks with which tiktoken gives the ids of this BPE `model`.

    Tokens of `vocab` that no merge produces are left out, unless the model looks up whole pieces
    first (`ignore_merges`), as tiktoken always does. Raises `NotRepresentable` if no ranks do.
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
            raise NotRepresentable(f"tiktoken would merge {token!r} from {pair}, not in the list")
    whole: list[str] = []
    if looks_up:
        known = {*splits, *added, *alphabet}
        whole = [t for t in vocab if t not in known and _is_only_looked_up(t, places, alphabet)]
    return _ranked([*alphabet], reached, whole, vocab)


def last_pair(token: str, places: Mapping[str, int]) -> tuple[str, str] | None:
    """The two parts of `token` before the last merge, when its characters are merged by rank.

    None if merging stops earlier. The lowest rank is merged first, the leftmost among equals.
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
    """The pairs that produce each token; tokens are in the order of their merges."""
    splits: dict[str, list[tuple[str, str]]] = {}
    newest = ""
    for merge in merges:
        left, _, right = (
            merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
        )
        token = left + right
        if token in splits and token != newest:
            raise NotRepresentable(f"the merges into {token!r} are not adjacent in the list")
        splits.setdefault(token, []).append((left, right))
        newest = token
    return splits


def _is_only_looked_up(token: str, places: Mapping[str, int], alphabet: Mapping[str, int]) -> bool:
    """Whether `token` can only result from looking up a whole piece."""
    if any(char not in alphabet for char in token):
        return False
    if last_pair(token, places) is not None:
        raise NotRepresentable(f"{token!r} has no merge but tiktoken would merge it")
    return True


def _ranked(
    single: list[str], reached: list[str], whole: list[str], vocab: Mapping[str, int]
) -> MergeTable:
    tokens = [*single, *reached, *whole]
    if missing := [token for token in tokens if token not in vocab]:
        raise NotRepresentable(f"merges into {missing[:3]}, which are not in the vocabulary")
    read = TokenBytes()
    as_bytes = [found for token in tokens if (found := read.strict(token)) is not None]
    if len(as_bytes) < len(tokens):
        raise NotRepresentable("a merge has a character outside the byte alphabet")
    ids = [vocab[token] for token in tokens]
    merged = ids[len(single) : len(single) + len(reached)]
    if all(a < b for a, b in pairwise(merged)):
        return MergeTable(dict(zip(as_bytes, ids, strict=True)), None)
    return MergeTable({token: rank for rank, token in enumerate(as_bytes)}, ids)
