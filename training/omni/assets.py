"""What the generators of pictures and sounds need from the machine: fonts, and espeak-ng with its English voices.

`python3 -m training.omni.assets` copies both into `.cache/omni`, to be carried to a machine that has neither.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / ".cache" / "omni"
_FONT_FOLDERS = (Path("/usr/share/fonts"), Path("/Library/Fonts"))
_FONT_NAMES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansCondensed", "DejaVuSansMono"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSansMono-Bold", "DejaVuSansCondensed-Bold"),
    *("LiberationSans-Regular", "LiberationSerif-Regular", "LiberationMono-Regular", "FreeSans", "FreeSerif"),
)
_DATA = ("en_dict", "phondata", "phonindex", "phontab", "intonations", "phondata-manifest")


@cache
def fonts() -> tuple[Path | None, ...]:
    """Pillow's own font, which is None, and those in the folder of assets."""
    return (None, *sorted((FOLDER / "fonts").glob("*.ttf")))


@cache
def espeak() -> tuple[Path, Path]:
    """The library and its data: the copies, or else those of the installed package."""
    if (FOLDER / "espeak" / "libespeak-ng.so").exists():
        return FOLDER / "espeak" / "libespeak-ng.so", FOLDER / "espeak" / "espeak-ng-data"
    package = _espeak_package()
    return package / "libespeak-ng.so", package / "espeak-ng-data"


def _espeak_package() -> Path:
    found = importlib.util.find_spec("espeakng_loader")
    if found is None or found.origin is None:
        raise RuntimeError("espeak-ng is missing: install espeakng-loader, or carry the folder .cache/omni along")
    return Path(found.origin).parent


def collect() -> None:
    """Copies fonts and espeak-ng into the folder of assets."""
    (FOLDER / "fonts").mkdir(parents=True, exist_ok=True)
    for folder in _FONT_FOLDERS:
        for path in folder.rglob("*.ttf"):
            if path.stem in _FONT_NAMES:
                shutil.copy(path, FOLDER / "fonts")
    package, into = _espeak_package(), FOLDER / "espeak"
    data = package / "espeak-ng-data"
    (into / "espeak-ng-data").mkdir(parents=True, exist_ok=True)
    shutil.copy(package / "libespeak-ng.so", into)
    for name in _DATA:
        if (data / name).exists():
            shutil.copy(data / name, into / "espeak-ng-data")
    for name in ("lang/gmw", "voices"):
        shutil.copytree(data / name, into / "espeak-ng-data" / name, dirs_exist_ok=True)


def main() -> int:
    collect()
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(f"{FOLDER}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
