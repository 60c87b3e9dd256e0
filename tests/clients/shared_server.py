"""A plugin that gives tests in another process a server that runs already, in place of the suite's
conftest: `SERVER_URL=… pytest --noconftest -p tests.clients.shared_server`."""

import os

import pytest


@pytest.fixture(scope="session")
def server_url() -> str:
    return os.environ["SERVER_URL"]
