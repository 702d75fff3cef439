"""The engine host: runs an engine in a process of its own, behind the engine protocol."""
