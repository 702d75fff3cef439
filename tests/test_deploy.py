"""The files under `deploy/` say what the code takes, and name the versions of the constraints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from palaver.chat.deployment import EngineDeployment
from palaver.cli import app
from tests.kubernetes import Compose, KubernetesObject, PodSpec

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


def pod_specs(value: Any) -> list[dict[str, Any]]:
    """Every pod template within an object."""
    if isinstance(value, list):
        return [found for one in value for found in pod_specs(one)]
    if not isinstance(value, dict):
        return []
    return [value["spec"]] if "containers" in value.get("spec", {}) else pod_specs(list(value.values()))


@pytest.mark.parametrize("name", ["engines.yaml", "fronts.yaml", "network.yaml"])
def test_the_manifests_have_only_fields_that_kubernetes_and_kuberay_know(name: str) -> None:
    for one in documents(f"kubernetes/{name}"):
        TypeAdapter[Any](KubernetesObject).validate_python(one)
        for found in pod_specs(one):
            pod = PodSpec.model_validate(found)
            volumes = {volume.name for volume in pod.volumes}
            for container in pod.containers:
                assert {mount.name for mount in container.volumeMounts} == volumes
                assert all((one.value is None) != (one.valueFrom is None) for one in container.env)
                ports = {port.name for port in container.ports}
                for probe in (container.readinessProbe, container.livenessProbe):
                    action = probe and (probe.httpGet or probe.tcpSocket)
                    assert not action or not isinstance(action.port, str) or action.port in ports


def test_workers_are_ready_without_the_proxy_that_is_disabled() -> None:
    (service,) = documents("kubernetes/engines.yaml")
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["proxy_location"] == "Disabled"
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["port"] == 52365


def test_a_pod_has_longer_to_end_than_what_runs_in_it() -> None:
    (service,) = documents("kubernetes/engines.yaml")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > EngineDeployment(model="x").drain_seconds
    front = documents("kubernetes/fronts.yaml")[0]["spec"]["template"]["spec"]
    grace = front["containers"][0]["args"][0].split("--grace ")[1].split()[0]
    assert front["terminationGracePeriodSeconds"] > int(grace) + 10  # turns that don't stop are cancelled after ten


def test_the_compose_file_has_only_fields_that_compose_knows() -> None:
    (compose,) = documents("compose.yaml")
    known = Compose.model_validate({name: value for name, value in compose.items() if not name.startswith("x-")})
    image = (DEPLOY / "Dockerfile").read_text()
    for service in known.services.values():
        assert set(service.networks) <= set(known.networks)
        assert set(service.depends_on) <= set(known.services)
        for mounted in service.volumes:
            volume, _, folder = mounted.partition(":")
            assert volume in known.volumes
            if service.image == "palaver":  # otherwise its owner would be root, who does not run there
                assert folder in image


def test_every_service_of_the_compose_file_uses_the_token_and_publishes_no_port_of_ray() -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    for name in ("engines", "front-1", "front-2"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"
    assert [name for name, one in services.items() if "ports" in one] == ["proxy"]
