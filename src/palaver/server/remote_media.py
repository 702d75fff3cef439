"""Downloads media from other addresses for clients, if the operator allows it (`--remote-media`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import httpx

from palaver.address_guard import PORTS, AddressGuard, BadAddress, parse_url
from palaver.media import BadMedia, MediaLimits

MAX_BYTES = MediaLimits().bytes
CONNECT_SECONDS = 10.0
TOTAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    guard: AddressGuard = field(default_factory=AddressGuard)
    max_bytes: int = MAX_BYTES

    def fetch(self, url: str) -> bytes:
        """Blocking. Raises BadMedia."""
        try:
            target = parse_url(url)
            address = self.guard.pin(target.host, target.port or PORTS[target.scheme])
        except BadAddress as error:
            raise BadMedia("", str(error)) from None
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
