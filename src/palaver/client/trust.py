"""Trust in one server by its own certificate, whoever signed it and whatever names are in it."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def own_certificate(chain: Path) -> str:
    """The server's own certificate of a file, which may hold those of who signed it, and even its key, too."""
    found = _CERTIFICATE.search(chain.read_text(encoding="ascii", errors="replace"))
    return found[0] + "\n" if found else ""


def trusting(certificate: str) -> ssl.SSLContext:
    """Talks to whoever has the key of this very certificate, and to nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is known by its key: its names may be those of another place
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context
