"""The Chat interface over HTTP, and how a server of one's own on this machine is found."""

from palaver.client.connection import NoServer, ServerFailed, ServerRefused
from palaver.client.discovery import Announcement, announce_server, find_server
from palaver.client.http_chat import HttpChat

__all__ = ["Announcement", "HttpChat", "NoServer", "ServerFailed", "ServerRefused", "announce_server", "find_server"]
