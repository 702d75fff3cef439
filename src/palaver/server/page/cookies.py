"""The cookie that stands for a key. Browsers give all servers of a host the same cookies, so its name has the port."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie


def cookie_name(port: int) -> str:
    return f"palaver_{port}"


def cookie_key(headers: Mapping[bytes, bytes], port: int) -> str | None:
    """The key that the page was given."""
    try:
        cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
    except CookieError:
        return None
    found = cookies.get(cookie_name(port))
    return (found.value or None) if found else None
