"""The models at hand as Anthropic's clients read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palaver.chat.interface import ModelCard, ModelState
from palaver.errors import BadParameter

_PAGE = 20
_MOST = 1000
_UNKNOWN_DAY = "1970-01-01T00:00:00Z"


def page(names: Sequence[str], card: ModelCard, asked: Mapping[str, str]) -> dict[str, Any]:
    """A page of them. `asked` may have `limit`, and `after_id` or `before_id`."""
    limit, shown = _limit(asked.get("limit")), list(names)
    if (after := asked.get("after_id")) is not None:
        shown = shown[_place(shown, "after_id", after) + 1 :]
    if (before := asked.get("before_id")) is not None:
        shown = shown[: _place(shown, "before_id", before)]
    some = shown[:limit] if before is None else shown[-limit:]
    found = [model_value(name, card) for name in some]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": len(shown) > limit, "first_id": first, "last_id": last}


def model_value(name: str, card: ModelCard) -> dict[str, Any]:
    about = {"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_DAY, "lifecycle": "active"}
    if card.state is not ModelState.READY or name != card.name:
        return about
    return {**about, "max_input_tokens": card.context_length, "max_tokens": card.context_length}


def _limit(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MOST):
        raise BadParameter("limit", text[:80], f"must be from 1 to {_MOST}")
    return int(text)


def _place(names: Sequence[str], field: str, name: str) -> int:
    if name not in names:
        raise BadParameter(field, name[:80], "there is no such model here")
    return names.index(name)
