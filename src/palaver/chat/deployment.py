"""The Ray Serve application of a model: engine replicas, their number and their place.

    serve deploy FILE      with a file that `palaver cluster config` writes

names `palaver.chat.deployment:build` as its import path, and `EngineDeployment` as its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from palaver import __version__
from palaver.chat.engine_choice import LoadOptions
from palaver.chat.model_loader import ModelLoader
from palaver.engines.base import Engine
from palaver.engines.cluster.engine import DEPLOYMENT, application_name
from palaver.engines.cluster.replica import EngineReplica, LoadEngine
from palaver.phases import Vocabulary

if TYPE_CHECKING:
    from ray.serve import Application

IMPORT_PATH = "palaver.chat.deployment:build"
MAX_ONGOING = 256
"""Requests that a replica has at once, with those in its engine's queue."""
ROUTING_STATS_S = 2.0
"""How often a replica reports its load to the routers."""
_PATHS = ("template", "engine_python", "adapter", "mmproj", "draft_model", "states")


class EngineDeployment(BaseModel):
    """The arguments of a model's application."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    """A model as `palaver serve` takes it. Each machine must have it, or be able to download it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Fields of `LoadOptions`."""
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    cpus: float = Field(default=1.0, ge=0)
    """Cores that Ray reserves for a replica."""
    gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Further resources of Ray, such as one that only machines of one kind have."""
    slots: int = Field(default=8, ge=1)
    """Requests that the engine computes well at once: a conversation stays with its replica up to that load."""
    drain_seconds: float = Field(default=120.0, ge=0)
    """How long the replies of a replica that goes may take to end. Others go on at another replica."""
    upscale_seconds: float = Field(default=30.0, ge=0)
    downscale_seconds: float = Field(default=600.0, ge=0)

    @field_validator("options")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if unknown := options.keys() - {field.name for field in fields(LoadOptions)}:
            raise ValueError(f"there are no such options: {', '.join(sorted(unknown))}")
        return options

    @model_validator(mode="after")
    def _bounds(self) -> EngineDeployment:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas is less than min_replicas")
        return self

    @property
    def version(self) -> str:
        """Changes with what determines the engine."""
        what = json.dumps([__version__, self.model, self.options], sort_keys=True)
        return sha256(what.encode()).hexdigest()[:12]

    def load_options(self) -> LoadOptions:
        paths = {name: Path(value) for name, value in self.options.items() if name in _PATHS and value is not None}
        return LoadOptions(**{**self.options, **paths})


def build(args: EngineDeployment) -> Application:
    """The application: what Ray Serve's configuration file names."""
    options = args.load_options()

    async def load() -> tuple[Engine, Vocabulary]:
        model = await ModelLoader(options).load(args.model, lambda fraction, note: None)
        return model.engine, model.vocabulary

    return bind_replicas(args, load)


def bind_replicas(args: EngineDeployment, load: LoadEngine) -> Application:
    """The application of replicas that load their engine so."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    scaling: dict[str, Any] = {"num_replicas": args.max_replicas}
    if args.min_replicas < args.max_replicas:
        config = AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            target_ongoing_requests=args.slots,
            upscale_delay_s=args.upscale_seconds,
            downscale_delay_s=args.downscale_seconds,
            policy=AutoscalingPolicy(policy_function="palaver.engines.cluster.autoscaler:scale"),
        )
        scaling = {"autoscaling_config": config}
    resources: dict[str, Any] = {"num_cpus": args.cpus, "num_gpus": args.gpus, "resources": args.resources}
    deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options=resources,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=args.drain_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=5.0,
        request_router_config=RequestRouterConfig(
            request_router_class="palaver.engines.cluster.router:AffinityRouter",
            request_router_kwargs={"slots": args.slots},
            request_routing_stats_period_s=ROUTING_STATS_S,
        ),
        **scaling,
    )(EngineReplica)
    return deployment.bind(application_name(args.model), args.version, load)


def serve_config(deployments: Sequence[EngineDeployment]) -> dict[str, Any]:
    """Ray Serve's configuration of these models, for `serve deploy` or KubeRay's `serveConfigV2`."""
    applications = [
        {
            "name": application_name(one.model),
            "route_prefix": None,
            "import_path": IMPORT_PATH,
            "args": one.model_dump(exclude_defaults=True),
        }
        for one in deployments
    ]
    return {"proxy_location": "Disabled", "applications": applications}


def given_options(options: LoadOptions) -> dict[str, Any]:
    """The options that differ from the defaults, as `EngineDeployment.options` has them."""
    values = {field.name: getattr(options, field.name) for field in fields(LoadOptions)}
    neutral = LoadOptions()
    changed = {name: value for name, value in values.items() if value != getattr(neutral, name)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}
