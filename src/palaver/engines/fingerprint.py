"""What computed a reply: the same fingerprint means the same arithmetic, another one may round differently."""

from __future__ import annotations

from dataclasses import dataclass

from palaver.engines.base import BY_CACHE, BY_COMPANY, BY_TEXT

BATCHED = "batched"
EXACTNESS = {BY_TEXT: "exact", BY_CACHE: "exact-with-cache", BY_COMPANY: BATCHED}
"""`EngineInfo.exactness` in a word."""
COMPILED_RUNNER = "compiled"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Written as its six fields with slashes between, such as compiled/1f0c…/cpu/float32/exact/sampler-1."""

    runner: str
    """Whose code runs the model: compiled, fused or library."""
    build: str
    """The build of that code: a hash, or the library's version and what it uses of the processor."""
    device: str
    dtype: str
    exactness: str
    """One of EXACTNESS: what the bits of a reply depend on."""
    sampler: str
    """The version of the rules by which a token is drawn."""

    def __str__(self) -> str:
        fields = (self.runner, self.build, self.device, self.dtype, self.exactness, self.sampler)
        return "/".join(field.replace("/", "-").replace(" ", "-") for field in fields)

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """None for a text of another form, such as that of an engine that is none of these."""
        fields = text.split("/")
        return cls(*fields) if len(fields) == 6 else None
