"""Media in the engine: what the model's processor made of pictures and sounds, by the hash of their content, and the
keys under which the prefix cache knows their tokens.

An item is processed once, and encoded once by the engine's thread. Processed items are evicted, the least recently used
first; a request that needs an evicted one fails with `MissingMedia`, and is submitted again after it was loaded."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from cachetools import LRUCache

from palaver.engines.base import EngineInfo
from palaver.errors import PalaverError, UnsupportedContent
from palaver.generation import MediaContent, MediaExpansion, MediaItem, MediaSpan

MEDIA_BYTES = 512 << 20
"""What processed items may take together. Items that running requests use are not counted."""
MAX_EXPANSIONS = 16_384
"""Expansions that are kept: they are small, and asked for with every request of a conversation."""


class MissingMedia(PalaverError):
    """Items whose content has to be loaded again. The engine does that itself: no caller sees this error."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(f"{len(keys)} pictures or sounds have to be loaded again.")
        self.keys = tuple(keys)


@runtime_checkable
class ProcessedMedia(Protocol):
    """What the model's processor made of an item: the inputs of an encoder or, afterwards, its embeddings."""

    @property
    def expansion(self) -> MediaExpansion: ...

    @property
    def nbytes(self) -> int: ...


class MediaProcessor(Protocol):
    """The processor of a model that sees or hears."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        """The text that it expands, by kind. A kind that is missing is not supported."""
        ...

    @property
    def numbers(self) -> Mapping[str, str]:
        """The text before an item, by kind, with its number for `{}`. A kind that is missing is not numbered."""
        ...

    @property
    def max_sound_samples(self) -> int:
        """The longest sound that it takes; 0: no limit."""
        ...

    @property
    def sample_rate(self) -> int:
        """Samples per second of the sound that it takes; 0 if it takes none."""
        ...

    @property
    def options(self) -> tuple[str, ...]:
        """Names of `MediaItem.options` that it knows for pictures."""
        ...

    def process(self, item: MediaItem, content: MediaContent) -> ProcessedMedia:
        """Raises UnsupportedContent if the model can't take it. Thread-safe."""
        ...


class MediaCache:
    """Processed items by their keys. Thread-safe."""

    def __init__(self, processor: MediaProcessor, limit_bytes: int = MEDIA_BYTES) -> None:
        self._processor = processor
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._processing = threading.Lock()
        """Items are processed one after the other: two requests with the same picture process it once."""
        self._items: LRUCache[str, ProcessedMedia] = LRUCache(MAX_EXPANSIONS)
        self._expansions: LRUCache[str, MediaExpansion] = LRUCache(MAX_EXPANSIONS)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the model takes. A video is shown as its frames."""
        kinds = tuple(self._processor.placeholders)
        return (*kinds, "video") if "image" in kinds else kinds

    @property
    def placeholders(self) -> Mapping[str, str]:
        return self._processor.placeholders

    @property
    def numbers(self) -> Mapping[str, str]:
        return self._processor.numbers

    @property
    def sample_rate(self) -> int:
        return self._processor.sample_rate

    @property
    def max_sound_samples(self) -> int:
        return self._processor.max_sound_samples

    @property
    def options(self) -> tuple[str, ...]:
        return self._processor.options

    def expand(self, item: MediaItem) -> MediaExpansion:
        """The tokens that stand for the item. Loads and processes it unless they are known."""
        with self._lock:
            known = self._expansions.get(item.key)
        return self.load(item).expansion if known is None else known

    def get(self, key: str) -> ProcessedMedia | None:
        with self._lock:
            return self._items.get(key)

    def load(self, item: MediaItem) -> ProcessedMedia:
        """The item, processed again unless it still is in the cache. Blocks."""
        with self._processing:
            found = self.get(item.key)
            if found is not None:
                return found
            if item.kind not in self._processor.placeholders:
                raise UnsupportedContent(f"This model does not take {item.kind}.")
            assert item.load is not None, "the content of an item must be at hand"
            processed = self._processor.process(item, item.load())
        with self._lock:
            self._expansions[item.key] = processed.expansion
            self._items[item.key] = processed
            self._evict(item.key)
        return processed

    def _evict(self, newest: str) -> None:
        """Evicts down to the limit. Sizes change when items are encoded, so they are added up."""
        used = sum(processed.nbytes for processed in self._items.values())
        while used > self._limit_bytes and len(self._items) > 1:
            key, processed = self._items.popitem()
            used -= processed.nbytes
            assert key != newest, "the newest item is evicted last"


def with_media(info: EngineInfo, media: MediaCache) -> EngineInfo:
    """The description of an engine that takes these media."""
    return replace(
        info,
        media=media.kinds,
        placeholders=media.placeholders,
        numbers=media.numbers,
        sample_rate=media.sample_rate,
        max_sound_samples=media.max_sound_samples,
        media_options=media.options,
    )


def find_media(
    needed: Iterable[str], held: Mapping[str, ProcessedMedia], cache: MediaCache
) -> dict[str, ProcessedMedia]:
    """The items with these keys, from a request's own or from the cache. Raises MissingMedia."""
    found = {key: held.get(key) or cache.get(key) for key in needed}
    missing = [key for key, processed in found.items() if processed is None]
    if missing:
        raise MissingMedia(missing)
    return {key: processed for key, processed in found.items() if processed is not None}


MediaKey = tuple[str, int]
"""The key of a token that stands for media: the item's key, and the token's place in it."""


def prefix_keys(token_ids: list[int], spans: Sequence[MediaSpan]) -> list[int | MediaKey]:
    """What stands at each position, for the prefix cache: token ids, except where tokens stand for media."""
    keys: list[int | MediaKey] = list(token_ids)
    for span in spans:
        keys[span.start : span.stop] = [(span.item.key, place) for place in range(span.length)]
    return keys


_KEY_BITS = 62


def integer_keys(keys: Sequence[Any]) -> list[int]:
    """Prefix keys as integers: negative ones for tokens that stand for media, which follow from their content."""
    bases: dict[str, int] = {}
    found = []
    for key in keys:
        if isinstance(key, int):
            found.append(key)
            continue
        name, place = key
        if name not in bases:
            bases[name] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        found.append(-1 - ((bases[name] + place) % (1 << _KEY_BITS)))
    return found
