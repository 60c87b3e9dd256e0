"""The requests of `/v1/embeddings`, whose inputs have one of four forms, and of `/score` and
`/rerank`, in vLLM's and in Jina's and Cohere's form."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, check_minimum, invalid, missing
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


class TextPair(NamedTuple):
    """Two texts whose relevance to each other is scored; errors name the field of the second."""

    query: str
    document: str
    field: str


class ScoreRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """One text against one or several others, or pairs of equally many texts.

    The texts are `text_1` and `text_2`, or `queries` and `documents`.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first invalid value."""
        self.check_pooling()
        first, second = self._names
        for name, other in (("queries", "text_1"), ("documents", "text_2")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise InvalidRequest(f"Send either '{other}' or '{name}', not both.", name)
        for name in (first, second):
            texts = getattr(self, name)
            if texts is None:
                raise missing(name)
            _check_texts([texts] if isinstance(texts, str) else texts, name)
        num_first, num_second = len(self._texts(first)), len(self._texts(second))
        if num_first not in (1, num_second):
            raise InvalidRequest(
                f"'{first}' has {num_first} texts and '{second}' has {num_second}: expected one "
                f"text in '{first}', or equally many.",
                first,
            )

    @property
    def _names(self) -> tuple[str, str]:
        uses_queries = self.queries is not None or self.documents is not None
        return ("queries", "documents") if uses_queries else ("text_1", "text_2")

    def _texts(self, name: str) -> list[str]:
        texts: str | list[str] = getattr(self, name)
        return [texts] if isinstance(texts, str) else texts

    @property
    def pairs(self) -> list[TextPair]:
        """The pairs in order."""
        first, second = self._names
        queries, documents = self._texts(first), self._texts(second)
        if len(queries) == 1:
            queries *= len(documents)
        fields = (
            [second] if len(documents) == 1 else [f"{second}[{i}]" for i in range(len(queries))]
        )
        return [TextPair(*row) for row in zip(queries, documents, fields, strict=True)]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """`documents` in the order of their relevance to `query`; the best `top_n` of them."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for the first invalid value."""
        self.check_pooling()
        check_minimum(self.top_n, "top_n", 1)
        _check_texts([self.query], "query")
        _check_texts(self.texts, "documents")

    @property
    def texts(self) -> list[str]:
        """The text of each document."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def pairs(self) -> list[TextPair]:
        """The query with each document."""
        return [TextPair(self.query, text, f"documents[{i}]") for i, text in enumerate(self.texts)]


def _check_texts(texts: Sequence[str], name: str) -> None:
    if not texts:
        raise invalid(name, "expected at least one text.")
    if len(texts) > MAX_INPUTS:
        raise invalid(name, f"at most {MAX_INPUTS} texts.")
    if not all(texts):
        raise invalid(name, "an empty text is not allowed.")
