"""From an embedding request to its plan, and from vectors to OpenAI's response."""

import base64
from functools import partial

import orjson

from engine.errors import InvalidRequest
from engine.pooling import PoolingReport
from gateway.access.callers import Caller
from gateway.pooling.plan import PooledInputs, PoolingPlan
from gateway.schema.decoding import decode_checked
from gateway.schema.openai.pooling import EmbeddingRequest
from gateway.service import Service


def plan_embeddings(body: bytes, caller: Caller, service: Service) -> PoolingPlan:
    """The plan of a request body; raises `InvalidRequest`, or `UnsupportedByModel` if the model
    makes no embeddings."""
    request = decode_checked(EmbeddingRequest, body, caller.unknown_fields)
    report = service.check_embeds(request.model)
    _check_dimensions(request.dimensions, report)
    return PoolingPlan(
        caller=caller,
        inputs=request.inputs(service.model.vocabulary),
        render=partial(render_embeddings, request),
        input_field="input",
        scheduling=request.scheduling_params,
        dimensions=request.dimensions,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        lora=service.lora_of(request.model),
    )


def _check_dimensions(dimensions: int | None, report: PoolingReport) -> None:
    """Embeddings may be cut only if the model was trained for it (Matryoshka representations)."""
    if dimensions is None or dimensions == report.size:
        return
    allowed = report.dimensions
    if allowed is None:
        raise InvalidRequest(
            f"'dimensions' is not supported by this model except {report.size}: it was not "
            "trained to be truncated (Matryoshka representations).",
            "dimensions",
        )
    if dimensions > report.size or (allowed and dimensions not in allowed):
        values = ", ".join(map(str, allowed)) if allowed else f"1 to {report.size}"
        raise InvalidRequest(
            f"Invalid value for 'dimensions': expected one of {values}, but got {dimensions}."
            if allowed
            else f"Invalid value for 'dimensions': expected {values}, but got {dimensions}.",
            "dimensions",
        )


def render_embeddings(request: EmbeddingRequest, pooled: PooledInputs) -> bytes:
    """OpenAI's response body. base64 is of little-endian float32."""
    import numpy as np  # only servers of models that pool have imported it

    is_base64 = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector).decode()
            if is_base64
            else np.frombuffer(vector, dtype="<f4"),
        }
        for index, vector in enumerate(pooled.vectors)
    ]
    body = {"object": "list", "data": data, "model": request.model, "usage": pooled.usage}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
