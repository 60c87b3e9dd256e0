"""What every endpoint that generates text ends with: the response of a plan."""

from typing import TYPE_CHECKING

from gateway.generation.event_stream import EventStream
from gateway.generation.reply import Reply
from gateway.schema.openai.logprobs import LogprobsFormatter

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gateway.generation.plan import GenerationPlan
    from gateway.schema.fields.generation import GenerationRequest
    from gateway.service import Service


def respond(plan: "GenerationPlan", service: "Service") -> "ASGIApp":
    """An event stream or a JSON body, as the request chose."""
    return EventStream(plan, service) if plan.is_stream else Reply(plan, service)


def logprobs_formatter(
    request: "GenerationRequest", service: "Service"
) -> LogprobsFormatter | None:
    """The formatter of per-token reports; None if the request asks for none."""
    report = request.report_options
    if not report.has_tokens and report.prompt_logprobs is None:
        return None
    return LogprobsFormatter(service.model.tokenizer.token_bytes, report.logprobs, report.token_ids)
