"""TLS: a certificate and its key from two files, and handshakes whose time is metered.

`Credentials` are the certificate and the API keys, read at the start and again on SIGHUP.
"""

import logging
import ssl
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError
from gateway.access.intake import Intake
from gateway.access.key_file import Allowance, KeyDefaults
from gateway.access.keys import Keys
from gateway.settings.settings import Settings

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


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys and certificate. `has_files`: at least one of them comes from a file."""

    keys: Keys
    certificate: Certificate | None
    has_files: bool

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The context of TLS connections; None for plain HTTP."""
        return None if self.certificate is None else self.certificate.context

    def reload(self) -> None:
        """Read both again. Each logs whether that succeeded."""
        self.keys.reload()
        if self.certificate is not None:
            self.certificate.reload()


def load_credentials(settings: Settings) -> Credentials:
    """Read the key file and the certificate of the settings. Raises `StartupError`."""
    access, http = settings.access, settings.http
    allowance = Allowance(
        access.requests_per_minute, access.tokens_per_minute, access.max_concurrent
    )
    defaults = KeyDefaults(allowance, isolates_prefixes=access.prefix_isolation == "key")
    keys = Keys(access.api_key, access.api_key_file, defaults, access.admin_api_key)
    certificate = None
    if http.tls_cert is not None and http.tls_key is not None:
        certificate = Certificate(http.tls_cert, http.tls_key)
    return Credentials(
        keys, certificate, access.api_key_file is not None or certificate is not None
    )
