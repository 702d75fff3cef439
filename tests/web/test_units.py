"""The page's own tests of its state and transport, and what its type checker says."""

from __future__ import annotations

import runpy
import subprocess

import pytest

from tests.web.conftest import ROOT


@pytest.mark.parametrize("script", [pytest.param("test"), pytest.param("check", marks=pytest.mark.slow)])
def test_the_page_holds_what_it_promises(built: None, script: str) -> None:
    environment = runpy.run_path(str(ROOT / "web" / "build.py"))["node_environment"]()
    done = subprocess.run(
        ["npm", "run", script], cwd=ROOT / "web", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
