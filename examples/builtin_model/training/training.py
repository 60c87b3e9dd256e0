"""The training loop: warm-up, constant rate, long cool-down, counted in steps or minutes."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.builtin_model.training.batches import Batch
from examples.builtin_model.training.checkpoint import Trained
from examples.builtin_model.training.llama import LanguageModel
from examples.builtin_model.training.optimiser import optimisers

Save = Callable[[dict[str, Tensor], Trained], None]
log = logging.getLogger(__name__)
PEAK_LR = 3e-3
EARLY_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Course:
    steps: int  # 0: until the minutes are over
    minutes: float
    peak_lr: float = PEAK_LR
    warm_up_steps: int = 100
    early_share: float = EARLY_SHARE
    cool_down_share: float = 0.6
    save_every_minutes: float = 4.0


def rate(course: Course, step: int, progress: float) -> float:
    """The learning rate as a share of its peak: warm-up, constant, linear decay to 1 %."""
    up = min(1.0, (step + 1) / course.warm_up_steps)
    return up * max(0.01, min(1.0, (1.0 - progress) / course.cool_down_share))


def train(
    model: LanguageModel,
    lessons: tuple[Iterator[Batch], Iterator[Batch]],
    course: Course,
    save: Save,
) -> None:
    """Train on early batches, then later ones; save averaged weights regularly and at the end."""
    parts = optimisers(model, course.peak_lr)
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    began = saved = logged = time.perf_counter()
    tokens, mean = 0, 0.0
    for step in itertools.count():
        minutes = (time.perf_counter() - began) / 60
        progress = step / course.steps if course.steps else minutes / course.minutes
        if progress >= 1.0:
            break
        for part in parts:
            for group in part.param_groups:
                group["lr"] = course.peak_lr * rate(course, step, progress)
        batch = next(lessons[progress >= course.early_share])
        loss = model.loss(batch.tokens, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in parts:
            part.step()
            part.zero_grad()
        _follow(average, model, min(0.995, (step + 1) / (step + 10)))
        tokens += batch.tokens.numel()
        mean += (loss.item() - mean) * (0.02 if step > 50 else 1 / (step + 1))
        now = time.perf_counter()
        if now - logged > 10:
            logged = now
            speed = tokens / (now - began)
            log.info(
                "%3.0f%%  step %5d  loss %.4f  %5.0f tokens/s", 100 * progress, step, mean, speed
            )
        if now - saved > 60 * course.save_every_minutes:
            saved = now
            save(average, Trained(step, tokens, minutes))
    save(average, Trained(step, tokens, (time.perf_counter() - began) / 60))


@torch.no_grad()
def _follow(average: dict[str, Tensor], model: LanguageModel, keep: float) -> None:
    """The exponential moving average of the weights."""
    for name, weight in model.named_parameters():
        average[name].lerp_(weight, 1 - keep)
