"""Credentials: API keys and the TLS certificate, read at the start and again on SIGHUP."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.access.key_file import Allowance, KeyDefaults
from gateway.access.keys import Keys
from gateway.serve.tls import Certificate

if TYPE_CHECKING:
    import ssl

    from gateway.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys and certificate. `has_files`: at least one of them comes from a file."""

    keys: Keys
    certificate: Certificate | None
    has_files: bool

    @property
    def tls(self) -> "ssl.SSLContext | None":
        """The context of TLS connections; None for plain HTTP."""
        return None if self.certificate is None else self.certificate.context

    def reload(self) -> None:
        """Read both again. Each logs whether that succeeded."""
        self.keys.reload()
        if self.certificate is not None:
            self.certificate.reload()


def load_credentials(settings: "Settings") -> Credentials:
    """Read the key file and the certificate of the settings. Raises `StartupError`."""
    allowance = Allowance(
        settings.requests_per_minute, settings.tokens_per_minute, settings.max_concurrent
    )
    defaults = KeyDefaults(allowance, isolates_prefixes=settings.prefix_isolation == "key")
    keys = Keys(settings.api_key, settings.api_key_file, defaults, settings.admin_api_key)
    certificate = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificate = Certificate(settings.tls_cert, settings.tls_key)
    return Credentials(
        keys, certificate, settings.api_key_file is not None or certificate is not None
    )
