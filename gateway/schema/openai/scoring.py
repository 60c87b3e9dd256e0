"""`/score` and `/rerank`: the requests, in vLLM's and in Jina's and Cohere's form."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_minimum, invalid, missing
from gateway.schema.openai.embeddings import MAX_INPUTS, PoolingRequest


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
