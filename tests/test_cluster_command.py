"""`palaver cluster`, without a cluster."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from palaver.chat.deployment import EngineDeployment
from palaver.chat.engine_choice import RAY, LoadOptions, pick_engine
from palaver.cli import app
from palaver.commands.cluster import check_interfaces, check_private
from palaver.engines.cluster.engine import application_name, parse_address
from palaver.errors import BadParameter
from palaver.models.resolver import resolve_model


@pytest.mark.parametrize("host", ["8.8.8.8", "0.0.0.0", "::", "2001:4860:4860::8888", "::ffff:8.8.8.8", "a.host"])
def test_a_public_address_is_refused(host: str) -> None:
    with pytest.raises(BadParameter, match="--host"):
        check_private(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.7", "fd00::1", "100.64.0.9"])
def test_a_private_address_is_taken(host: str) -> None:
    assert check_private(host) == host


def test_a_machine_with_a_public_address_is_refused() -> None:
    check_interfaces(["127.0.0.1", "10.0.0.4", "fe80::1%eth0"])
    with pytest.raises(BadParameter, match=r"8\.8\.4\.4"):
        check_interfaces(["127.0.0.1", "10.0.0.4", "8.8.4.4"])


def test_tokens_can_not_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    done = CliRunner().invoke(app, ["cluster", "up", "sprout"])
    assert done.exit_code == 2
    assert "RAY_AUTH_MODE" in done.stderr


def test_the_configuration_for_an_existing_cluster() -> None:
    arguments = ["cluster", "config", "sprout", "Qwen/Qwen3-8B", "--replicas", "1-4", "--gpus", "1", "--exact"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    assert [one["name"] for one in found["applications"]] == ["sprout", "Qwen-Qwen3-8B"]
    settings = EngineDeployment(**found["applications"][1]["args"])
    assert (settings.min_replicas, settings.max_replicas, settings.gpus) == (1, 4, 1.0)
    assert settings.load_options() == LoadOptions(exact=True)


@pytest.mark.parametrize("replicas", ["0", "4-1", "many", "-1"])
def test_a_wrong_number_of_replicas_is_refused(replicas: str) -> None:
    done = CliRunner().invoke(app, ["cluster", "config", "sprout", f"--replicas={replicas}"])
    assert done.exit_code == 2


def test_the_version_changes_with_what_determines_the_engine() -> None:
    one = EngineDeployment(model="sprout", options={"exact": True})
    assert one.version == EngineDeployment(model="sprout", options={"exact": True}, max_replicas=3).version
    assert one.version != EngineDeployment(model="sprout").version
    with pytest.raises(ValueError, match="no such options"):
        EngineDeployment(model="sprout", options={"exakt": True})


def test_addresses_of_clusters() -> None:
    assert parse_address("ray://10.0.0.1:6379/Qwen-Qwen3-8B") == ("10.0.0.1:6379", "Qwen-Qwen3-8B")
    assert parse_address("ray://auto/sprout") == ("auto", "sprout")
    assert application_name("/models/a b.gguf") == "models-a-b.gguf"
    assert pick_engine(resolve_model("sprout", download=False), LoadOptions(engine="ray://auto")) == RAY
    with pytest.raises(BadParameter, match="--engine"):
        LoadOptions(engine="ray://")
