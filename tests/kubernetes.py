"""The documented fields of the Kubernetes objects and of the compose file that `deploy/` uses. Others are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?$")]
Label = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Labels = dict[Label, str]
"""Values must be strings: an unquoted `true` or `8080` is refused by the server."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name | None = None
    labels: Labels = {}
    annotations: Labels = {}


class SecretKey(Strict):
    name: Name
    key: str


class ValueFrom(Strict):
    secretKeyRef: SecretKey


class Variable(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")]
    value: str | None = None
    valueFrom: ValueFrom | None = None


class HttpGet(Strict):
    path: Annotated[str, Field(pattern="^/")]
    port: Port | Name


class TcpSocket(Strict):
    port: Port | Name


class Probe(Strict):
    httpGet: HttpGet | None = None
    tcpSocket: TcpSocket | None = None
    initialDelaySeconds: int = 0
    periodSeconds: int = 10
    timeoutSeconds: int = 1
    failureThreshold: int = 3


class Resources(Strict):
    limits: dict[str, Quantity] = {}
    requests: dict[str, Quantity] = {}


class VolumeMount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern="^/")]


class ContainerPort(Strict):
    name: Annotated[str, Field(max_length=15)]
    containerPort: Port


class Container(Strict):
    name: Name
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[Variable] = []
    ports: list[ContainerPort] = []
    readinessProbe: Probe | None = None
    livenessProbe: Probe | None = None
    resources: Resources = Resources()
    volumeMounts: list[VolumeMount] = []


class Claim(Strict):
    claimName: Name


class EmptyDir(Strict):
    medium: Literal["Memory", ""] = ""
    sizeLimit: Quantity | None = None


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None


class PodSecurity(Strict):
    fsGroup: int | None = None


class PodSpec(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []
    terminationGracePeriodSeconds: int = 30
    nodeSelector: Labels = {}
    securityContext: PodSecurity = PodSecurity()


class PodTemplate(Strict):
    metadata: Metadata = Metadata()
    spec: PodSpec


class Selector(Strict):
    matchLabels: Labels


class RollingUpdate(Strict):
    maxUnavailable: int | str
    maxSurge: int | str


class Strategy(Strict):
    rollingUpdate: RollingUpdate


class DeploymentSpec(Strict):
    replicas: int
    selector: Selector
    strategy: Strategy
    template: PodTemplate


class Deployment(Strict):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: DeploymentSpec


class ServicePort(Strict):
    name: Name
    port: Port
    targetPort: Port | Name


class ServiceSpec(Strict):
    selector: Labels
    ports: list[ServicePort]


class KubernetesService(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class BudgetSpec(Strict):
    minAvailable: int
    selector: Selector


class DisruptionBudget(Strict):
    apiVersion: Literal["policy/v1"]
    kind: Literal["PodDisruptionBudget"]
    metadata: Metadata
    spec: BudgetSpec


class PolicyPeer(Strict):
    podSelector: Selector


class PolicyPort(Strict):
    port: Port | Name


class Ingress(Strict):
    sources: list[PolicyPeer] = Field(default=[], alias="from")
    ports: list[PolicyPort] = []


class PolicySpec(Strict):
    podSelector: Selector
    policyTypes: list[Literal["Ingress", "Egress"]]
    ingress: list[Ingress]


class NetworkPolicy(Strict):
    apiVersion: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: PolicySpec


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(Strict):
    groupName: Name
    replicas: int
    minReplicas: int
    maxReplicas: int
    rayStartParams: dict[str, str]
    template: PodTemplate


class RayCluster(Strict):
    rayVersion: str
    enableInTreeAutoscaling: bool = False
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "None"]


class RayServiceSpec(Strict):
    upgradeStrategy: UpgradeStrategy
    serveConfigV2: str
    rayClusterConfig: RayCluster


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


KubernetesObject = Deployment | KubernetesService | DisruptionBudget | NetworkPolicy | RayService


class HealthCheck(Strict):
    test: list[str]
    interval: str
    timeout: str = "30s"
    retries: int = 3
    start_period: str = "0s"


class Build(Strict):
    context: str
    dockerfile: str


class Dependency(Strict):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class ComposeService(Strict):
    image: str
    build: Build | None = None
    entrypoint: list[str] = []
    command: list[str] = []
    environment: dict[str, str] = {}
    volumes: list[Annotated[str, Field(pattern=r"^[a-z]+:/")]] = []
    networks: list[str] = []
    ports: list[str] = []
    shm_size: str = ""
    restart: Literal["no", "always", "unless-stopped", "on-failure"] = "no"
    stop_grace_period: str = "10s"
    depends_on: list[str] | dict[str, Dependency] = []
    healthcheck: HealthCheck | None = None


class Compose(Strict):
    services: dict[str, ComposeService]
    networks: dict[str, dict[str, Any]]
    volumes: dict[str, dict[str, Any]]
