"""llama.cpp's `POST /infill`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.generation.infill import Gap, OtherFile
from gateway.generation.plan import GenerationPlan, LengthLimits
from gateway.schema.decoding import decode
from gateway.schema.openai.infill import InfillRenderer, InfillRequest
from gateway.web.routes.completions import filling, planned

if TYPE_CHECKING:
    from gateway.access.callers import Caller
    from gateway.service import Service


def plan_infill(body: bytes, caller: "Caller", service: "Service") -> GenerationPlan:
    """The plan of a request body; raises `InvalidRequest` for what cannot be served."""
    request = decode(InfillRequest, body, caller.unknown_fields)
    completion = request.as_completion(service.model.name)
    service.check_generates(completion.model)
    renderer = InfillRenderer(completion.model)
    plan = planned(completion, renderer, caller, service)
    files = [OtherFile(each.filename, each.text) for each in request.input_extra]
    gap = Gap(request.input_suffix, files, "input_suffix")
    return replace(
        filling(plan, completion, gap, service),
        limits=LengthLimits(completion.max_tokens),
        prompt_field="input_prefix",
    )
