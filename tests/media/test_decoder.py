"""Decoding of the supported formats, and files that are refused."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO

import numpy as np
import pillow_heif
import psutil
import pytest
from PIL import Image

from palaver.media import BadMedia, MediaDecoder, MediaLimits
from palaver.media.decoder import wav_from_raw
from palaver.media.video import frame_times
from tests import media_files

pillow_heif.register_heif_opener()


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder()
    yield decoder
    decoder.close()


@pytest.mark.parametrize(
    ("format", "media_type"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("GIF", "image/gif"),
        ("AVIF", "image/avif"),
        ("HEIF", "image/heic"),
    ],
)
def test_decodes_pictures(decoder: MediaDecoder, format: str, media_type: str) -> None:
    data = media_files.picture(format, (64, 48))
    info, pixels = decoder.inspect(data), decoder.picture(data)
    assert (info.kind, info.media_type, info.width, info.height) == ("image", media_type, 64, 48)
    assert pixels.shape == (48, 64, 3)
    assert np.abs(pixels.astype(int) - media_files.RED).max() < 12


def test_turns_a_picture_upright_and_drops_its_metadata(decoder: MediaDecoder) -> None:
    image = Image.new("RGB", (4, 2), media_files.RED)
    image.putpixel((0, 0), media_files.BLUE)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    file = BytesIO()
    image.save(file, "PNG", exif=exif)
    info, pixels = decoder.inspect(file.getvalue()), decoder.picture(file.getvalue())
    assert (info.width, info.height) == (2, 4)
    assert pixels.shape == (4, 2, 3)
    assert tuple(pixels[0, 1]) == media_files.BLUE


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [("RGBA", (0, 0, 0, 0), 255), ("LA", (0, 0), 255), ("I;16", 0x8000, 128), ("L", 7, 7), ("1", 1, 255)],
)
def test_converts_every_mode_to_rgb(decoder: MediaDecoder, mode: str, colour: object, expected: int) -> None:
    file = BytesIO()
    Image.new(mode, (3, 3), colour).save(file, "PNG")  # type: ignore[arg-type]
    pixels = decoder.picture(file.getvalue())
    assert (pixels == expected).all()


def test_takes_the_first_frame_of_an_animation(decoder: MediaDecoder) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (media_files.RED, media_files.BLUE)]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert tuple(decoder.picture(file.getvalue())[0, 0]) == media_files.RED


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (media_files.sound("WAV"), "audio/wav"),
        (media_files.sound("FLAC"), "audio/flac"),
        (media_files.sound("OGG"), "audio/ogg"),
        (media_files.sound("OGG", rate=48_000, subtype="OPUS"), "audio/ogg"),
        (media_files.sound("MP3", rate=44_100), "audio/mpeg"),
        (media_files.m4a(), "audio/mp4"),
        (media_files.video("webm", 0.5, None, "libopus"), "audio/webm"),
        (wav_from_raw(media_files.tone().tobytes()), "audio/wav"),
    ],
    ids=["wav", "flac", "vorbis", "opus", "mp3", "m4a", "webm", "raw"],
)
def test_decodes_sound_to_mono_at_the_given_rate(decoder: MediaDecoder, data: bytes, media_type: str) -> None:
    info = decoder.inspect(data)
    assert (info.kind, info.media_type) == ("audio", media_type)
    assert info.seconds == pytest.approx(0.5, abs=0.05)
    for rate in (16_000, 24_000):
        samples = decoder.sound(data, rate)
        assert samples.dtype == np.float32
        assert len(samples) == pytest.approx(0.5 * rate, rel=0.1)
        spectrum = np.abs(np.fft.rfft(samples))
        assert spectrum.argmax() * rate / len(samples) == pytest.approx(440, abs=5)


@pytest.mark.parametrize(
    ("format", "video_codec", "audio_codec", "media_type"),
    [
        ("mp4", "mpeg4", "aac", "video/mp4"),
        ("mov", "mpeg4", "aac", "video/quicktime"),
        ("webm", "libvpx", "libopus", "video/webm"),
        ("mp4", "mpeg4", None, "video/mp4"),
    ],
)
def test_decodes_a_frame_per_second_and_the_sound(
    decoder: MediaDecoder, format: str, video_codec: str, audio_codec: str | None, media_type: str
) -> None:
    data = media_files.video(format, 3.0, video_codec, audio_codec)
    info, decoded = decoder.inspect(data), decoder.video(data)
    assert (info.kind, info.media_type, info.width, info.height) == ("video", media_type, 64, 48)
    assert info.seconds == pytest.approx(3.0, abs=0.1)
    assert info.has_sound == (audio_codec is not None)
    assert decoded.times == (0.0, 1.0, 2.0)
    assert decoded.frames.shape == (3, 48, 64, 3)
    assert len(decoded.sound) == pytest.approx(48_000 if audio_codec else 0, abs=200)


def test_spreads_the_frames_of_a_long_video_evenly() -> None:
    decoder = MediaDecoder(MediaLimits(sampled_frames=4))
    try:
        decoded = decoder.video(media_files.video(seconds=20.0, audio_codec=None))
    finally:
        decoder.close()
    assert decoded.times == (0.0, 5.0, 10.0, 15.0)
    greys = decoded.frames[:, 0, 0, 0].astype(int)
    assert np.abs(greys - [0, 25, 50, 75]).max() < 12


def test_frame_times() -> None:
    limits = MediaLimits()
    assert frame_times(2.5, limits) == [0.0, 1.0, 2.0]
    assert len(frame_times(64, limits)) == 64
    assert frame_times(128, limits) == [2.0 * index for index in range(64)]
    assert frame_times(1, replace(limits, frames_per_second=4)) == [0.0, 0.25, 0.5, 0.75]


BODY = (
    '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Rivers</w:t></w:r></w:p>'
    '<w:p><w:r><w:t xml:space="preserve">The </w:t></w:r><w:r><w:t>Rhine</w:t><w:tab/><w:t>flows.</w:t></w:r>'
    "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
    "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>one</w:t></w:r></w:p>"
    "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>two</w:t></w:r></w:p>"
    "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc></w:tr>"
    "</w:tbl>"
)


def test_reads_the_text_of_a_docx(decoder: MediaDecoder) -> None:
    data = media_files.docx(BODY)
    assert decoder.inspect(data).kind == "document"
    assert decoder.document_text(data) == "# Rivers\n\nThe Rhine\tflows.\n\n- one\n- two\na | b"


PAGE = """<!-- saved --><!DOCTYPE html><html><head><title>Rivers</title><style>p { color: red }</style>
<script>if (1 < 2) alert("<p>no</p>")</script></head><body><h1>The  Rhine</h1><p>It <b>flows</b>
north&nbsp;&amp; west.<ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr></table>
<pre>x = 1\n  y</pre><img alt="A map"></body></html>"""


def test_reads_the_text_of_a_page(decoder: MediaDecoder) -> None:
    text = decoder.document_text(PAGE.encode())
    assert text == ("Rivers\n\n# The Rhine\n\nIt flows north & west.\n\n- one\n- two\n\na | b\n\nx = 1\n  y\n\nA map")
    latin = '<html><meta charset="iso-8859-1"><p>Zürich'.encode("latin-1")
    assert decoder.document_text(latin) == "Zürich"


@pytest.mark.parametrize("charset", ["nonsense", "idna", "punycode", "undefined"])
def test_a_page_in_no_real_charset_is_read_as_windows_1252(decoder: MediaDecoder, charset: str) -> None:
    page = f'<html><meta charset="{charset}"><p>Zürich €5'.encode("windows-1252")
    assert decoder.document_text(page) == "Zürich €5"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (media_files.docx("<w:p/>" * 2_000_000), "would be unpacked to 12,000,"),
        (media_files.docx(BODY)[:-40], "type that is not supported"),
        (media_files.docx(BODY, '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">]>'), "is damaged"),
        (media_files.docx("<w:p>"), "is damaged"),
        (media_files.docx(""), "has no text"),
        (b"<html><script>x</script></html>", "has no text"),
    ],
)
def test_hostile_documents_are_refused(decoder: MediaDecoder, data: bytes, reason: str) -> None:
    with pytest.raises(BadMedia, match=reason):
        decoder.document_text(data, "a.docx")


def test_reads_the_text_of_a_pdf(decoder: MediaDecoder) -> None:
    data = media_files.pdf("Page one", "Page two")
    assert decoder.inspect(data).kind == "document"
    assert decoder.document_text(data) == "Page one\n\nPage two"


def test_names_what_a_file_is_not(decoder: MediaDecoder) -> None:
    with pytest.raises(BadMedia, match=r"^a.png is not sound\.$"):
        decoder.sound(media_files.picture(), name="a.png")
    with pytest.raises(BadMedia, match=r"^a.m4a has no pictures: it is sound only\.$"):
        decoder.video(media_files.video(video_codec=None), name="a.m4a")


def huge_png() -> bytes:
    """A small PNG that claims about a gigabyte of pixels."""
    data = bytearray(media_files.picture("PNG"))
    data[16:24] = struct.pack(">II", 30_000, 12_000)
    return bytes(data)


def huge_gif() -> bytes:
    data = bytearray(media_files.picture("GIF"))
    data[6:10] = struct.pack("<HH", 60_000, 60_000)
    return bytes(data)


def long_wav(seconds: int) -> bytes:
    """Half a second of sound whose header announces more."""
    data = bytearray(media_files.sound("WAV"))
    place = data.index(b"data")
    data[place + 4 : place + 8] = struct.pack("<I", 32_000 * seconds)
    return bytes(data)


def with_archive() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return media_files.picture("JPEG") + file.getvalue()


def with_markup() -> bytes:
    data = media_files.picture("GIF")
    comment = b"<script>alert(1)</script>"
    place = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:place] + b"\x21\xfe" + bytes([len(comment)]) + comment + b"\0" + data[place:]


HOSTILE = {
    "a PNG that claims a gigabyte": (huge_png(), "at most 64,000,000 are accepted"),
    "a GIF that claims 10 GB": (huge_gif(), "at most 64,000,000 are accepted"),
    "a 10-hour header": (long_wav(36_000), "is 36,000 s long"),
    "a header longer than its file": (long_wav(60), "is truncated"),
    "a renamed EXE": (b"MZ\x90\0\3\0\0\0" + bytes(500), "of a type that is not supported"),
    "an ELF": (b"\x7fELF" + bytes(500), "of a type that is not supported"),
    "an SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><script/></svg>', "of a type that is not supported"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "of a type that is not supported"),
    "a truncated MP4": (media_files.video()[:-2000], "is truncated"),
    "half an MP4": (media_files.video()[:5000], "is truncated"),
    "a JPEG that is an archive": (with_archive(), "is a ZIP archive as well"),
    "a GIF that is a page": (with_markup(), "is two kinds of file at once"),
    "nothing": (b"", "is empty"),
    "a signature alone": (b"\x89PNG\r\n\x1a\n", "is truncated"),
    "a JPEG signature alone": (b"\xff\xd8\xff", "is damaged"),
    "a PDF without pages": (b"%PDF-1.7\n%%EOF", "is damaged"),
}


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.replace(" ", "-"))
def test_refuses_bombs_and_lies_with_one_sentence(decoder: MediaDecoder, case: str) -> None:
    data, why = HOSTILE[case]
    with pytest.raises(BadMedia, match=f"^x {why}|^x .*{why}") as caught:
        decoder.inspect(data, "x")
    assert str(caught.value).count(". ") == 0
    assert str(caught.value).endswith(".")


def test_refuses_what_is_beyond_the_limits() -> None:
    decoder = MediaDecoder(MediaLimits(bytes=20_000, pixels=40, seconds=0.4, frames=10))
    try:
        with pytest.raises(BadMedia, match="has 8 × 6 pixels"):
            decoder.picture(media_files.picture("WEBP"))
        with pytest.raises(BadMedia, match="at most 0 s are accepted"):
            decoder.sound(media_files.sound("FLAC"))
        with pytest.raises(BadMedia, match="is larger than 0 MB"):
            decoder.inspect(bytes(20_001))
    finally:
        decoder.close()


def test_a_bomb_takes_no_memory_of_this_process(decoder: MediaDecoder) -> None:
    """A PNG of 60 million pixels compresses to 60 KB: it is within the limits and decoded in the other process."""
    file = BytesIO()
    Image.new("1", (20_000, 3_000)).save(file, "PNG")
    decoder.inspect(file.getvalue())
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        info = decoder.inspect(file.getvalue())
        with pytest.raises(BadMedia):
            decoder.inspect(huge_png())
    assert (info.width, info.height) == (20_000, 3_000)
    assert psutil.Process().memory_info().rss - before < 32 << 20


def test_decodes_again_after_the_process_died(decoder: MediaDecoder) -> None:
    data = media_files.picture()
    decoder.picture(data)
    process = decoder._sandbox._forks.process
    assert process is not None
    process.kill()
    process.wait()
    assert decoder.picture(data).shape == (6, 8, 3)


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"abc", "neither"), (b"", "neither"), (np.array([np.nan], "<f4").tobytes(), "not numbers")],
)
def test_refuses_raw_sound_that_is_none(data: bytes, why: str) -> None:
    with pytest.raises(BadMedia, match=why):
        wav_from_raw(data)
