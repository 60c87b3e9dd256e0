"""`from podway import Podway`: a model in this process, without a server (`gateway.offline`).

It is installed as the package `podway` (`[tool.setuptools]` in pyproject.toml). A name is imported
when it is used, so that `python -m podway --help` loads no engine.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.errors import EngineError as EngineError
    from engine.errors import InvalidRequest as InvalidRequest
    from engine.errors import StartupError as StartupError
    from gateway.offline import Generation as Generation
    from gateway.offline import Podway as Podway

_MODULES = {
    "EngineError": "engine.errors",
    "Generation": "gateway.offline",
    "InvalidRequest": "engine.errors",
    "Podway": "gateway.offline",
    "StartupError": "engine.errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'podway' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
