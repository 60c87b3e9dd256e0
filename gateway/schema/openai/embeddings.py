"""`POST /v1/embeddings`: the request; an input has one of four forms."""

from gateway.schema.decoding import check_allowed, check_minimum, invalid
from gateway.schema.fields.sampling import SchedulingRequest, Vocabulary, texts_or_ids

MAX_INPUTS = 2048
FORMATS = ("float", "base64")


class PoolingRequest(SchedulingRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields of all endpoints that pool. `truncate_prompt_tokens` is vLLM's."""

    model: str
    user: str | None = None
    truncate_prompt_tokens: int | None = None

    def check_pooling(self) -> None:
        """Raise `InvalidRequest` for the first of these values that is invalid."""
        self.check_scheduling()
        keep = self.truncate_prompt_tokens
        if keep is not None and (keep == 0 or keep < -1):
            raise invalid(
                "truncate_prompt_tokens",
                "expected at least 1, or -1 for what the context has room for.",
            )


class EmbeddingRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """`input` is one or several texts, or their token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first invalid value."""
        self.check_pooling()
        if not len(self.input) > 0:
            raise invalid("input", "expected at least one text.")
        if isinstance(self.input, list) and not isinstance(self.input[0], int):
            if len(self.input) > MAX_INPUTS:
                raise invalid("input", f"at most {MAX_INPUTS} texts.")
            if not all(self.input):
                raise invalid("input", "an empty text is not allowed.")
        if self.encoding_format is not None:
            check_allowed(self.encoding_format, "encoding_format", FORMATS)
        check_minimum(self.dimensions, "dimensions", 1)

    def inputs(self, vocabulary: Vocabulary) -> list[str | tuple[int, ...]]:
        """The inputs in order, each a text or its token ids. Raises `InvalidRequest`."""
        return texts_or_ids(self.input, "input", vocabulary)
