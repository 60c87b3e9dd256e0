"""Trains the built-in model from scratch: text, tokenizer, weights, checkpoint directory.

    python -m examples.builtin_model.train --out adapters/builtin --minutes 60
    python -m examples.builtin_model.train --out /tmp/smoke --steps 20

The text is generated from a seed (`corpus/`), the training is plain torch on a CPU
(`training/`). With `--steps` the same machine gives the same weights.
"""

import argparse
import logging
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.builtin_model.corpus.mixture import draw
from examples.builtin_model.training.batches import Plan, batches
from examples.builtin_model.training.bpe import train_tokenizer
from examples.builtin_model.training.card import model_card
from examples.builtin_model.training.chat_template import segments
from examples.builtin_model.training.checkpoint import Trained, resume, write_checkpoint
from examples.builtin_model.training.llama import Llama, Shape
from examples.builtin_model.training.training import EARLY_SHARE, PEAK_LR, Course, train

log = logging.getLogger("train")
LONGEST = 768  # tokens of one example


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="train by steps, not by minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=PEAK_LR)
    parser.add_argument(
        "--resume", type=Path, help="train a checkpoint further, later lessons only"
    )
    return parser.parse_args()


def new_tokenizer(seed: int) -> Tokenizer:
    random = Random(seed)
    drawn = [draw(random, False) for _ in range(20000)]
    texts = [text for each in drawn for text, _ in segments(each.messages, each.tools)]
    return train_tokenizer(texts)


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    shape = Shape()
    model = Llama(shape, LONGEST)
    size = sum(weight.numel() for weight in model.parameters())
    before, share = Trained(0, 0, 0.0), EARLY_SHARE
    if options.resume:
        before, share = resume(options.resume, model), 0.0
        tokenizer = Tokenizer.from_file(str(options.resume / "tokenizer.json"))
    else:
        tokenizer = new_tokenizer(options.seed)
    log.info("%d parameters, vocabulary of %d", size, tokenizer.get_vocab_size())

    def save(weights: dict[str, Tensor], now: Trained) -> None:
        total = before.plus(now)
        write_checkpoint(options.out, shape, weights, tokenizer, total, model_card(size, total))
        log.info("saved %s: %s", options.out, total)

    course = Course(options.steps, options.minutes, peak_lr=options.lr, early_share=share)
    early = Plan(options.seed + 1, True, options.batch_tokens, LONGEST)
    later = Plan(options.seed + 2, False, options.batch_tokens, LONGEST)
    train(model, (batches(tokenizer, early), batches(tokenizer, later)), course, save)


if __name__ == "__main__":
    main()
