"""The engine host: an engine in a process of its own, behind the same protocol."""

from palaver.engines.host.supervisor import HostedEngine

__all__ = ["HostedEngine"]
