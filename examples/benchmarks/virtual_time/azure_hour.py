"""An hour of production in virtual time: latencies, and the speed of the simulator.

Plays the Azure LLM inference trace of 2023 (conversations) first come first served on one
accelerator. The default is a sample of its first 1,000 requests; TRACE is the path of the whole
hour (19,366 requests, 4.1 million output tokens) for all of it.

    python -m examples.benchmarks.virtual_time.azure_hour
        [TRACE] [--device h100] [--model llama-3.1-8b] [--twice] [--json FILE]
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from time import process_time

from rich.console import Console

from engine.control.settings import SchedulerSettings
from engine.policy import build
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.research.leaping.run import simulate
from engine.simulated.figures import SLO, Figures
from engine.simulated.run import Setup
from engine.simulated.trace import read_trace
from gateway.commands.plots import draw_time
from gateway.commands.simulate.command import show

SAMPLE = Path(__file__).parents[3] / "tests" / "data" / "azure_2023_conv_first_1000.csv.gz"
UNBOUNDED = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", default=SAMPLE)
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--twice", action="store_true", help="compare two runs bit for bit")
    parser.add_argument("--json", type=Path, help="write the speed of the simulator as JSON")
    parser.add_argument("--plot", type=Path, help="write the state over time as a PNG")
    args = parser.parse_args()
    arrivals = read_trace(args.trace)
    hardware = Deployment(DEVICES[args.device], SHAPES[args.model])
    setup = Setup(
        label="fcfs grow",
        settings=SchedulerSettings(
            max_model_len=16_384,
            max_batch_size=256,
            max_batch_tokens=2048,
            max_queue_requests=UNBOUNDED,
            max_queue_tokens=UNBOUNDED,
            reuses_prefixes=False,  # the trace has no prefixes
        ),
        policy=lambda cost: build("fcfs", cost),
        cost=hardware.cost(),
        num_slots=hardware.num_slots,
        slo=SLO(ttft=1.0, tpot=0.05),
    )
    started = process_time()
    figures = simulate(setup, arrivals)
    seconds = process_time() - started
    show([figures], Console())
    print(
        f"{figures.seconds:,.0f} s of load, {figures.num_iterations:,} iterations and "
        f"{figures.output_tokens:,} tokens in {seconds:.1f} s of CPU; digest {digest(figures)}"
    )
    if args.json:
        found = {
            "processor": processor(),
            "load_seconds": figures.seconds,
            "iterations": figures.num_iterations,
            "output_tokens": figures.output_tokens,
            "cpu_seconds": seconds,
            "digest": digest(figures),
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.twice:
        same = digest(simulate(setup, arrivals)) == digest(figures)
        print("the second run is", "identical bit for bit" if same else "DIFFERENT")
    if args.plot:
        draw_time([figures], args.plot)


def processor() -> str:
    """The name of this machine's processor, as far as it is known."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def digest(figures: Figures) -> str:
    """A hash of all figures and all samples over time."""
    return hashlib.sha256(json.dumps(figures.as_json()).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
