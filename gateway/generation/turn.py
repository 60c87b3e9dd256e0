"""Turn: one response of a conversation that its connection keeps."""

from dataclasses import replace
from typing import Any

from engine.request import RequestSpec
from gateway.generation.choice_stream import ChoiceStream
from gateway.generation.continuation import Continuation
from gateway.generation.held import HeldConversations, HeldPrompt, HeldResponse, held_response
from gateway.generation.known_text import KnownBlocks, KnownText, known_text
from gateway.generation.prompt import TokenizedPrompts
from gateway.groups.group import ServedModel
from gateway.ports import Tokenizer
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.responses.renderer import ResponsesRenderer
from gateway.schema.responses.window import Window, window_of

Item = dict[str, Any]

STEERED = "steered"  # the finish reason of an answer that further input has ended


class Turn:
    """What a response knows of the text before it, and what the next one may know of it."""

    def __init__(self, conversations: HeldConversations, *, generates: bool = True) -> None:
        """Without `generates` the prompt is computed, and nothing is generated."""
        self.generates = generates
        self._conversations = conversations
        self._earlier: HeldResponse | None = None  # the response that it continues
        self._tokenized: TokenizedPrompts | None = None
        self.renderer: ResponsesRenderer | None = None  # once its request is accepted
        self._choice: ChoiceStream | None = None
        self._is_steered = False
        self._block_size = 0  # the block size of the engine that has its request
        self.settings = b""  # a digest of what its prompt is rendered from beside items
        self.continuation: Continuation | None = None  # if its request has a window of its items

    def begin(self, tokenized: TokenizedPrompts, choice: ChoiceStream, block_size: int) -> None:
        """The engine, whose blocks have so many tokens, has its request."""
        self._tokenized, self._choice, self._block_size = tokenized, choice, block_size
        if self._is_steered:
            choice.end_early(STEERED)

    def steer(self) -> None:
        """End the answer after the tokens that have arrived, unless it calls a tool."""
        self._is_steered = True
        if self._choice is not None:
            self._choice.end_early(STEERED)

    def continues(self, response_id: str) -> list[Item] | None:
        """The items before this turn, if its connection holds the response that it continues."""
        self._earlier = self._conversations.find(response_id)
        return None if self._earlier is None else self._earlier.items

    def known_to(self, model: ServedModel) -> KnownText | None:
        """The text before this turn, if its ids are those of this model."""
        earlier = self._earlier
        return earlier.known if earlier is not None and earlier.model == model.name else None

    def with_known_hashes(
        self, spec: RequestSpec, tokenized: TokenizedPrompts, block_size: int
    ) -> RequestSpec:
        """The spec with the digests that the response before it has computed, as far as they are
        those of this prompt, salt and adapter."""
        known = None if self._earlier is None else self._earlier.known
        blocks = None if known is None else known.blocks
        is_whole = len(spec.prompt) == len(tokenized.prompts[0])  # otherwise its beginning is cut
        if blocks is None or not is_whole or blocks.size != block_size:
            return spec
        if (blocks.salt, blocks.lora_digest) != (spec.salt, spec.lora_digest):
            return spec
        num_blocks = tokenized.num_kept // block_size
        known_hashes = tuple(blocks.hashes[:num_blocks])
        return replace(spec, caching=spec.caching._replace(known_hashes=known_hashes))

    def prompt_before(self, model: ServedModel) -> HeldPrompt | None:
        """The prompt that this turn's may begin with."""
        earlier = self._earlier if self.known_to(model) is not None else None
        return None if earlier is None else earlier.prompt

    def window(self, new: list[Item], model: ServedModel) -> Window | None:
        """The part of the conversation that shows what these new items add to the prompt."""
        prompt = self.prompt_before(model)
        if prompt is None or self._earlier is None:
            return None
        return window_of(self._earlier.items, prompt.num_items, new)

    def may_follow(self, request: ChatRequest, model: ServedModel) -> bool:
        """Whether the prompt before was rendered with the same settings, and has no images."""
        prompt = self.prompt_before(model)
        is_same = prompt is not None and prompt.settings == self.settings
        return is_same and not request.images

    def follow(self, earlier: ChatRequest, model: ServedModel) -> None:
        """Render only a window of the conversation, which had these messages before the turn."""
        known, prompt = self.known_to(model), self.prompt_before(model)
        assert known is not None, "the prompt is that of this text"
        assert prompt is not None, "the window is that of this prompt"
        self.continuation = Continuation(
            known, prompt.num_chars, prompt.num_ids, prompt.marks, earlier
        )

    def hold(self, response_id: str, held: HeldResponse) -> None:
        """Hold the response, so that the next turn can continue it."""
        self._conversations.put(response_id, held)

    def to_hold(self, items: list[Item], output: list[Item], model: ServedModel) -> HeldResponse:
        """What the next turn knows of this one: the items of its prompt and its output."""
        known, tokenized, prompt = self._known_text(model.tokenizer), self._tokenized, None
        if known is not None and tokenized is not None and self.settings:
            num_chars, num_ids = len(tokenized.text), len(tokenized.prompts[0])
            prompt = HeldPrompt(len(items), num_chars, num_ids, tokenized.marks, self.settings)
        return held_response([*items, *output], known, model.name, prompt)

    def _known_text(self, tokenizer: Tokenizer) -> KnownText | None:
        """The text of its prompt and its output, as far as it has begun."""
        tokenized, choice = self._tokenized, self._choice
        if tokenized is None or choice is None or not tokenized.text:
            return None
        request = choice.request
        hashes, spec = tuple(request.block_hashes), request.spec
        blocks = KnownBlocks(hashes, self._block_size, spec.salt, spec.lora_digest)
        prompt = tokenized.prompts[0]
        return known_text(tokenized.text, prompt, request.output, tokenizer, blocks)
