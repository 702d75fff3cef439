"""The media of prompts: parts become the decoded items that an engine takes, a video its frames and its sound."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from cachetools import LRUCache

from palaver.engines.base import Engine, EngineInfo
from palaver.formats.base import Format
from palaver.generation import ExpandedMedia, MediaContent, MediaItem
from palaver.media import MediaDecoder, MediaLimits, Picture, Sound, VideoFrames
from palaver.media.base import RAW_RATE
from palaver.messages import Audio, Image, Video

MIN_SOUND_S = 0.1
"""Shorter pieces of a video's sound are left out."""
_KEPT_FILES = 4
"""Decoded videos and sounds that are kept, each: their pieces are loaded one after the other."""


class MediaExpander:
    """Expands the media of prompts with the model's own processor. Every method blocks: call it in a thread."""

    def __init__(self, decoder: MediaDecoder | None = None) -> None:
        self._decoder = decoder
        self._lock = threading.Lock()
        self._videos: LRUCache[str, VideoFrames] = LRUCache(_KEPT_FILES)
        self._sounds: LRUCache[str, Sound] = LRUCache(_KEPT_FILES)

    def use(self, decoder: MediaDecoder) -> None:
        """Decodes with this decoder, which belongs to the caller."""
        self._decoder = decoder

    @property
    def decoder(self) -> MediaDecoder:
        with self._lock:
            if self._decoder is None:
                self._decoder = MediaDecoder()
            return self._decoder

    def close(self) -> None:
        """Closes a decoder of its own. One that was given with `use` belongs to the caller."""
        with self._lock:
            if self._decoder is not None:
                self._decoder.close()

    def expand(
        self,
        part: Image | Audio | Video,
        engine: Engine,
        format: Format,
        options: Mapping[str, int],
        counts: Counter[str],
    ) -> tuple[ExpandedMedia, ...]:
        """What stands for the part in a prompt. `options`: `RenderOptions.media`. `counts`: the items of each kind
        before it, updated here. Raises BadMedia or UnsupportedContent."""
        info = engine.info
        texts = {**info.placeholders, **{kind: found.text for kind, found in format.placeholders.items()}}
        known = tuple((name, options[name]) for name in info.media_options if name in options)
        expanded = []
        for item in self._items(part, info, texts, known, options):
            numbered = _with_number(item, info.numbers, counts)
            expanded.append(ExpandedMedia(numbered, engine.expand_media(numbered)))
        return tuple(expanded)

    def _items(
        self,
        part: Image | Audio | Video,
        info: EngineInfo,
        texts: Mapping[str, str],
        known: tuple[tuple[str, int], ...],
        options: Mapping[str, int],
    ) -> Iterator[MediaItem]:
        """`texts`: the placeholder of each kind. `known`: the options that the model's processor knows."""
        match part:
            case Image():
                yield MediaItem("image", part.digest, texts["image"], known, lambda: self._picture(part))
            case Audio():
                yield from self._pieces(part, info, texts["audio"])
            case Video():
                rate = info.sample_rate if "audio" in info.media else 0
                film = Film(self, part, rate, options)
                for place in range(len(film.starts)):
                    name = f"{film.name}#{place}"
                    yield MediaItem("image", name, texts["image"], known, partial(film.frame, place))
                    if film.sound(place).size >= MIN_SOUND_S * rate > 0:
                        yield MediaItem("audio", name, texts["audio"], load=partial(film.heard, place))
                    if film.others(place):
                        yield MediaItem("image", f"{name}+", texts["image"], known, partial(film.stacked, place))

    def _pieces(self, part: Audio, info: EngineInfo, text: str) -> Iterator[MediaItem]:
        """The sound, in several pieces if it is longer than the model hears at once."""
        rate, most, name = info.sample_rate, info.max_sound_samples, f"{part.digest}@{info.sample_rate}"
        if not most or 0 < part.seconds * rate < 0.9 * most:  # the length in a header need not be exact
            yield MediaItem("audio", name, text, load=partial(self._sound, part, rate))
            return
        samples = len(self._samples(part, rate))
        for start in range(0, max(1, samples), most):
            piece = name if samples <= most else f"{name}#{start}+{most}"
            yield MediaItem("audio", piece, text, load=partial(self._sound, part, rate, start, most))

    def read_video(self, part: Video, rate: int, limits: MediaLimits, name: str) -> VideoFrames:
        """Decodes a video, unless it was decoded recently. `name`: the same for the same frames."""
        with self._lock:
            known = self._videos.get(name)
        if known is None:
            known = self.decoder.video(part.data, rate or RAW_RATE, part.name, limits)
            with self._lock:
                self._videos[name] = known
        return known

    def _picture(self, part: Image) -> MediaContent:
        return _content(self.decoder.picture(part.data, part.name))

    def _samples(self, part: Audio, rate: int) -> Sound:
        name = f"{part.digest}@{rate}"
        with self._lock:
            known = self._sounds.get(name)
        if known is None:
            known = self.decoder.sound(part.data, rate, part.name)
            with self._lock:
                self._sounds[name] = known
        return known

    def _sound(self, part: Audio, rate: int, start: int = 0, most: int | None = None) -> MediaContent:
        return _content(self._samples(part, rate)[start : None if most is None else start + most], rate)


class Film:
    """A video for a model that sees pictures: a frame for each second, or fewer, with the sound up to the next one.

    With `stack_frames` the other frames of that time are joined in one picture."""

    def __init__(self, reader: MediaExpander, part: Video, rate: int, options: Mapping[str, int]) -> None:
        """`rate`: 0 if the model does not hear."""
        given = reader.decoder.limits
        stacked = options.get("stack_frames", 1)
        per_second = options.get("frames_per_second", given.frames_per_second)
        most = options.get("max_frames", given.sampled_frames)
        self._limits = replace(
            given,
            frames_per_second=per_second * stacked,
            sampled_frames=most * stacked,
            frame_pixels=given.frame_pixels * given.sampled_frames // max(most * stacked, given.sampled_frames),
        )
        self.name = f"{part.digest}@{rate}/{per_second}/{most}/{stacked}"
        self._reader, self._part, self._rate = reader, part, rate
        times = self._video.times
        is_spread = len(times) >= most * stacked
        length = max(part.seconds, times[-1]) / most if is_spread else 1 / per_second
        slots = [int((time + 1e-3) / length) for time in times] if stacked > 1 else list(range(len(times)))
        self.starts = [place for place, slot in enumerate(slots) if place == 0 or slot != slots[place - 1]]
        """The index of each frame that is shown by itself."""

    @property
    def _video(self) -> VideoFrames:
        return self._reader.read_video(self._part, self._rate, self._limits, self.name)

    def frame(self, place: int) -> MediaContent:
        return _content(self._video.frames[self.starts[place]])

    def others(self, place: int) -> range:
        """The indices of the frames up to the next one that is shown by itself."""
        stop = self.starts[place + 1] if place + 1 < len(self.starts) else len(self._video.times)
        return range(self.starts[place] + 1, stop)

    def stacked(self, place: int) -> MediaContent:
        """The other frames, in rows, from left to right."""
        import numpy as np

        frames = [self._video.frames[index] for index in self.others(place)]
        columns = math.ceil(math.sqrt(len(frames)))
        blank = np.full_like(frames[0], 255)
        frames += [blank] * (-len(frames) % columns)
        rows = [np.concatenate(frames[at : at + columns], axis=1) for at in range(0, len(frames), columns)]
        return _content(np.concatenate(rows, axis=0))

    def sound(self, place: int) -> Sound:
        """The sound up to the next frame that is shown by itself, or to the end."""
        video = self._video
        times = [video.times[index] for index in self.starts]
        start = round(times[place] * video.sample_rate) if place else 0
        return video.sound[start : round(times[place + 1] * video.sample_rate) if place + 1 < len(times) else None]

    def heard(self, place: int) -> MediaContent:
        return _content(self.sound(place), self._rate)


def _with_number(item: MediaItem, texts: Mapping[str, str], counts: Counter[str]) -> MediaItem:
    """For a model that numbers its pictures, unless `use_image_id` is 0."""
    number = counts[item.kind]
    counts[item.kind] += 1
    text = texts.get(item.kind) if dict(item.options).get("use_image_id", 1) else None
    return item if text is None else replace(item, placeholder=text.replace("{}", str(number)) + item.placeholder)


def _content(array: Picture | Sound, rate: int = 0) -> MediaContent:
    return MediaContent(array.tobytes(), array.shape, array.dtype.name, rate)
