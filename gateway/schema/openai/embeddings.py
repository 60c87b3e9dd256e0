"""`POST /v1/embeddings`: the request."""

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, check_minimum, decode

MAX_INPUTS = 2048
FORMATS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`input` is one or several texts, or their token ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first invalid value."""
        if not len(self.input) > 0:
            raise InvalidRequest("Invalid 'input': expected at least one text.", "input")
        if isinstance(self.input, list) and not isinstance(self.input[0], int):
            if len(self.input) > MAX_INPUTS:
                raise InvalidRequest(f"Invalid 'input': at most {MAX_INPUTS} texts.", "input")
            if not all(self.input):
                raise InvalidRequest("Invalid 'input': an empty text is not allowed.", "input")
        if self.encoding_format is not None:
            check_allowed(self.encoding_format, "encoding_format", FORMATS)
        check_minimum(self.dimensions, "dimensions", 1)


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


def decode_embedding(body: bytes) -> EmbeddingRequest:
    """Decode and check the request. Raises `InvalidRequest`."""
    request = decode(_DECODER, body)
    request.check()
    return request
