"""The model in use, and what its template lets one choose."""

from __future__ import annotations

from typing import Any

from palaver.chat import interface
from palaver.formats import switches
from palaver.wire.base import Told
from palaver.wire.sampling import Sampling


class Switch(Told):
    """One variable of the model's chat template."""

    name: str
    kind: switches.SwitchKind
    type: str
    values: list[Any]
    """What it is known to take; efforts from the weakest on."""
    others: bool
    """Whether it takes other values, too."""
    default: Any
    on: Any
    off: Any
    form: str
    changes: str
    """What it changes, for people."""

    @classmethod
    def of(cls, switch: switches.Switch) -> Switch:
        return cls.model_validate(switch)

    def value(self) -> switches.Switch:
        return switches.Switch(**{**dict(self), "values": tuple(self.values)})


class ModelCard(Told):
    """The model in use, or on its way. What is known only of a loaded model is empty until then."""

    name: str
    state: interface.ModelState
    progress: float | None
    """From 0 to 1 while it loads, where that is known."""
    note: str
    """What it is doing while it loads, or why it could not be loaded."""
    context_length: int
    device: str
    dtype: str
    reuse: str
    exactness: str = ""
    steps: str = ""
    """Whose code computes the next tokens, and why not compiled code."""
    fingerprint: str = ""
    """What computes its replies: stored with each of them."""
    defaults: Sampling
    thinks: bool
    switches: list[Switch]
    takes_tools: bool
    media: tuple[str, ...]
    notices: tuple[str, ...]

    @classmethod
    def of(cls, card: interface.ModelCard) -> ModelCard:
        return cls.model_validate(card)

    def value(self) -> interface.ModelCard:
        theirs = {"defaults": self.defaults.value(), "switches": tuple(one.value() for one in self.switches)}
        return interface.ModelCard(**{**dict(self), **theirs})
