"""The process that renders one chat template: a JSON job on standard input, a result on output.

It is started by `template_process.py` and limits itself before it reads the job.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

from adapters.dialects.jinja_template import compile_request_template
from adapters.dialects.template_process import CPU_SECONDS, MEMORY_BYTES
from engine.errors import InvalidRequest

NICENESS = 5  # other requests' tokens come first


def render(job: Mapping[str, Any]) -> dict[str, Any]:
    """`text`, or `error` and the `param` that it is about."""
    try:
        template = compile_request_template(job["source"], job["special_tokens"])
        text = template.render(
            job["messages"],
            add_generation_prompt=job["add_generation_prompt"],
            **job["variables"],
        )
    except InvalidRequest as error:
        return {"error": str(error), "param": error.param}
    return {"text": text}


def main() -> None:
    """Render the job on standard input within the limits of CPU time and memory."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout.write(json.dumps(render(json.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
