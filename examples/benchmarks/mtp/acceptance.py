"""How many drafts of a layer for multi-token prediction are accepted, and what they are worth.

    python -m examples.benchmarks.mtp.acceptance MODEL [--out FILE]

`MODEL` is a checkpoint with the built-in model's tokenizer (`examples.benchmarks.mtp.train`). The
requests are chats that its training did not see. Drafts are counted with a cost model in which they
are free, so that each decode has as many as allowed. Speed is that of one stream with the measured
costs, without and with drafts in turns, in CPU seconds of this process (engine and worker), of the
model and of a large one: each MLP, also that of the layer for multi-token prediction, has neurons
of zeros up to `--inner`, so it computes the same and reads as many weights as others of its size.
Each run must have the tokens of the run without drafts.
"""

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.cost.model import CostModel
from engine.request import RequestSpec
from engine.step import SamplingParams
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.speculation.engines import Machine, load, serve
from examples.builtin_model.corpus.mixture import draw
from examples.builtin_model.training.batches import encode

SEED = 1_000_000  # of the chats; that of the training is another one
LONGEST = 256  # tokens of a prompt
OUTPUT_LEN = 64
FREE = CostModel.linear(per_step=1.0, per_token=1e-9, per_slot=0.0)


def prompts_of(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """The beginnings of chats, up to the assistant's first token."""
    random, found = Random(SEED), list[tuple[int, ...]]()
    while len(found) < count:
        ids, weights = encode(tokenizer, draw(random, False))
        start = weights.index(1.0)
        if start <= LONGEST:
            found.append(tuple(ids[:start]))
    return found


def specs_of(tokenizer: Tokenizer, count: int, temperature: float) -> list[RequestSpec]:
    ids = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    ends = frozenset(number for number in ids if number is not None)
    return [
        RequestSpec(prompt, OUTPUT_LEN, SamplingParams(temperature, seed=number), end_ids=ends)
        for number, prompt in enumerate(prompts_of(tokenizer, count))
    ]


def config_of(num_drafts: int) -> Mapping[str, object]:
    return {"method": "mtp", "num_speculative_tokens": num_drafts}


def accepted(machine: Machine, specs: Sequence[RequestSpec], num_drafts: int) -> dict[str, Any]:
    """The share of accepted drafts by position, where all are computed."""
    free = replace(machine, draft_cost=FREE)
    plain = asyncio.run(serve(machine, specs, 1, None, is_again=False))
    found = asyncio.run(serve(free, specs, 1, config_of(num_drafts), is_again=False))
    return {
        "temperature": specs[0].sampling.temperature,
        "num_drafts": num_drafts,
        "output_tokens": sum(map(len, found.outputs)),
        "drafts": found.num_drafts,
        "accepted": found.num_accepted,
        "by_position": found.by_position,
        "same_tokens": found.outputs == plain.outputs,
    }


def speed(
    machine: Machine, specs: Sequence[RequestSpec], num_drafts: int, rounds: int
) -> dict[str, Any]:
    """Tokens per second of one stream without and with drafts."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    same, counts = True, (0, 0)
    for _ in range(rounds):
        off = asyncio.run(serve(machine, specs, 1, None, is_again=True))
        on = asyncio.run(serve(machine, specs, 1, config_of(num_drafts), is_again=True))
        rates["off"].append(off.tokens_per_second)
        rates["on"].append(on.tokens_per_second)
        same, counts = same and on.outputs == off.outputs, (on.num_drafts, on.num_accepted)
    return {
        "parameters": machine.report.num_parameters,
        "temperature": specs[0].sampling.temperature,
        "num_drafts": num_drafts,
        "off": round(median(rates["off"]), 1),
        "on": round(median(rates["on"]), 1),
        "ratio": round(median(map(_ratio, rates["on"], rates["off"])), 3),
        "drafts": counts[0],
        "accepted": counts[1],
        "same_tokens": same,
    }


def _ratio(on: float, off: float) -> float:
    return on / off


def widened(model: Path, folder: Path, inner: int) -> Path:
    """The checkpoint with `inner` neurons in each MLP, the new ones of zeros."""
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp." in name:
            sizes = (weight.shape[0], inner) if "down_proj" in name else (inner, weight.shape[1])
            wide = weights[name] = weight.new_zeros(sizes)
            wide[: weight.shape[0], : weight.shape[1]] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def page(found: Mapping[str, Any]) -> str:
    """The page of results."""
    before, after = found["load"]
    lines = [
        "# Drafts of a trained layer for multi-token prediction",
        "",
        "No checkpoint of a published model was at hand, so a small one was trained:",
        f"`python -m examples.benchmarks.mtp.train --minutes {found['minutes']:g}` on one core, "
        f"{found['parameters']:,} parameters,",
        "Qwen 3.5's architecture, the texts and the tokenizer of the built-in model. A larger "
        "model with a longer training has other figures.",
        "",
        f"`python -m examples.benchmarks.mtp.acceptance`: {found['requests']} chats of the kind "
        f"that it was trained on; {found['cpu']}, one thread, load average {before:.1f}",
        f"before and {after:.1f} after. All runs produced the tokens of the run without drafts "
        "([JSON](mtp.json)).",
        "",
        "Where each decode has as many drafts as allowed:",
        "",
        "| temperature | drafts at most | accepted of drafts | first, second, … | "
        "tokens per decode |",
        "|---|---|---|---|---|",
    ]
    for row in found["acceptance"]:
        tokens = row["output_tokens"]
        lines.append(
            f"| {row['temperature']:g} | {row['num_drafts']} | {row['accepted']:,} of "
            f"{row['drafts']:,} ({100 * row['accepted'] / row['drafts']:.0f} %) | "
            f"{', '.join(f'{count:,}' for count in row['by_position'])} | "
            f"{tokens / (tokens - row['accepted']):.2f} |"
        )
    lines += [
        "",
        "Where the cost model decides, one stream, CPU seconds of engine and worker. The large "
        f"model is the small one with MLPs of {found['inner']:,}",
        "neurons, the new ones of zeros: it has the same drafts and reads as many weights as "
        "others of its size:",
        "",
        "| parameters | temperature | drafts at most | tokens/s, off | on | on / off | "
        "accepted of drafts |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['parameters'] / 1e6:.0f} M | {row['temperature']:g} | {row['num_drafts']} | "
        f"{row['off']:.0f} | {row['on']:.0f} | {row['ratio']:.2f} | "
        f"{row['accepted']:,} of {row['drafts']:,} |"
        for row in found["speed"]
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="of the training")
    parser.add_argument("--inner", type=int, default=65_536, help="neurons of the large MLPs")
    parser.add_argument("--out", type=Path, help="JSON file; a page is written beside it")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    machine = load(str(options.model), "", "auto", 1, time.process_time, has_mtp=True)
    with TemporaryDirectory() as folder:
        wide = str(widened(options.model, Path(folder) / "wide", options.inner))
        large = load(wide, "", "auto", 1, time.process_time, has_mtp=True)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    kinds = [
        (specs_of(tokenizer, options.requests, temperature), count)
        for temperature in (0.0, 1.0)
        for count in options.drafts
    ]
    result = {
        "minutes": options.minutes,
        "cpu": cpu_name(),
        "parameters": machine.report.num_parameters,
        "requests": options.requests,
        "inner": options.inner,
        "acceptance": [accepted(machine, specs, count) for specs, count in kinds],
        "speed": [
            speed(each, specs, count, options.rounds)
            for each in (machine, large)
            for specs, count in kinds
        ],
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
    }
    print(page(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(result))


if __name__ == "__main__":
    main()
