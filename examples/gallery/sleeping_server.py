"""A server for a laptop: the model leaves the memory when nobody asks, and comes back by itself.

    python examples/gallery/sleeping_server.py [MODEL] [SECONDS]

Starts `podway serve MODEL --idle-unload SECONDS`, and shows the memory of all its processes.
"""

import subprocess
import sys
import time

import psutil
from openai import OpenAI

PORT = 8017


def memory(server: psutil.Process) -> str:
    """The share of the machine's memory that is the server's and its workers'."""
    processes = [server, *server.children(recursive=True)]
    return f"{sum(each.memory_full_info().pss for each in processes) >> 20} MiB"


def ask(client: OpenAI, model: str) -> str:
    began = time.monotonic()
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=20
    )
    return f"{answer.choices[0].message.content!r} after {time.monotonic() - began:.1f} s"


def status(client: OpenAI, model: str) -> str:
    return str((client.models.retrieve(model).model_extra or {})["status"]["value"])


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "builtin"
    seconds = sys.argv[2] if len(sys.argv) > 2 else "5"
    command = [sys.executable, "-m", "gateway", "serve", model, "--port", str(PORT)]
    with subprocess.Popen(
        [*command, "--idle-unload", f"{seconds}s"], stdout=subprocess.PIPE
    ) as run:
        try:
            assert run.stdout is not None
            run.stdout.readline()  # it accepts connections
            server = psutil.Process(run.pid)
            client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="any", max_retries=30)
            name = client.models.list().data[0].id
            for _ in range(2):
                print("answer:", ask(client, name), "with", memory(server))
                while status(client, name) != "unloaded":
                    time.sleep(0.2)
                print("asleep:", memory(server))
        finally:
            run.terminate()


if __name__ == "__main__":
    main()
