"""TLS: a certificate and its key from two files, read again on request."""

import logging
import ssl
from pathlib import Path

from engine.errors import StartupError

logger = logging.getLogger(__name__)


class Certificate:
    """What the server shows to its clients. `context` stays the same through reloads.

    Raises `StartupError` when the files are not a certificate and its key.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = _context(certificate, key)

    def reload(self) -> None:
        """Show what the files hold now to those who connect from now on; wrong files change
        nothing. One log line either way."""
        try:
            _context(*self._files)  # a pair that does not fit would spoil the one in use
            self.context.load_cert_chain(*self._files)
        except StartupError as refusal:
            logger.error("the certificate stays as it was: %s", refusal)
        else:
            logger.info("certificate=%s", self._files[0])


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_to_ask)
    except ssl.SSLError as error:
        reason = error.reason or "they are not PEM"
        raise StartupError(f"cannot use {certificate} with {key} for TLS: {reason}") from error
    except OSError as error:
        raise StartupError(
            f"cannot read {certificate} and {key} for TLS: {error.strerror}"
        ) from error
    return context


def _refuse_to_ask() -> str:
    """A server has nobody to ask for a passphrase."""
    raise StartupError("the TLS key has a passphrase; give a key without one")
