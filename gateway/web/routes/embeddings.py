"""`POST /v1/embeddings`: refused, for a reason.

Every family that is served here was trained to say what comes next. Its hidden states, pooled in
whatever way, were never made to be compared; numbers that look like embeddings and are none
would be found out late, in somebody's search results.
"""

from typing import TYPE_CHECKING, NoReturn

from gateway.access.callers import read_body
from gateway.errors import NotOfThisModel
from gateway.schema.openai.embeddings import decode_embedding
from gateway.service import service_of
from gateway.web.routes.models import check_model

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def create_embeddings(http: "HttpRequest") -> NoReturn:
    """Raises `InvalidRequest` for what is wrong, and `NotOfThisModel` for what is right."""
    service = service_of(http)
    request = decode_embedding(await read_body(http, service.limits))
    check_model(request.model, service)
    raise NotOfThisModel(
        f"The model {request.model!r} writes text and was not trained to embed it: its hidden "
        "states are no embeddings. Send 'input' to a model that was.",
        "model",
    )
