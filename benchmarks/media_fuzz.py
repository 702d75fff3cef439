"""Decodes damaged files: `python -m benchmarks.media_fuzz --files 10000`.

Each file is a small valid one with bytes changed, cut out, repeated or moved. Every one must be decoded or refused with
one sentence. Prints how many were decoded and refused, the slowest ones, and the memory of this process.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil

from palaver.media import BadMedia, MediaDecoder
from palaver.media.decoder import TOO_MUCH
from tests import media_files

_SIZES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


def seeds() -> dict[str, bytes]:
    return {
        "png": media_files.picture("PNG", (40, 30)),
        "jpeg": media_files.picture("JPEG", (40, 30)),
        "webp": media_files.picture("WEBP", (40, 30)),
        "gif": media_files.picture("GIF", (40, 30)),
        "avif": media_files.picture("AVIF", (40, 30)),
        "wav": media_files.sound("WAV"),
        "flac": media_files.sound("FLAC"),
        "vorbis": media_files.sound("OGG"),
        "opus": media_files.sound("OGG", rate=48_000, subtype="OPUS"),
        "mp3": media_files.sound("MP3", rate=44_100),
        "m4a": media_files.m4a(),
        "mp4": media_files.video(),
        "webm": media_files.video("webm", video_codec="libvpx", audio_codec="libopus"),
        "mov": media_files.video("mov"),
        "pdf": media_files.pdf("one", "two"),
    }


def mutate(data: bytes, rng: random.Random) -> bytes:
    """The file with one to eight changes, more of them near its header."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        end = min(len(changed), 200) if rng.random() < 0.6 else len(changed)
        place = rng.randrange(max(end, 1))
        match rng.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([rng.randrange(256)])
            case 1 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 2:
                size, order = rng.choice((2, 4)), "big" if rng.random() < 0.5 else "little"
                number = rng.choice(_SIZES) & (256**size - 1)
                changed[place : place + size] = number.to_bytes(size, "big" if order == "big" else "little")
            case 3:
                del changed[place : place + rng.randint(1, 64)]
            case 4:
                changed[place:place] = changed[place : place + rng.randint(1, 64)] * rng.randint(1, 4)
            case _:
                del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


def decode(decoder: MediaDecoder, data: bytes) -> str:
    """Inspects and decodes a file; `decoded`, or the reason of its refusal."""
    try:
        match decoder.inspect(data).kind:
            case "image":
                decoder.picture(data)
            case "audio":
                decoder.sound(data)
            case "video":
                decoder.video(data)
            case "document":
                decoder.document_text(data)
    except BadMedia as error:
        return error.why
    return "decoded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    arguments = parser.parse_args()
    samples, decoder, process = list(seeds().items()), MediaDecoder(), psutil.Process()
    decode(decoder, samples[0][1])
    before, started = process.memory_info().rss, time.perf_counter()

    def run(index: int) -> tuple[str, str, float]:
        rng = random.Random(arguments.seed * 1_000_003 + index)
        name, data = samples[index % len(samples)]
        begun = time.perf_counter()
        return name, decode(decoder, mutate(data, rng)), time.perf_counter() - begun

    with ThreadPoolExecutor(arguments.threads) as threads:
        results = list(threads.map(run, range(arguments.files)))
    decoder.close()
    outcomes = Counter((name, "decoded" if why == "decoded" else "refused") for name, why, _ in results)
    for name, _ in samples:
        print(f"{name:8} decoded {outcomes[name, 'decoded']:6,}  refused {outcomes[name, 'refused']:6,}")
    ended = [index for index, (_, why, _) in enumerate(results) if why == TOO_MUCH]
    print(f"ended at a limit or by a crash of the fork: {len(ended)} {ended[:10]}")
    slowest = sorted(((seconds, index, name) for index, (name, _, seconds) in enumerate(results)), reverse=True)[:3]
    print("slowest:", ", ".join(f"{name} number {index}: {seconds:.2f} s" for seconds, index, name in slowest))
    grown = (process.memory_info().rss - before) / 1e6
    print(f"{len(results):,} files in {time.perf_counter() - started:.0f} s; this process grew by {grown:.1f} MB")


if __name__ == "__main__":
    main()
