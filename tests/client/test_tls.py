"""A server with a self-signed certificate is trusted by exactly that certificate."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaver.client.discovery import announce_server, find_server, leaf_certificate, sign_nonce
from palaver.client.errors import NoServer
from palaver.client.http_chat import HttpChat

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="NOTHING IS SHOWN HERE: there is no openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that sign themselves, for another host than ours; each file has the key first."""
    folder = tmp_path_factory.mktemp("certificates")
    return made(folder, "one"), made(folder, "other")


def made(folder: Path, name: str) -> Path:
    key, certificate, both = (folder / f"{name}.{ending}" for ending in ("key", "crt", "pem"))
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=elsewhere.example"
    command = ["openssl", *asked.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    both.write_text(key.read_text() + certificate.read_text())
    return both


@asynccontextmanager
async def serving(certificate: Path, received: dict[str, str]) -> AsyncIterator[str]:
    """Something over TLS that answers every request with the same JSON and the proof that it knows the secret."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        nonce = request.split()[1].decode().partition("?nonce=")[2]
        body = json.dumps({**received, "proof": sign_nonce("a secret", received["instance"], nonce)})
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_server_is_found_by_the_certificate_it_announced(
    tmp_path: Path, certificates: tuple[Path, Path]
) -> None:
    mine, _ = certificates
    received: dict[str, str] = {}
    assert "PRIVATE" not in leaf_certificate(mine)
    async with serving(mine, received) as url:
        with announce_server(tmp_path, url, "a secret", certificate=leaf_certificate(mine)) as announcement:
            received["instance"] = announcement.instance
            assert await find_server(tmp_path) == announcement
            async with HttpChat(announcement.url, verify=announcement.trust) as chat:
                with pytest.raises(Exception, match="not understood"):  # it is reached, and is no Palaver
                    await chat.model()


async def test_another_certificate_is_not_trusted(tmp_path: Path, certificates: tuple[Path, Path]) -> None:
    mine, other = certificates
    received: dict[str, str] = {}
    async with serving(other, received) as url:
        with announce_server(tmp_path, url, "a secret", certificate=leaf_certificate(mine)) as announcement:
            received["instance"] = announcement.instance
            assert await find_server(tmp_path) is None
            async with HttpChat(announcement.url, "a secret", verify=announcement.trust) as chat:
                with pytest.raises(NoServer):
                    await chat.model()
        with announce_server(tmp_path, url, "a secret") as announcement:
            received["instance"] = announcement.instance
            assert await find_server(tmp_path) is None, "without a certificate the usual authorities decide"
