"""Request headers that never end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from palaver.server.settings import ServerLimits, ServerSettings
from tests.server.live_server import LiveServer

SECONDS = 0.3
HEAD = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that waits for nobody."""
    limits = ServerLimits(head_seconds=SECONDS, body_bytes=1 << 20)
    with LiveServer(tmp_path_factory.mktemp("hasty"), ServerSettings(limits=limits), model=None) as live:
        yield live


@pytest.fixture
def line(hasty: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=120) as connection:
        yield connection


def all_of(line: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    received = b""
    while piece := line.recv(65536):
        received += piece
    return received


def read_until(line: socket.socket, what: bytes) -> bytes:
    received = b""
    while what not in received:
        piece = line.recv(65536)
        assert piece, received
        received += piece
    return received


def test_who_says_nothing_is_let_go_of(line: socket.socket) -> None:
    assert all_of(line) == b""


def test_half_a_head_is_a_408(line: socket.socket) -> None:
    line.sendall(HEAD)
    answer = all_of(line)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.3 s" in answer


def test_a_head_that_comes_letter_by_letter_is_a_408(line: socket.socket) -> None:
    """However often something comes: the whole of it counts."""
    over = threading.Event()

    def drip() -> None:
        line.sendall(HEAD)
        while not over.wait(SECONDS / 10):
            try:
                line.sendall(b"x")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        received = line.recv(65536)
    finally:
        over.set()
        dripping.join()
    assert received.startswith(b"HTTP/1.1 408 ")


def test_the_second_head_of_a_connection_counts_too(line: socket.socket) -> None:
    line.sendall(HEAD + b"\r\n")
    read_until(line, b"}")
    line.sendall(HEAD)
    assert all_of(line).startswith(b"HTTP/1.1 408 ")


def test_an_endless_head_is_a_431(line: socket.socket) -> None:
    line.sendall(HEAD)
    try:
        for _ in range(1000):
            line.sendall(b"x-filler: " + b"x" * 1000 + b"\r\n")
    except OSError:
        pass  # it is closed already
    assert line.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_is_a_400(line: socket.socket) -> None:
    line.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    answer = all_of(line)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error": {' in answer


def test_an_answer_may_take_its_time_and_a_line_be_idle_between_requests(hasty: LiveServer) -> None:
    with httpx.Client(base_url=hasty.url, timeout=120) as http:
        for _ in range(3):
            assert http.get("/api/model/ready", params={"wait": SECONDS * 2}).status_code in (200, 503)


def test_a_body_that_nobody_reads_is_no_head(tmp_path: Path) -> None:
    """It is refused before its body is read; what still comes of that is not taken for another request."""
    settings = ServerSettings(host="0.0.0.0", limits=ServerLimits(head_seconds=5.0))
    with LiveServer(tmp_path, settings, model=None) as live:
        line = socket.create_connection(("127.0.0.1", live.port), timeout=120)
        with line:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 500000\r\n\r\n"
            line.sendall(head + b"x" * 1000)
            assert read_until(line, b"}}").startswith(b"HTTP/1.1 401 ")
            line.sendall(b"x" * 499_000)
            line.sendall(HEAD + b"\r\n")
            assert read_until(line, b"}").startswith(b"HTTP/1.1 503 ")


def test_hostile_32_two_host_headers_are_a_400(line: socket.socket) -> None:
    line.sendall(HEAD + b"host: evil.example\r\nconnection: close\r\n\r\n")
    answer = all_of(line)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"'host' was sent more than once" in answer


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "origin"])
def test_other_headers_that_decide_who_calls_come_once_too(line: socket.socket, name: str) -> None:
    once = f"{name}: none\r\n".encode()
    line.sendall(HEAD + once + once + b"connection: close\r\n\r\n")
    assert all_of(line).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("count", [9_000, 100_000])
def test_hostile_32_many_small_headers_are_a_431(line: socket.socket, count: int) -> None:
    """However the system cuts them into pieces: also where the whole head is there at once."""
    line.sendall(HEAD + b"".join(b"x-%d: y\r\n" % i for i in range(count)) + b"\r\n")
    answer = all_of(line)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"larger than 65536 bytes" in answer


def test_a_long_address_is_a_431(line: socket.socket) -> None:
    line.sendall(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert all_of(line).startswith(b"HTTP/1.1 431 ")


def test_headers_behind_a_body_are_a_431(line: socket.socket) -> None:
    trailers = b"".join(b"x-%d: y\r\n" % i for i in range(9_000))
    head = b"POST /v1/tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
    line.sendall(head + b"1\r\n{\r\n0\r\n" + trailers + b"\r\n")
    assert all_of(line).startswith(b"HTTP/1.1 431 ")


def test_headers_within_the_limit_are_served_again_and_again(line: socket.socket) -> None:
    for _ in range(3):
        line.sendall(HEAD + b"x-filler: " + b"x" * 60_000 + b"\r\n\r\n")
        assert read_until(line, b"}").startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("chunked", [True, False])
def test_hostile_32_a_body_beyond_the_limit_is_a_413_that_its_sender_can_read(hasty: LiveServer, chunked: bool) -> None:
    """It sends all of it before it looks for an answer."""
    size, piece = 24 << 20, b"x" * 65536
    head = b"POST /v1/tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % size
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=120) as line:
        line.sendall(head)
        for _ in range(size // len(piece)):
            line.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            line.sendall(b"0\r\n\r\n")
        answer = all_of(line)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert answer.endswith(b"}")
