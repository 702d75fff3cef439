"""Schemas of what the routes of `/api` return beside the values of `palaver.store` and `palaver.chat.interface`."""

from __future__ import annotations

from palaver.wire.values import ValueModel


class LeafSchema(ValueModel):
    """A message's id, or null where there is none."""

    id: str | None


class BlobUploadSchema(ValueModel):
    digest: str
    size: int


class RawReplySchema(ValueModel):
    """A reply as the model wrote it, markers and all."""

    text: str
