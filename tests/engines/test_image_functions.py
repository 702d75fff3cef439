"""The stand-ins for torchvision's image functions do what Pillow does."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from palaver.engines.torch import image_functions
from palaver.engines.torch.image_functions import InterpolationMode
from tests.engines.media_reference import picture

SIZES = ((20, 31), (36, 44), (90, 60))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_resizes_as_pillow_does(size: tuple[int, int], mode: InterpolationMode) -> None:
    image = picture(5).filter(ImageFilter.GaussianBlur(3))  # at sharp edges Pillow clips in between
    ours = image_functions.resize(image_functions.pil_to_tensor(image), size, mode)
    theirs = np.asarray(image.resize((size[1], size[0]), Image.Resampling[mode.name])).transpose(2, 0, 1)
    assert ours.dtype == torch.uint8
    assert np.abs(ours.numpy().astype(int) - theirs.astype(int)).max() <= 1


def test_crops_and_pads_as_pillow_does() -> None:
    image = picture(5)
    box = (-3, -2, 50, 30)
    ours = image_functions.crop(image_functions.pil_to_tensor(image), -2, -3, 32, 53)
    assert np.array_equal(ours.numpy(), np.asarray(image.crop(box)).transpose(2, 0, 1))
    padded = image_functions.pad(image_functions.pil_to_tensor(image), (1, 2, 3, 4), fill=[9, 8, 7])
    assert padded.shape == (3, 36 + 6, 44 + 4)
    assert padded[:, 0, 0].tolist() == [9, 8, 7]
    assert torch.equal(padded[:, 2:-4, 1:-3], image_functions.pil_to_tensor(image))


def test_normalizes_and_changes_types() -> None:
    pixels = image_functions.pil_to_tensor(picture(5))
    floats = image_functions.to_dtype(pixels, torch.float32, scale=True)
    assert torch.equal(image_functions.to_dtype(floats, torch.uint8, scale=True), pixels)
    normal = image_functions.normalize(floats, [0.5, 0.4, 0.3], [0.5, 0.25, 0.2])
    assert torch.allclose(normal[1], (floats[1] - 0.4) / 0.25)
    assert image_functions.grayscale_to_rgb(pixels[:1]).shape == pixels.shape


def test_leaves_no_torchvision_behind() -> None:
    image_functions.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    assert "torchvision" not in sys.modules
