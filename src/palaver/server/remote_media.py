"""Downloads media from other addresses for clients, if the operator allows it (`--remote-media`).

A URL is parsed once. Its host is resolved once, every address must be public, and the connection goes to the address
that was checked, so that neither a redirect nor another answer of the name server leads into the operator's network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from palaver.media import BadMedia, MediaLimits

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_URL = 4096
MAX_BYTES = MediaLimits().bytes
CONNECT_SECONDS = 10.0
TOTAL_SECONDS = 30.0
_PLAIN_URL = re.compile(r"https?://[^\s\\@\x00-\x1f\x7f]+", re.IGNORECASE)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


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
    return address.is_global and not address.is_multicast


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    resolve: Callable[[str, int], Sequence[Address]] = resolve
    is_allowed: Callable[[Address], bool] = is_public
    max_bytes: int = MAX_BYTES

    def fetch(self, url: str) -> bytes:
        """Blocking. Raises BadMedia."""
        target = _parse(url)
        port = target.port or {"http": 80, "https": 443}[target.scheme]
        address = self._address(target.host, port)
        pinned = target.copy_with(host=str(address))
        headers = {"Host": target.netloc.decode("ascii"), "Accept": "*/*", "User-Agent": "palaver"}
        timeout = httpx.Timeout(CONNECT_SECONDS)
        try:
            with (
                httpx.Client(trust_env=False, follow_redirects=False, timeout=timeout) as client,
                client.stream("GET", pinned, headers=headers, extensions={"sni_hostname": target.host}) as response,
            ):
                return self._read(response)
        except httpx.HTTPError:
            raise BadMedia("", "could not be downloaded") from None

    def _address(self, host: str, port: int) -> Address:
        try:
            addresses = self.resolve(host, port)
        except (OSError, UnicodeError, ValueError):
            addresses = ()
        if not addresses:
            raise BadMedia("", "could not be downloaded: its host is not known")
        if not all(map(self.is_allowed, addresses)):
            raise BadMedia("", "is at an address that is not public, which is not accepted")
        return addresses[0]

    def _read(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise BadMedia("", f"could not be downloaded: its server answered {response.status_code}")
        data, end = bytearray(), time.monotonic() + TOTAL_SECONDS
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > self.max_bytes:
                raise BadMedia("", f"is larger than {self.max_bytes >> 20} MB")
            if time.monotonic() > end:
                raise BadMedia("", f"could not be downloaded within {TOTAL_SECONDS:g} s")
        return bytes(data)


def _parse(url: str) -> httpx.URL:
    if len(url) > MAX_URL or not _PLAIN_URL.fullmatch(url):
        raise BadMedia("", "is at an address that is not a plain http or https URL")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise BadMedia("", "is at an address that is not a plain http or https URL") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise BadMedia("", "is at an address that is not a plain http or https URL")
    return parsed
