"""Any `tokenizer.json` through Hugging Face `tokenizers`: the reference for ids."""

from typing import TYPE_CHECKING

import tokenizers

from adapters.tokenizers.decoding import decoder_factory
from adapters.tokenizers.definition import TokenizerDefinition
from engine.errors import RefusedToStart

if TYPE_CHECKING:
    from gateway.ports import TokenDecoder

# `encode` holds the interpreter's lock throughout; the batch call releases it but costs a little.
_SHORT_CHARS = 2_048


class HuggingFaceTokenizer:
    """The `Tokenizer` port over one `tokenizers.Tokenizer`; safe to call from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, definition: TokenizerDefinition) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._decoders = decoder_factory(definition)
        self.vocab_size = definition.vocab_size
        self.special_ids = definition.special_ids
        self.special_tokens = definition.special_tokens

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Raises `UnicodeEncodeError` for lone surrogates."""
        if not text.isascii():
            text.encode()  # the library's own complaint is a TypeError that does not say why
        if len(text) <= _SHORT_CHARS:
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids
        batch = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decoder(self) -> "TokenDecoder":
        return self._decoders()


def open_tokenizer(definition: TokenizerDefinition) -> HuggingFaceTokenizer:
    """Load the file again in the library. Raises `RefusedToStart` if it does not accept it."""
    try:
        library = tokenizers.Tokenizer.from_file(str(definition.path))
    except Exception as error:  # the library raises nothing more precise
        raise RefusedToStart(f"{definition.path} is not accepted: {error}") from error
    return HuggingFaceTokenizer(library, definition)
