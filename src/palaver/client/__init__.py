"""The `Chat` interface over HTTP, and the discovery of the user's own server on this machine."""

from palaver.client.connection import NoServer, ServerFailed, ServerRefused
from palaver.client.discovery import Announcement, announce_server, find_server
from palaver.client.http_chat import HttpChat

__all__ = ["Announcement", "HttpChat", "NoServer", "ServerFailed", "ServerRefused", "announce_server", "find_server"]
