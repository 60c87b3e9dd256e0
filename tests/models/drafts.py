"""Drafts that are as often right as a test wants."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from safetensors.torch import load_file, save_file

from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.request import Request
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.drafter import Drafter
from engine.speculation.proposers import Proposal
from engine.step import RequestId

FREE_DRAFTS = CostModel.linear(per_step=1.0, per_token=1e-9, per_slot=0.0)


class ScriptedProposer:
    """Proposes what a request's output will be, with a wrong token here and there, and
    now and then nothing.

    The first guess for every other request is all wrong, so that a run has wrong drafts in
    whatever order its requests are asked. `outputs` are the whole outputs by request id.
    """

    name = "scripted"

    def __init__(self, outputs: Sequence[Sequence[int]], error_rate: float, seed: int) -> None:
        self._outputs = outputs
        self._error_rate = error_rate
        self._random = Random(seed)
        self._asked: set[RequestId] = set()

    def propose(self, request: Request, count: int) -> Proposal:
        count = self._random.choice((0, count, count)) if self._error_rate else count
        known = self._outputs[request.request_id][request.produced :][:count]
        error_rate = self._error_rate
        if known and error_rate and request.request_id not in self._asked:
            self._asked.add(request.request_id)
            error_rate = float(request.request_id % 2)
        guesses = [
            abs(token - 1) if self._random.random() < error_rate else token for token in known
        ]
        return Proposal(tuple(guesses), 16)

    def forget(self, request: Request) -> None:
        """Keeps nothing of a request."""


def a_drafter(
    outputs: Sequence[Sequence[int]], error_rate: float = 0.2, seed: int = 0, num_drafts: int = 4
) -> Drafter:
    """A drafter for which drafts cost nothing."""
    proposer = ScriptedProposer(outputs, error_rate, seed)
    return Drafter([proposer], num_drafts, LiveCost(FREE_DRAFTS))


def a_model_drafter(num_drafts: int = 4) -> Drafter:
    """A drafter that lets the worker's draft model propose tokens, which cost nothing."""
    cost = LiveCost(FREE_DRAFTS)
    return Drafter([], num_drafts, cost, DraftModelProposer(cost, size_ratio=1e-6))


def first_layers(source: Path, directory: Path, num_layers: int) -> Path:
    """A checkpoint with the first layers of another one, whose head reads their output."""
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    kept = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < num_layers
    }
    save_file(kept, directory / "model.safetensors")
    return directory
