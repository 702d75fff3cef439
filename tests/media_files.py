"""Small media files, made by the libraries that write them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

RED, BLUE = (220, 20, 20), (20, 20, 220)


def picture(format: str = "PNG", size: tuple[int, int] = (8, 6), colour: Sequence[int] = RED, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, tuple(colour)).save(file, format, **options)
    return file.getvalue()


def tone(seconds: float = 0.5, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def sound(format: str = "WAV", seconds: float = 0.5, rate: int = 16_000, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate), rate, format=format, **options)
    return file.getvalue()


def m4a(seconds: float = 0.5) -> bytes:
    return video("ipod", seconds, video_codec=None)


def video(
    format: str = "mp4",
    seconds: float = 3.0,
    video_codec: str | None = "mpeg4",
    audio_codec: str | None = "aac",
    size: tuple[int, int] = (64, 48),
    frames_per_second: int = 5,
) -> bytes:
    """A video whose frame number n is filled with the grey n (modulo 256), with a tone."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as container:
        picture_stream = sound_stream = None
        if video_codec:
            picture_stream = container.add_stream(video_codec, rate=frames_per_second)
            picture_stream.width, picture_stream.height = size
            picture_stream.pix_fmt = "yuv420p"
        if audio_codec:
            sound_stream = container.add_stream(audio_codec, rate=48_000, layout="mono")
        for index in range(int(seconds * frames_per_second)):
            if picture_stream is None:
                break
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), index % 256, np.uint8), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, frames_per_second)
            container.mux(picture_stream.encode(frame))
        if sound_stream:
            samples = tone(seconds, 48_000)[None, :]
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48_000, 0
            resampler = av.AudioResampler(format=sound_stream.codec_context.format, layout="mono", rate=48_000)
            for piece in resampler.resample(frame):
                container.mux(sound_stream.encode(piece))
        for stream in (picture_stream, sound_stream):
            if stream is not None:
                container.mux(stream.encode(None))
    return file.getvalue()


def docx(body: str, prolog: str = "") -> bytes:
    """A DOCX file with the XML of this body."""
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", '<?xml version="1.0"?><Types/>', zipfile.ZIP_STORED)
        xml = f'<w:document xmlns:w="{space}"><w:body>{body}</w:body></w:document>'
        archive.writestr("word/document.xml", f'<?xml version="1.0"?>{prolog}{xml}')
    return file.getvalue()


def pdf(*pages: str) -> bytes:
    """A PDF file with a line of text on each page."""
    writer = PdfWriter()
    for text in pages:
        page = writer.add_blank_page(200, 200)
        font = DictionaryObject(
            {
                NameObject("/Type"): NameObject("/Font"),
                NameObject("/Subtype"): NameObject("/Type1"),
                NameObject("/BaseFont"): NameObject("/Helvetica"),
            }
        )
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(content)
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()
