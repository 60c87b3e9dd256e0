"""`truncation: auto`: a prompt without its oldest items, as few of them as needed."""

from collections.abc import Callable, Sequence
from functools import partial

from engine.errors import ContextTooLong
from gateway.generation.plan import GenerationPlan, plan_chat
from gateway.generation.prompt import TokenizedPrompts
from gateway.generation.threads import MAX_BYTES_ON_LOOP, in_thread_if
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.responses.items import Item
from gateway.service import Service

MAX_ITEMS_ON_LOOP = 64


def is_long_conversation(items: Sequence[Item], body: bytes) -> bool:
    """Whether a conversation is converted in a thread. Items of earlier responses count too."""
    return len(items) > MAX_ITEMS_ON_LOOP or len(body) > MAX_BYTES_ON_LOOP


async def tokenize_truncated(
    as_chat: Callable[[list[Item]], ChatRequest],
    items: list[Item],
    fields: Sequence[str],
    plan: GenerationPlan,
    service: Service,
) -> TokenizedPrompts:
    """The prompt without the oldest items, as few of them as needed (binary search)."""
    is_long = is_long_conversation(items, b"")
    starts = await in_thread_if(is_long, partial(_starts, items))

    def plan_from(start: int) -> GenerationPlan:
        chat = as_chat(_suffix(items, start))
        return plan_chat(chat, plan.renderer, plan.caller, service, image_fields=fields)

    async def tokenize(number: int) -> TokenizedPrompts:
        make = partial(plan_from, starts[number])
        cut = await in_thread_if(is_long, make)
        return await cut.tokenize()

    def fits(tokenized: TokenizedPrompts) -> bool:
        return _fits(plan.limits.max_tokens, len(tokenized.prompts[0]), service)

    best = whole = await plan.tokenize()
    low, high = (len(starts), 0) if fits(best) else (1, len(starts) - 1)
    while low <= high:
        middle = (low + high) // 2
        tokenized = await tokenize(middle)
        if fits(tokenized):
            best, high = tokenized, middle - 1
        else:
            low = middle + 1
    if plan.turn is not None and best is not whole:
        plan.turn.settings = b""  # the next prompt does not begin with this one
    return best  # if nothing fits, `request_specs` rejects its length


def _starts(items: Sequence[Item]) -> list[int]:
    """Where a shortened conversation may begin: at its first item, and at each user's message."""
    return [0, *(at for at, item in enumerate(items) if at and item.get("role") == "user")]


def _suffix(items: Sequence[Item], start: int) -> list[Item]:
    """The items from a user's message on, after all system items before it."""
    system = [item for item in items[:start] if item.get("role") in ("system", "developer")]
    return [*system, *items[start:]]


def _fits(max_tokens: int | None, prompt_len: int, service: Service) -> bool:
    try:
        service.engine.check_fits(prompt_len, max_tokens or 1)
    except ContextTooLong:
        return False
    return True
