"""What can go wrong with a voice."""

from __future__ import annotations

from palaver.errors import EngineError, ModelError


class VoiceMissing(ModelError):
    """What a voice needs is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"{what} needs the package {package}, which is not installed: "
            "install it with `pip install 'palaver[voice]'`."
        )
        self.package = package


class VoiceFailed(EngineError):
    """A voice that did not say what it should have said."""
