"""TLS: a certificate and its key from two files, and handshakes whose time is metered."""

import logging
import ssl
from contextvars import ContextVar
from pathlib import Path

from engine.errors import StartupError
from gateway.access.intake import Intake

logger = logging.getLogger(__name__)

# In the context in which a connection is set up: the intake and the client that are charged.
charged_for_handshake: ContextVar[tuple[Intake, str] | None] = ContextVar("charged", default=None)


class Certificate:
    """The server's certificate chain and private key. `reload` changes `context` in place.

    Raises `StartupError` if the files are not a certificate and its key.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = _context(certificate, key)

    def reload(self) -> None:
        """Read the files again, for new connections. If they are invalid, the old certificate stays
        in use. Both cases are logged."""
        try:
            _context(*self._files)  # an invalid pair would damage the context in use
            self.context.load_cert_chain(*self._files)
        except StartupError as error:
            logger.error("keeping the old certificate: %s", error)
        else:
            logger.info("reloaded the certificate %s", self._files[0])


class MeteredHandshake(ssl.SSLObject):
    """Charges the event loop's time for the handshake to the client of the connection."""

    def do_handshake(self) -> None:
        if (charged := charged_for_handshake.get()) is None:
            super().do_handshake()
            return
        intake, client = charged
        began_at = intake.cpu_clock()
        try:
            super().do_handshake()
        finally:
            intake.charge(intake.cpu_clock() - began_at, client)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslobject_class = MeteredHandshake
    try:
        context.load_cert_chain(certificate, key, password=_reject_passphrase)
    except ssl.SSLError as error:
        reason = error.reason or "they are not PEM"
        raise StartupError(f"cannot use {certificate} with {key} for TLS: {reason}") from error
    except OSError as error:
        raise StartupError(
            f"cannot read {certificate} and {key} for TLS: {error.strerror}"
        ) from error
    return context


def _reject_passphrase() -> str:
    """OpenSSL calls this for an encrypted key, which would otherwise prompt on the terminal."""
    raise StartupError("the TLS key has a passphrase: --tls-key must be a key without one")
