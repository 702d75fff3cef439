"""Sets of parameters under a name, in a file that a person can read and edit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palaver.errors import RequestError


class NoPreset(RequestError):
    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        known = f"there are {', '.join(names)}" if names else "there are none yet: /preset save NAME makes one"
        super().__init__(f"There is no preset {name!r}; {known}.")


class Presets:
    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._read()))

    def get(self, name: str) -> dict[str, Any]:
        presets = self._read()
        if name not in presets:
            raise NoPreset(name, tuple(sorted(presets)))
        return dict(presets[name])

    def save(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._write({**self._read(), name: dict(parameters)})

    def delete(self, name: str) -> None:
        self.get(name)
        self._write({one: value for one, value in self._read().items() if one != name})

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise RequestError(f"{self._path} is no JSON: mend it or remove it.") from None
        if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
            raise RequestError(f"{self._path} must hold an object with an object for each preset.")
        return value

    def _write(self, presets: Mapping[str, Mapping[str, Any]]) -> None:
        """Beside the old file, then in its place, so that neither is ever half there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(presets, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        os.replace(new, self._path)
