import logging
import shutil
import socket
import ssl
from pathlib import Path

import openai
import pytest

from engine.errors import StartupError
from gateway.serve import acceptor
from gateway.serve.connection import ConnectionBounds
from gateway.serve.tls import Certificate
from tests.certificates import make_certificate
from tests.gateway.rig import MODEL, Setting
from tests.gateway.serve.live import Live, listening


def test_the_official_client_streams_over_tls(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    trust = ssl.create_default_context(cafile=files[0])
    with (
        listening(Setting(step=0.001), tls=Certificate(*files).context) as live,
        openai.DefaultHttpxClient(verify=trust) as http,
        openai.OpenAI(
            base_url=live.url.replace("http:", "https:"), api_key="any", http_client=http
        ) as client,
    ):
        stream = client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=9)
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello!"
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as peer:
            peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert not peer.recv(100).startswith(b"HTTP"), "no plain HTTP at the TLS port"


def test_a_renewed_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    certificate = Certificate(*files)
    with listening(Setting(step=0.001), tls=certificate.context) as live:
        before = ssl.get_server_certificate(("127.0.0.1", live.port))
        for new, old in zip(make_certificate(tmp_path, "two"), files, strict=True):
            shutil.copy(new, old)
        certificate.reload()
        after = ssl.get_server_certificate(("127.0.0.1", live.port))
    assert before != after
    assert after.strip() == (tmp_path / "two.pem").read_text().strip()


def test_an_invalid_new_certificate_keeps_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_certificate(tmp_path, "one")
    certificate = Certificate(*files)
    with listening(Setting(step=0.001), tls=certificate.context) as live:
        before = ssl.get_server_certificate(("127.0.0.1", live.port))
        shutil.copy(make_certificate(tmp_path, "two")[0], files[0])
        with caplog.at_level(logging.ERROR):
            certificate.reload()
        assert ssl.get_server_certificate(("127.0.0.1", live.port)) == before
    assert ["keeping the old certificate" in line for line in caplog.messages] == [True]


def test_files_that_are_no_certificate_are_rejected_in_one_line(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "two")
    (tmp_path / "text").write_text("hello")
    for pair in ((certificate, other), (key, certificate), (tmp_path / "text", key)):
        with pytest.raises(StartupError, match="cannot use"):
            Certificate(*pair)
    with pytest.raises(StartupError, match=r"cannot read .*No such file"):
        Certificate(certificate, tmp_path / "none")


def test_a_stalled_handshake_counts_as_a_connection_and_gives_its_place_to_a_new_one(
    tmp_path: Path,
) -> None:
    files = make_certificate(tmp_path, "one")
    bounds = ConnectionBounds(max_connections=2)
    trust = ssl.create_default_context(cafile=files[0])
    with (
        listening(Setting(step=0.001), tls=Certificate(*files).context, bounds=bounds) as live,
        live.connect() as first,
        live.connect() as second,
    ):
        assert health_over_tls(live, trust) == b"200"
        assert first.recv(1) == b"", "closed for the third connection"
        second.sendall(b"\x16\x03\x01")  # still open


def health_over_tls(live: Live, trust: ssl.SSLContext) -> bytes:
    """The status of /health."""
    with live.connect() as plain, trust.wrap_socket(plain, server_hostname="127.0.0.1") as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        return peer.recv(100).split()[1]


def test_a_stalled_handshake_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "SETUP_SECONDS", 0.05)
    files = make_certificate(tmp_path, "one")
    with (
        listening(Setting(step=0.001), tls=Certificate(*files).context) as live,
        live.connect() as peer,
    ):
        assert peer.recv(1) == b""
