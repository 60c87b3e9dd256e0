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
