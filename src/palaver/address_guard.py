"""Which addresses a server may connect to on behalf of its clients: those of the public internet.

A URL is parsed once, its host is resolved once, and the connection goes to the address that was checked, so that
neither a redirect nor another answer of the name server leads into the operator's network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaver.errors import RequestError

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_URL = 4096
PORTS = {"http": 80, "https": 443}
MAX_PORT = 65535
_PLAIN_URL = re.compile(r"https?://[^\s\\@%/?#\x00-\x1f\x7f]+([/?#][^\s\\\x00-\x1f\x7f]*)?", re.IGNORECASE)
"""The host holds neither "@" nor an escape; the rest no backslash, which some parsers take for a slash."""
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""Everything else is not of the public internet, also where Python's `is_global` says so: addresses of a site, of
networks' own NAT64 (64:ff9b:1::/48), and the obsolete forms that contain an IPv4 address."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class BadAddress(RequestError):
    """A URL that is not accepted; the message is the end of a sentence that names what is there."""


def parse_url(url: str) -> httpx.URL:
    """Raises BadAddress unless it is a plain http or https URL with a host and without a user name."""
    import httpx

    if len(url) <= MAX_URL and _PLAIN_URL.fullmatch(url):
        with suppress(httpx.InvalidURL):
            parsed = httpx.URL(url)
            plain = parsed.scheme in PORTS and parsed.host and not parsed.userinfo
            if plain and (parsed.port or 0) <= MAX_PORT:
                return parsed
    raise BadAddress("is at an address that is not a plain http or https URL")


def resolve(host: str, port: int) -> Sequence[Address]:
    """The addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(address[4][0]).partition("%")[0]) for address in found]


def is_public(address: Address) -> bool:
    """Whether the address is of the public internet, also the IPv4 address that an IPv6 address contains."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast


@dataclass(frozen=True, slots=True)
class AddressGuard:
    resolve: Callable[[str, int], Sequence[Address]] = resolve
    is_allowed: Callable[[Address], bool] = is_public

    def pin(self, host: str, port: int) -> Address:
        """The address to connect to. Blocking. Raises BadAddress unless all addresses of the host are allowed."""
        try:
            addresses = self.resolve(host, port)
        except (OSError, UnicodeError, ValueError):
            addresses = ()
        if not addresses:
            raise BadAddress("is at a host that is not known")
        if not all(map(self.is_allowed, addresses)):
            raise BadAddress("is at an address that is not public, which is not accepted")
        return addresses[0]
