"""The Chat interface over HTTP, and how a server of one's own on this machine is found."""

from palaver.client.chat import HttpChat
from palaver.client.discovery import Announcement, announced, found
from palaver.client.errors import NoServer, ServerFailed, ServerRefused

__all__ = ["Announcement", "HttpChat", "NoServer", "ServerFailed", "ServerRefused", "announced", "found"]
