"""The tiles that a search found, in files of the user's cache: one for each device, version and product, so that
processes and machines that share the folder never lose what another one has written."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from palaver.engines.torch.tile_shapes import DeviceLimits, ProductShape, TileShape


class TileCache:
    """The tiles of one device. `version`: of whatever else decides how quick a tile is, such as Triton's."""

    def __init__(self, limits: DeviceLimits, version: str, folder: Path | None = None) -> None:
        """`folder`: by default the user's cache."""
        major, minor = limits.capability
        self._limits = limits
        self.folder = (folder or _default_folder()) / _file_name(f"{limits.name} {major}.{minor} {version}")

    def read(self, product: ProductShape) -> TileShape | None:
        """None where nothing was found so far, or where the file is damaged or does not suit the device."""
        try:
            stored = json.loads(self._path(product).read_text("utf-8"))["tile"]
            tile = _parse_tile(stored)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return tile if product.allows(tile, self._limits) else None

    def write(self, product: ProductShape, tile: TileShape, ratio: float) -> None:
        """Replaces the file at once, or leaves it as it is. `ratio`: the tile's time over that of the default, for
        readers of the file. Raises OSError where the folder can't be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"tile": tile._asdict(), "time_over_default": round(ratio, 4)})
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self._path(product))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def was_cut(self, product: ProductShape) -> bool:
        """Whether a process ended while it timed the product: perhaps by an error of the device."""
        return self._mark(product).exists()

    @contextmanager
    def marked(self, product: ProductShape) -> Iterator[None]:
        """Within it, the end of the process is remembered."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = self._mark(product)
        mark.touch()
        yield
        mark.unlink(missing_ok=True)

    def _mark(self, product: ProductShape) -> Path:
        return self._path(product).with_suffix(".timing")

    def _path(self, product: ProductShape) -> Path:
        kind = f"{product.weights}{' unpacked' if product.is_unpacked else ''}{' gated' if product.gated else ''}"
        sizes = f"{product.outputs}x{product.inputs} in {product.split}"
        rows = f"{'prefill' if product.has_prompts else 'decode'} {product.rows}" if product.rows else "decode"
        return self.folder / f"{_file_name(f'{kind} {sizes} {rows}')}.json"


def _default_folder() -> Path:
    from platformdirs import user_cache_path  # imported only where there is a GPU

    return user_cache_path("palaver") / "tiles"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


def _parse_tile(stored: Any) -> TileShape:
    """Raises ValueError, TypeError or KeyError unless it is a tile of whole numbers."""
    values = {name: stored[name] for name in TileShape._fields}
    if any(type(value) is not (bool if name == "early" else int) for name, value in values.items()):
        raise ValueError("no tile")
    return TileShape(**values)
