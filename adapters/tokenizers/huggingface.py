"""Tokenizers that run in Hugging Face `tokenizers`, the reference for ids."""

from typing import TYPE_CHECKING

import tokenizers

from adapters.tokenizers.decoding import decoders_of
from adapters.tokenizers.definition import TokenizerDefinition
from engine.errors import StartupError

if TYPE_CHECKING:
    from gateway.ports import TokenDecoder

# `encode` holds the GIL; the batch call releases it but has a small overhead.
_SHORT_CHARS = 2_048


class HuggingFaceTokenizer:
    """The `Tokenizer` port over one `tokenizers.Tokenizer`; safe to call from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, definition: TokenizerDefinition) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._decoders = decoders_of(definition)
        self.vocab_size = definition.vocab_size
        self.special_ids = definition.special_ids
        self.special_tokens = definition.special_tokens
        self._control_texts = {i: text.encode() for text, i in self.special_tokens.items()}

    @property
    def table(self) -> list[bytes]:
        """The bytes of each id within a text."""
        return self._decoders.table

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Raises `UnicodeEncodeError` for lone surrogates."""
        if not text.isascii():
            text.encode()  # the library would raise a TypeError without a reason
        if len(text) <= _SHORT_CHARS:
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids
        batch = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Ids of two texts, and how many of them have type 0. Raises `UnicodeEncodeError`."""
        first.encode(), second.encode()
        found = self._library.encode(first, second)
        types: list[int] = found.type_ids
        return found.ids, types.index(1) if 1 in types else len(types)

    def decoder(self) -> "TokenDecoder":
        return self._decoders.make()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id within a text; the name of a control token; b"" for an unknown id."""
        control = self._control_texts.get(token_id)
        if control is not None:
            return control
        table = self._decoders.table
        return table[token_id] if token_id < len(table) else b""


def open_tokenizer(definition: TokenizerDefinition) -> HuggingFaceTokenizer:
    """Load the document in the library. Raises `StartupError` if the library rejects it."""
    try:
        library = tokenizers.Tokenizer.from_buffer(definition.text)
    except Exception as error:  # the library raises nothing more precise
        raise StartupError(f"{definition.path} cannot be loaded: {error}") from error
    return HuggingFaceTokenizer(library, definition)
