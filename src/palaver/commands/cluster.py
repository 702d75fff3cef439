"""`palaver cluster`: engine replicas on Ray Serve."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaver.commands import strings
from palaver.commands.options import ALL_ENGINE_FLAGS, EngineFlags, report_errors, with_engine_flags
from palaver.errors import BadParameter, EngineError

if TYPE_CHECKING:
    from palaver.chat.deployment import EngineDeployment

cluster = typer.Typer(help=strings.CLUSTER, no_args_is_help=True)
AUTH_MODE, TOKENS = "RAY_AUTH_MODE", "token"
PORT_VARIABLE = "RAY_GCS_SERVER_PORT"
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error"}
"""Ray reports nothing to its makers, and its own warnings go to its log files."""
_REPLICAS = re.compile(r"(\d+)(?:-(\d+))?")

ModelsArgument = Annotated[list[str], typer.Argument(metavar="MODEL...", help=strings.CLUSTER_MODELS)]
HostOption = Annotated[str, typer.Option("--host", metavar="ADDRESS", help=strings.CLUSTER_HOST)]
ReplicasOption = Annotated[str, typer.Option("--replicas", metavar="N", help=strings.CLUSTER_REPLICAS)]
CpusOption = Annotated[float, typer.Option("--cpus", metavar="N", min=0, help=strings.CLUSTER_CPUS)]
GpusOption = Annotated[float, typer.Option("--gpus", metavar="N", min=0, help=strings.CLUSTER_GPUS)]
SlotsOption = Annotated[int, typer.Option("--slots", metavar="N", min=1, help=strings.CLUSTER_SLOTS)]


@cluster.command(help=strings.CLUSTER_UP)
@with_engine_flags(*ALL_ENGINE_FLAGS)
def up(
    models: ModelsArgument,
    host: HostOption = "",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help=strings.CLUSTER_PORT)] = 6379,
    address: Annotated[str, typer.Option("--address", metavar="ADDRESS", help=strings.CLUSTER_ADDRESS)] = "",
    replicas: ReplicasOption = "1",
    cpus: CpusOption = 1.0,
    gpus: GpusOption = 0.0,
    slots: SlotsOption = 8,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
) -> None:
    """Starts a cluster, which ends with this process, or deploys on a running one and returns."""
    with report_errors():
        _check_ray()
        deployments = _deployments(models, replicas, cpus, gpus, slots, flags)
        own = "" if address else _start_head(host, port)
        if address:
            from palaver.engines.cluster.engine import connect

            connect(address, 0)
        _deploy(deployments)
        for one in deployments:
            count = f"{one.min_replicas}-{one.max_replicas}" if one.min_replicas < one.max_replicas else replicas
            _print(strings.CLUSTER_DEPLOYED.format(model=one.model, replicas=count))
        if own:
            _print(strings.CLUSTER_JOINING.format(address=own))
            _wait()


@cluster.command(help=strings.CLUSTER_CONFIG)
@with_engine_flags(*ALL_ENGINE_FLAGS)
def config(
    models: ModelsArgument,
    replicas: ReplicasOption = "1",
    cpus: CpusOption = 1.0,
    gpus: GpusOption = 0.0,
    slots: SlotsOption = 8,
    flags: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
) -> None:
    """Needs no Ray."""
    import yaml

    from palaver.chat.deployment import serve_config

    with report_errors():
        found = serve_config(_deployments(models, replicas, cpus, gpus, slots, flags))
    print(yaml.safe_dump(found, sort_keys=False), end="")


@cluster.command(help=strings.CLUSTER_JOIN)
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help=strings.CLUSTER_NODE_ADDRESS)],
    host: HostOption = "",
    cpus: Annotated[
        int | None, typer.Option("--cpus", metavar="N", min=0, help=strings.CLUSTER_NODE_CPUS, show_default=False)
    ] = None,
) -> None:
    """Becomes `ray start`, which runs until it is ended."""
    with report_errors():
        _check_ray()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
        command += [f"--node-ip-address={_private_address(host)}", "--disable-usage-stats"]
        command += [] if cpus is None else [f"--num-cpus={cpus}"]
    sys.stdout.flush()
    os.execv(sys.executable, command)


@cluster.command(help=strings.CLUSTER_STATUS)
def status() -> None:
    with report_errors():
        _check_ray()
        from palaver.engines.cluster.engine import DEPLOYMENT, connect

        connect("auto", 0)
        from ray import serve

        found = serve.status().applications
        for name, application in sorted(found.items()):
            deployment = application.deployments.get(DEPLOYMENT)
            states = {} if deployment is None else deployment.replica_states
            replicas = ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()))
            print(strings.CLUSTER_REPLICA_LINE.format(model=name, status=application.status.lower(), replicas=replicas))
            if deployment is not None and deployment.message:
                print(f"  {deployment.message}")
        if not found:
            print(strings.CLUSTER_NO_MODELS)


def check_private(host: str) -> str:
    """Raises BadParameter unless the address is that of one private interface, or of the loopback."""
    from palaver.address_guard import is_public

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise BadParameter("--host", host, strings.NOT_AN_ADDRESS) from None
    if address.is_unspecified or address.is_multicast or is_public(address):
        raise BadParameter("--host", host, strings.PUBLIC_CLUSTER)
    return host


def check_interfaces(addresses: Iterable[str]) -> None:
    """Raises BadParameter if the machine has a public address: Ray listens on all of them, whatever it is told."""
    from palaver.address_guard import is_public

    for text in addresses:
        if is_public(ipaddress.ip_address(text.partition("%")[0])):
            raise BadParameter("--host", text, strings.PUBLIC_MACHINE)


def _private_address(host: str) -> str:
    """The address by which other nodes know this one. Ray takes that of the machine for the loopback."""
    import psutil
    from ray._private.services import resolve_ip_for_localhost
    from ray.util import get_node_ip_address

    found = check_private(resolve_ip_for_localhost(check_private(host)) if host else get_node_ip_address())
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    check_interfaces(one.address for interface in interfaces for one in interface if one.family in families)
    return found


def _check_ray() -> None:
    """Ray gets tokens before it is imported. Raises EngineError if it is not installed."""
    if os.environ.setdefault(AUTH_MODE, TOKENS) != TOKENS:
        raise BadParameter(AUTH_MODE, os.environ[AUTH_MODE], strings.NO_CLUSTER_TOKEN)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if find_spec("ray") is None:
        raise EngineError(strings.NO_RAY)


def _start_head(host: str, port: int) -> str:
    """Starts a cluster that ends with this process. Returns its address."""
    import ray

    from palaver.engines.cluster.engine import NAMESPACE

    own = _private_address(host)
    os.environ[PORT_VARIABLE] = str(port)
    ray.init(
        namespace=NAMESPACE, include_dashboard=False, log_to_driver=False, configure_logging=False, _node_ip_address=own
    )
    address = ray.get_runtime_context().gcs_address
    _print(strings.CLUSTER_STARTED.format(address=address))
    return str(address)


def _deploy(deployments: Sequence[EngineDeployment]) -> None:
    from ray import serve

    from palaver.chat.deployment import build
    from palaver.engines.cluster.engine import application_name

    serve.start(proxy_location="Disabled")
    serve.run_many([serve.RunTarget(build(one), application_name(one.model), None) for one in deployments])


def _wait() -> None:
    import signal
    import threading

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    import ray

    ray.shutdown()


def _deployments(
    models: Sequence[str], replicas: str, cpus: float, gpus: float, slots: int, flags: EngineFlags
) -> list[EngineDeployment]:
    from palaver.chat.deployment import EngineDeployment, given_options

    match = _REPLICAS.fullmatch(replicas.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or match[1]) if match else 0
    if match is None or not low <= high or high < 1:
        raise BadParameter("--replicas", replicas, strings.BAD_REPLICAS)
    options = given_options(flags.load_options())
    options.pop("engine_key", None)
    values: dict[str, Any] = {"cpus": cpus, "gpus": gpus, "slots": slots, "min_replicas": low, "max_replicas": high}
    return [EngineDeployment(model=_absolute(model), options=options, **values) for model in models]


def _absolute(model: str) -> str:
    """A model on disk, as other processes find it."""
    return str(Path(model).resolve()) if os.sep in model and Path(model).exists() else model


def _print(text: str) -> None:
    print(f"palaver: {text}", file=sys.stderr, flush=True)
