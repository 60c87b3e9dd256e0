"""`POST /v1/embeddings`: rejected with an error that says why.

All supported models are trained for next-token prediction only. Pooled hidden states of such a
model are poor embeddings, and a client would notice only in its search results.
"""

from typing import TYPE_CHECKING, NoReturn

from gateway.access.callers import read_body
from gateway.errors import UnsupportedByModel
from gateway.schema.openai.embeddings import decode_embedding
from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def create_embeddings(http: "HttpRequest") -> NoReturn:
    """Raises `InvalidRequest` for an invalid request and `UnsupportedByModel` for a valid one."""
    service = service_of(http)
    request = decode_embedding(await read_body(http, service.limits))
    service.check_model(request.model)
    raise UnsupportedByModel(
        f"The model {request.model!r} generates text and was not trained to make embeddings. "
        "Use an embedding model for 'input'.",
        "model",
    )
