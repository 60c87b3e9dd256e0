"""LoRA adapters as the control plane, the messages to workers and the gateway name them.

An adapter is identified by the digest of its files' bytes: KV that was computed with it is only
reused under the same digest, whatever the adapter's name. A `lora_id` counts loads, from 1 on, and
is never used again; 0 is the model without an adapter. Standard library only.
"""

from collections.abc import Sequence
from typing import NamedTuple

NO_LORA = 0  # the `lora_id` of rows that use the model without an adapter


class LoraSpec(NamedTuple):
    """An adapter for workers to load: `path` is a directory in PEFT's format on their machines.

    With a `digest` (hexadecimal), files with other bytes are rejected.
    """

    lora_id: int
    name: str
    path: str
    digest: str = ""


class LoraReport(NamedTuple):
    """A worker's answer to a `LoraSpec`: the adapter is loaded, or `error` says why it is not.

    `rank` is the largest of its modules, `num_bytes` the memory that it takes in this worker.
    """

    lora_id: int
    digest: str = ""
    rank: int = 0
    num_bytes: int = 0
    error: str = ""


class LoraAdapter(NamedTuple):
    """A loaded adapter, as requests refer to it."""

    lora_id: int
    name: str
    digest: str


def common_report(reports: Sequence[LoraReport]) -> LoraReport:
    """The answer of all workers of a model: an error of any, or the memory of all together."""
    for report in reports:
        if report.error:
            return report
    first = reports[0]
    if len({report.digest for report in reports}) > 1:
        return LoraReport(first.lora_id, error="the workers read different files of the adapter")
    return first._replace(num_bytes=sum(report.num_bytes for report in reports))
