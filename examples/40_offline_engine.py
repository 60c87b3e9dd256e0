"""The engine without a server: all prompts share its iterations.

    python examples/40_offline_engine.py [PROMPT ...]

`Podway` takes the settings of `podway serve`; `chat` and `generate` take the fields of the API.
"""

import sys

from podway import Podway

PROMPTS = ("Hello!", "What is 2 + 3?", "What is Podway?", "Tell me a story.")


def main() -> None:
    prompts = sys.argv[1:] or PROMPTS
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with Podway("builtin") as model:
        answers = model.chat(conversations, temperature=0, max_tokens=80, logprobs=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs is not None  # requested above
        scores = [token["logprob"] for token in answer.logprobs["content"]]
        mean = sum(scores) / max(1, len(scores))
        print(f"> {prompt}\n{answer.text}\n({len(scores)} tokens, mean logprob {mean:.2f})\n")


if __name__ == "__main__":
    main()
