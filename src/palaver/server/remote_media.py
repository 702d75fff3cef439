"""Downloads media from other addresses for clients, if the operator allows it (`--remote-media`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx

from palaver.address_guard import PORTS, Address, AddressGuard, BadAddress, parse_url
from palaver.media import BadMedia, MediaLimits

MAX_BYTES = MediaLimits().bytes
CONNECT_SECONDS = 10.0
TOTAL_SECONDS = 30.0
IDENTITY = "identity"
"""The content coding of plain bytes. Other codings are refused: a few bytes may become any number of them."""


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    guard: AddressGuard = field(default_factory=AddressGuard)
    max_bytes: int = MAX_BYTES
    total_seconds: float = TOTAL_SECONDS
    """From the connection to the last byte."""

    def fetch(self, url: str) -> bytes:
        """Blocking: call it in a thread. Raises BadMedia."""
        try:
            target = parse_url(url)
            address = self.guard.pin(target.host, target.port or PORTS[target.scheme])
        except BadAddress as error:
            raise BadMedia("", str(error)) from None
        return asyncio.run(self._download(target, address))

    async def _download(self, target: httpx.URL, address: Address) -> bytes:
        headers = {
            "Host": target.netloc.decode("ascii"),
            "Accept": "*/*",
            "Accept-Encoding": IDENTITY,
            "User-Agent": "palaver",
        }
        timeout, extensions = httpx.Timeout(CONNECT_SECONDS), {"sni_hostname": target.host}
        pinned = target.copy_with(host=str(address))
        try:
            async with (
                asyncio.timeout(self.total_seconds),
                httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=timeout) as client,
                client.stream("GET", pinned, headers=headers, extensions=extensions) as response,
            ):
                return await self._read(response)
        except httpx.HTTPError:
            raise BadMedia("", "could not be downloaded") from None
        except TimeoutError:
            raise BadMedia("", f"could not be downloaded within {self.total_seconds:g} s") from None

    async def _read(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise BadMedia("", f"could not be downloaded: its server answered {response.status_code}")
        if response.headers.get("content-encoding", IDENTITY).strip().lower() != IDENTITY:
            raise BadMedia("", "could not be downloaded: its server compresses it, which was not requested")
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self.max_bytes:
                raise BadMedia("", f"is larger than {self.max_bytes >> 20} MB")
        return bytes(data)
