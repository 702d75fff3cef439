"""The files under `deploy/` say what the code takes, and name the versions of the constraints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from palaver.chat.deployment import EngineDeployment
from palaver.cli import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_the_engines_are_configured_as_the_command_does_it() -> None:
    (service,) = documents("kubernetes/engines.yaml")
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == PINNED["ray"]
    configured = yaml.safe_load(service["spec"]["serveConfigV2"])
    printed = CliRunner().invoke(app, ["cluster", "config", "Qwen/Qwen3-8B", "--replicas", "1-4", "--gpus", "1"])
    expected = yaml.safe_load(printed.stdout)
    for config in (configured, expected):
        config["applications"][0]["args"] = EngineDeployment(**config["applications"][0]["args"])
    configured["applications"][0]["args"].resources = {}
    assert configured == expected


def test_the_parts_agree_on_their_names() -> None:
    (service,) = documents("kubernetes/engines.yaml")
    fronts, *_ = documents("kubernetes/fronts.yaml")
    (container,) = fronts["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["RAY_HEAD"] == f"{service['metadata']['name']}-head-svc:6379"
    model = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]["model"]
    assert variables["PALAVER_MODEL"] == model
    labels = fronts["spec"]["template"]["metadata"]["labels"]
    policy = documents("kubernetes/network.yaml")[0]["spec"]["ingress"][0]["from"]
    assert any(labels.items() >= one["podSelector"]["matchLabels"].items() for one in policy)


def test_every_service_of_the_compose_file_uses_the_token_and_publishes_no_port_of_ray() -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    for name in ("engines", "front-1", "front-2"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"
    assert [name for name, one in services.items() if "ports" in one] == ["proxy"]
