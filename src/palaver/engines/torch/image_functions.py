"""Image functions of torchvision, for the processors of transformers that have no version for Pillow.

Two image processors (LFM2-VL, Phi-4 multimodal) and all video processors call `torchvision.transforms.v2.functional`.
Palaver does without torchvision: its releases are bound to one release of torch. `import_module` imports such a module
with the few functions that image processors use, thin wrappers of torch. Where torchvision is installed, it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class InterpolationMode(Enum):
    """The values are those of torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


_SMOOTH = frozenset({InterpolationMode.BILINEAR, InterpolationMode.BICUBIC})


def resize(
    image: Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> Tensor:
    """To `size` (height, width). Integers are rounded and stay in their range."""
    if max_size is not None or len(size) != 2:
        raise NotImplementedError("a size that depends on the image's")
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    smooth = interpolation in _SMOOTH
    if not smooth and interpolation is not InterpolationMode.NEAREST_EXACT:
        raise NotImplementedError(f"interpolation {interpolation.value}")
    flat = image.reshape(-1, *image.shape[-3:])
    resized = functional.interpolate(
        flat.float(),
        size=tuple(size),
        mode=interpolation.value,
        align_corners=False if smooth else None,
        antialias=bool(antialias) and smooth,
    )
    if not image.is_floating_point():
        limits = torch.iinfo(image.dtype)
        resized = resized.round().clamp(limits.min, limits.max)
    return resized.to(image.dtype).reshape(*image.shape[:-2], *size)


def pad(
    image: Tensor, padding: Sequence[int], fill: float | Sequence[float] | None = 0, padding_mode: str = "constant"
) -> Tensor:
    """`padding` is left, top, right, bottom. `fill` is one value, or one for each channel."""
    left, top, right, bottom = padding
    sides = (left, right, top, bottom)
    if padding_mode != "constant":
        return functional.pad(image, sides, mode=padding_mode)
    values = fill if isinstance(fill, Sequence) else [fill or 0]
    if len(set(values)) == 1:
        return functional.pad(image, sides, value=float(values[0]))
    channels = (functional.pad(image[..., i, :, :], sides, value=float(value)) for i, value in enumerate(values))
    return torch.stack(tuple(channels), dim=-3)


def normalize(image: Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> Tensor:
    shift = torch.as_tensor(mean, dtype=image.dtype, device=image.device).view(-1, 1, 1)
    scale = torch.as_tensor(std, dtype=image.dtype, device=image.device).view(-1, 1, 1)
    return image.sub_(shift).div_(scale) if inplace else (image - shift) / scale


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Zeros where the crop leaves the image."""
    bottom, right = top + height, left + width
    inner = image[..., max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    rows, columns = image.shape[-2:]
    outside = (max(-left, 0), max(-top, 0), max(right - columns, 0), max(bottom - rows, 0))
    return pad(inner, outside) if any(outside) else inner


def grayscale_to_rgb(image: Tensor) -> Tensor:
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


def to_dtype(image: Tensor, dtype: torch.dtype = torch.float32, scale: bool = False) -> Tensor:
    """With `scale`, between 0..255 of bytes and 0..1 of floats."""
    if not scale or image.dtype == dtype or image.is_floating_point() == dtype.is_floating_point:
        return image.to(dtype)
    if image.is_floating_point():
        return image.mul(torch.iinfo(dtype).max + 1.0 - 1e-3).to(dtype)
    return image.to(dtype).div_(torch.iinfo(image.dtype).max)


def pil_to_tensor(image: Any) -> Tensor:
    channels = len(image.getbands())
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


def import_module(name: str) -> Any:
    """Imports a module of transformers that imports torchvision."""
    if find_spec("torchvision") is not None or name in sys.modules:
        return importlib.import_module(name)
    backends: Any = importlib.import_module("transformers.image_processing_backends")
    if getattr(backends, "tvF", None) is None:
        from PIL.Image import Resampling

        modes = {mode.name: mode for mode in InterpolationMode} | {"NEAREST": InterpolationMode.NEAREST_EXACT}
        backends.tvF = sys.modules[__name__]
        backends.pil_torch_interpolation_mapping = {kind: modes[kind.name] for kind in Resampling if kind.name in modes}
    with _pretend_installed():
        return importlib.import_module(name)


@contextmanager
def _pretend_installed() -> Iterator[None]:
    """`import torchvision` finds this module's functions while it is open."""
    here = sys.modules[__name__]
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    root, transforms, version = (ModuleType(name) for name in names[:3])
    for module, attributes in (
        (root, {"transforms": transforms}),
        (transforms, {"v2": version, "InterpolationMode": InterpolationMode, "functional": here}),
        (version, {"functional": here}),
    ):
        module.__path__ = []
        vars(module).update(attributes)
    sys.modules.update(zip(names, (root, transforms, version, here), strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
