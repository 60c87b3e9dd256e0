"""Fill-in-the-middle prompts: text before and after a gap, between the tokens that a model was
trained with.

    <prefix> text before <suffix> text after <middle>

A model can fill gaps if each of the marks of one row in `MARKS` is a single token of its
vocabulary; other models refuse the request's field by name.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from engine.errors import InvalidRequest
from gateway.generation.prompt import Prompt, TokenizedPrompts, fits_on_loop, token_ids
from gateway.generation.threads import run_in_thread
from gateway.ports import Tokenizer

FIELD = "suffix"


class Marks(NamedTuple):
    """The texts of a model's tokens: before the text before the gap, before the text behind it,
    and before the output, which one of `ends` ends. `repository` and `file` go before other files.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    repository: str = ""
    file: str = ""


MARKS = (
    Marks(  # Qwen-Coder, CodeGemma
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    Marks(  # StarCoder, Granite Code
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
        "<repo_name>",
        "<file_sep>",
    ),
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


class OtherFile(NamedTuple):
    """A file beside the one with the gap."""

    name: str
    text: str


class Gap(NamedTuple):
    """What is known around a gap: the text behind it, and other files. `field` is the request's
    field with the text, which errors name."""

    after: str
    files: Sequence[OtherFile] = ()
    field: str = FIELD


class Infill(NamedTuple):
    """How a model fills gaps."""

    marks: Marks
    prefix: int
    suffix: int
    middle: int
    end_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infill | None":
        """None if the model cannot."""
        for marks in MARKS:
            ids = [_id_of(tokenizer, mark) for mark in marks[:3]]
            match [each for each in ids if each is not None]:
                case [prefix, suffix, middle]:
                    ends = (_id_of(tokenizer, end) for end in marks.ends)
                    end_ids = frozenset(each for each in ends if each is not None)
                    return cls(marks, prefix, suffix, middle, end_ids)
        return None

    def context(self, files: Sequence[OtherFile]) -> str:
        """The text of other files, with the marks between files if the model has them."""
        if not files:
            return ""
        marks = self.marks
        parts = [f"{marks.file}{file.name}\n{file.text}\n" for file in files]
        if marks.file:
            parts = [f"{marks.repository}repository\n", *parts, f"{marks.file}file\n"]
        return "".join(parts)

    async def tokenize(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[str | Sequence[int]],
        gap: Gap,
        most: int | None = None,
    ) -> TokenizedPrompts:
        """The ids of each prompt, which is the text before the gap.

        Raises as `token_ids` does.
        """
        texts = [gap.after, *(prompt for prompt in prompts if isinstance(prompt, str))]
        texts += [file.text for file in gap.files]

        def tokenize() -> list[Prompt]:
            encode = partial(token_ids, tokenizer, add_special_tokens=False, most=most)
            begin = tokenizer.encode("", add_special_tokens=True)
            context = encode(self.context(gap.files), "input_extra")
            behind = encode(gap.after, gap.field)
            return [
                (
                    *(*begin, *context, self.prefix),
                    *(encode(prompt, "prompt") if isinstance(prompt, str) else prompt),
                    *(self.suffix, *behind, self.middle),
                )
                for prompt in prompts
            ]

        on_loop = fits_on_loop(texts, len(texts))
        return TokenizedPrompts(tokenize() if on_loop else await run_in_thread(tokenize))


def infill_of(tokenizer: Tokenizer, model: str, field: str = FIELD) -> Infill:
    """How the model fills gaps. Raises `InvalidRequest` if it cannot."""
    infill = Infill.of(tokenizer)
    if infill is None:
        raise InvalidRequest(
            f"'{field}' is not supported by the model {model!r}: its vocabulary has no "
            "fill-in-the-middle tokens.",
            field,
        )
    return infill


def _id_of(tokenizer: Tokenizer, mark: str) -> int | None:
    """The id of a text that is one token; None for another text."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
