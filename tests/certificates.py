"""Certificates for tests, made by openssl where it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, in files called `name`."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", str(certificate), "-keyout", str(key)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return certificate, key
