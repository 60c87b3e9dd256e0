"""A server that tests of commands share."""

from collections.abc import Iterator

import pytest

from tests.gateway.rig import Setting
from tests.gateway.serve.live import listening


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """In this process; its scripted model is served under the name of the built-in one, too."""
    setting = Setting(texts=("Hello, you! " * 20,), step=0.001, context=4096, aliases=("builtin",))
    with listening(setting) as live:
        yield live.url.removesuffix("/v1")
