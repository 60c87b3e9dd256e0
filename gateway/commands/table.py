"""The commands of `podway`: for each its module and function, and a line for `--help`.

Each module also has a function `parser()`, from which `podway completion` reads the flags.
"""

COMMANDS = {
    "serve": ("gateway.serve.start:main", "serve a model over an OpenAI-compatible API"),
    "chat": ("gateway.commands.chat.command:main", "chat with a server in the terminal"),
    "bench": (
        "gateway.commands.bench.command:main",
        "send load to a server and report its latencies",
    ),
    "simulate": (
        "gateway.commands.simulate.command:main",
        "run a workload through the scheduler in virtual time",
    ),
    "plan": (
        "gateway.commands.plan.command:main",
        "find the fewest GPUs that serve a workload within latency limits",
    ),
    "models": ("gateway.commands.models:main", "list the models on this machine"),
    "explain": ("gateway.commands.explain:main", "say why a request was slow"),
    "top": ("gateway.commands.top:main", "show the engine of a server live"),
    "upgrade": (
        "gateway.commands.upgrade:main",
        "replace a running server without losing a request",
    ),
    "key": ("gateway.commands.key:main", "make an API key for the key file of a server"),
    "help": ("gateway.commands.manual:main", "show a section of the manual"),
    "completion": (
        "gateway.commands.completion:main",
        "print a completion script for bash, zsh or fish",
    ),
}
