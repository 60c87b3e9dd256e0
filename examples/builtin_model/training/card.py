"""The model card, written into the checkpoint directory."""

from examples.builtin_model.training.checkpoint import Trained

_CARD = """\
# The built-in model of Podway

A demonstration: a Llama-family chat model of {millions:.1f} million parameters, small enough to
ship inside the package, so that a fresh machine without a network has something to serve.

- **Licence.** The weights, the tokenizer and the generated text they were trained on are part of
  this project and are under its licence, Apache-2.0. No other text and no other model was used.
- **Made by** `examples/builtin_model/train.py`, which generates all text from a seed and trains
  from scratch on a CPU: {steps} steps, {tokens:.1f} million tokens, {minutes:.0f} minutes on one
  core.
- **Shape.** LlamaForCausalLM, 4 layers, hidden size 192, 6 heads of 32 with 2 KV heads, tied
  embeddings, bfloat16. Byte-level BPE of 2048 tokens, one token a digit; any UTF-8 text can be
  encoded. ChatML template with Hermes-style tool calls. `<|im_end|>` ends a turn.
- **Context.** `max_position_embeddings` is 32768, so that long prompts can be served, but it was
  trained on conversations of at most 768 tokens and means nothing beyond them.

## What it can do

Greet and say what it is; explain Podway and the words of serving; add and subtract numbers up to
99 and multiply up to 10 x 10; answer from a few hundred facts (capitals, planets, days, units,
colours, opposites); make up short stories and verses; count, list and repeat; answer in small JSON
objects; call an offered tool that fits and report its result; remember a name for a few turns;
obey very simple system messages. To anything else it should say that it does not know.

## What it cannot do

Anything else. It does not reason, knows almost nothing, speaks only English, and is easily wrong
outside the phrasings it has seen. Do not rely on anything it says.
"""
_SCORES = """
## Scores

Greedy answers to phrasings, sums and words that training never used, from
`examples/builtin_model/evaluate.py`.
"""


Scores = dict[str, tuple[int, int]]  # domain -> right, asked


def model_card(parameters: int, trained: Trained) -> str:
    return _CARD.format(
        millions=parameters / 1e6,
        steps=trained.steps,
        tokens=trained.tokens / 1e6,
        minutes=trained.minutes,
    )


def with_scores(card: str, scores: Scores) -> str:
    """The card with new scores in its last section."""
    total = [sum(column) for column in zip(*scores.values(), strict=True)]
    rows = [
        f"| {name} | {right} / {of} | {right / of:.1%} |" for name, (right, of) in scores.items()
    ]
    rows.append(f"| **overall** | {total[0]} / {total[1]} | {total[0] / total[1]:.1%} |")
    table = "\n".join(["| domain | right | score |", "|---|---|---|", *rows])
    return f"{card.partition(_SCORES)[0]}{_SCORES}\n{table}\n"
