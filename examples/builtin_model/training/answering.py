"""Two ways to get greedy answers: a checkpoint in `transformers`, and a server over HTTP."""

from pathlib import Path
from typing import Any, Protocol, cast

import httpx

from examples.builtin_model.corpus.example import Example
from examples.builtin_model.training.chat_template import prompt, said

ROWS = 32


class Answerer(Protocol):
    def answer(self, examples: list[Example], max_tokens: int) -> list[str]:
        """One reply per example, tool calls in the model's own format."""


class LocalModel:
    """Left-padded batches of similar length; also checks that template and training text agree."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def _prompt(self, example: Example) -> str:
        before = example.messages[:-1]
        text = self.tokenizer.apply_chat_template(
            before, tools=example.tools or None, tokenize=False, add_generation_prompt=True
        )
        assert text == prompt(before, example.tools), "chat template and training text differ"
        return cast(str, text)

    def answer(self, examples: list[Example], max_tokens: int) -> list[str]:
        prompts = [self._prompt(example) for example in examples]
        order = sorted(
            range(len(prompts)),
            key=lambda i: (len(said(examples[i].messages[-1])), len(prompts[i])),
        )
        replies = [""] * len(prompts)
        for at in range(0, len(order), ROWS):
            rows = order[at : at + ROWS]
            inputs = self.tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True)
            ids = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            for i, row in zip(rows, ids[:, inputs["input_ids"].shape[1] :], strict=True):
                text = self.tokenizer.decode(row, skip_special_tokens=False)
                replies[i] = text.split("<|im_end|>")[0].replace("<|endoftext|>", "")
        return replies


class Server:
    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=120)

    def answer(self, examples: list[Example], max_tokens: int) -> list[str]:
        model = self.client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        return [self._ask(model, example, max_tokens) for example in examples]

    def _ask(self, model: str, example: Example, max_tokens: int) -> str:
        body: dict[str, Any] = {
            "model": model,
            "messages": example.messages[:-1],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if example.tools:
            body["tools"] = example.tools
        reply = self.client.post("/v1/chat/completions", json=body)
        if reply.is_client_error:  # a refusal is a wrong answer, not the end of the examination
            return f"[{reply.status_code}] {reply.text}"
        return said(reply.raise_for_status().json()["choices"][0]["message"])
