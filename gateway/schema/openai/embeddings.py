"""`POST /v1/embeddings`: the request, as OpenAI describes it."""

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_least, check_word, decode

MAX_INPUTS = 2048
FORMATS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts, or the ids of texts."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first thing that is wrong."""
        if not len(self.input) > 0:
            raise InvalidRequest("Invalid 'input': expected at least one text.", "input")
        if isinstance(self.input, list) and not isinstance(self.input[0], int):
            if len(self.input) > MAX_INPUTS:
                raise InvalidRequest(f"Invalid 'input': at most {MAX_INPUTS} texts.", "input")
            if not all(self.input):
                raise InvalidRequest("Invalid 'input': a text must not be empty.", "input")
        if self.encoding_format is not None:
            check_word(self.encoding_format, "encoding_format", FORMATS)
        check_least(self.dimensions, "dimensions", 1)


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


def decode_embedding(body: bytes) -> EmbeddingRequest:
    """A checked request, or `InvalidRequest`."""
    request = decode(_DECODER, body)
    request.check()
    return request
