"""Pre-tokens as Hugging Face's library makes them, without the vocabulary.

The library makes the added tokens, the normalized text and its pre-tokens of any tokenizer.json;
the model has only to merge the bytes within each pre-token. So it gets a model of 256 tokens here,
the bytes. The whole file in the library takes 42 MiB for 152,000 tokens, and holds the
interpreter's lock for 0.3 s while it is loaded.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

import orjson
import tokenizers

from adapters.tokenizers.byte_level import byte_alphabet
from adapters.tokenizers.definition import TokenizerDefinition
from engine.errors import StartupError

# `encode` holds the interpreter's lock; the call for batches releases it but has a small overhead.
SHORT_CHARS = 2_048
_BYTES = range(256)  # ids here
_NEVER_IN_CONTEXT = {"lstrip": False, "rstrip": False, "single_word": False}


class PreTokenEncoder:
    """Encodes texts by pre-tokens; `encode` gives the ids of one pre-token's bytes.

    Raises `StartupError` if the library rejects the file.
    """

    def __init__(
        self, definition: TokenizerDefinition, encode: Callable[[bytes], list[int]]
    ) -> None:
        try:
            self._library = tokenizers.Tokenizer.from_buffer(_document(definition))
        except Exception as error:  # the library raises nothing more precise
            raise StartupError(f"{definition.path} cannot be loaded: {error}") from error
        ids = {self._library.token_to_id(each.content): each.id for each in definition.added}
        self._added = {here: there for here, there in ids.items() if here not in _BYTES}
        self._encode = encode

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it. Raises `UnicodeEncodeError`."""
        if not text.isascii():
            text.encode()  # the library would raise a TypeError without a reason
        if len(text) <= SHORT_CHARS:
            found = self._library.encode(text, add_special_tokens=False)
        else:
            found = self._library.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = []
        for word, group in groupby(zip(found.word_ids, found.ids, strict=True), key=itemgetter(0)):
            own = [token_id for _, token_id in group]
            ids += own if word is None else self._ids_of_pre_token(own)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """The ids of two texts with the special tokens that the file puts around them, and how many
        of the ids have type 0. Raises `UnicodeEncodeError`."""
        first.encode(), second.encode()
        found = self._library.encode(first, second)
        ids: list[int] = []
        num_first: int | None = None
        pre_tokens = zip(found.type_ids, found.sequence_ids, found.word_ids, strict=True)
        for key, group in groupby(zip(pre_tokens, found.ids, strict=True), key=itemgetter(0)):
            type_id, _, word = key
            if type_id == 1 and num_first is None:
                num_first = len(ids)
            own = [token_id for _, token_id in group]
            ids += own if word is None else self._ids_of_pre_token(own)
        return ids, len(ids) if num_first is None else num_first

    def _ids_of_pre_token(self, found: Sequence[int]) -> list[int]:
        """The ids of an added token, or of a pre-token whose bytes these are."""
        added = self._added.get(found[0])
        return self._encode(bytes(found)) if added is None else [added]


def _document(definition: TokenizerDefinition) -> bytes:
    """The tokenizer.json with 256 tokens, whose ids are the bytes they stand for."""
    added = [
        {
            "id": len(_BYTES) + place,
            "content": token.content,
            "special": token.is_special,
            "normalized": token.is_normalized,
            **_NEVER_IN_CONTEXT,
        }
        for place, token in enumerate(definition.added)
    ]
    return orjson.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": definition.normalizer,
            "pre_tokenizer": definition.pre_tokenizer,
            "post_processor": definition.post_processor,
            "model": {"type": "BPE", "vocab": byte_alphabet(), "merges": []},
        }
    )
