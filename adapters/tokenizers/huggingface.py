"""Tokenizers that run in Hugging Face `tokenizers`, the reference for ids."""

from pathlib import Path

import tokenizers

from adapters.tokenizers.decoding import DecodesTokens
from adapters.tokenizers.definition import TokenizerDefinition
from adapters.tokenizers.kept import keep
from adapters.tokenizers.pre_tokens import SHORT_CHARS
from engine.errors import StartupError


class HuggingFaceTokenizer(DecodesTokens):
    """The `Tokenizer` port over one `tokenizers.Tokenizer`; safe to call from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, definition: TokenizerDefinition) -> None:
        super().__init__(definition)
        library.no_truncation()
        library.no_padding()
        self._library = library

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Raises `UnicodeEncodeError` for lone surrogates."""
        if not text.isascii():
            text.encode()  # the library would raise a TypeError without a reason
        if len(text) <= SHORT_CHARS:
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids
        batch = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Ids of two texts, and how many of them have type 0. Raises `UnicodeEncodeError`."""
        first.encode(), second.encode()
        found = self._library.encode(first, second)
        types: list[int] = found.type_ids
        return found.ids, types.index(1) if 1 in types else len(types)


def open_tokenizer(
    definition: TokenizerDefinition, cache: Path | None = None
) -> HuggingFaceTokenizer:
    """Load the document, which is kept in `cache`, in the library. Raises `StartupError` if the
    library rejects it."""
    try:
        library = tokenizers.Tokenizer.from_buffer(definition.text)
    except Exception as error:  # the library raises nothing more precise
        raise StartupError(f"{definition.path} cannot be loaded: {error}") from error
    if cache is not None:
        keep(definition, None, cache)
    return HuggingFaceTokenizer(library, definition)
