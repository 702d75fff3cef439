"""Pictures by Pillow. Runs in the sandbox's process."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps

from palaver.media.base import BadMedia, MediaInfo, MediaLimits, Picture
from palaver.media.headers import check_pixels

_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
    "image/avif": "AVIF",
    "image/heic": "HEIF",
}
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_BACKGROUND = (255, 255, 255)


def load_plugins() -> None:
    Image.init()
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()


def inspect(data: bytes, media_type: str, limits: MediaLimits) -> MediaInfo:
    with _open(data, media_type, limits) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _SIDEWAYS:
            width, height = height, width
        return MediaInfo("image", media_type, width, height)


def decode(data: bytes, media_type: str, limits: MediaLimits) -> Picture:
    """Applies the orientation and drops all other metadata. Transparent pixels become white."""
    with _open(data, media_type, limits) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return np.asarray(_to_rgb(image))


def _open(data: bytes, media_type: str, limits: MediaLimits) -> Image.Image:
    """Reads the header only."""
    if media_type == "image/heic" and "HEIF" not in Image.OPEN:
        raise BadMedia("", "is a HEIC picture, which needs the package pillow-heif: install palaver[heic]")
    Image.MAX_IMAGE_PIXELS = None  # checked here, before decoding
    image = Image.open(io.BytesIO(data), formats=[_FORMATS[media_type]])
    check_pixels(*image.size, "", limits)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits
        return Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        canvas = Image.new("RGB", image.size, _BACKGROUND)
        rgba = image.convert("RGBA")
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")
