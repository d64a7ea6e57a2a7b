"""The schema of a job's file of settings: defaults, units, limits, and what must hold between them.

Reading, overriding and explaining is `trainer.settings`. Neither jax nor Ray is imported here.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from supervisor.health.store_address import fault_of, masked
from trainer.config import COUNT_MAX, CheckpointSettings, MeshSettings, TrainerSettings
from trainer.settings import (
    Origin,
    PathText,
    Relation,
    Section,
    SettingsError,
    section_of,
    show,
    walk,
)

Auto = Literal["auto"]
YEAR_S = 365 * 86400.0
Seconds = Annotated[float, Field(ge=0.01, le=YEAR_S)]
Deadline = Seconds | Auto
Limit = Annotated[int, Field(ge=-1, le=COUNT_MAX)]  # -1: no limit

RESOURCE_MIN, RESOURCE_MAX = 0.0001, 1e9
"""Ray counts resources in ten-thousandths."""

_RESOURCES_OF_RAY = {
    "CPU": "set cpus_per_worker",
    "GPU": "set gpus_per_worker",
    "memory": "leave it out: a slot holds its node's memory with the others there",
    "object_store_memory": "leave it out: nothing is stored there",
}
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:]+")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 65535


class JobSettings(Section):
    """What the job is called and where its files go."""

    name: str = Field(
        default="first", pattern=_NAME, description="names its directory, actors and keys"
    )
    run_dir: PathText = Field(
        default="runs",
        min_length=1,
        description="files go to run_dir/name; a relative path starts at this file",
    )

    @field_validator("run_dir")
    @classmethod
    def _no_url(cls, run_dir: str) -> str:
        if "://" in run_dir:
            raise ValueError(
                "must be a directory, not a URL; mount the storage as a file system and name its "
                "directory, or copy checkpoints there with a tool of your own"
            )
        return run_dir


class ClusterSettings(Section):
    """The Ray cluster and what the job takes of it."""

    address: str = Field(
        default="local",
        min_length=1,
        description='"local" = a Ray head of the job\'s own; "auto" = that of RAY_ADDRESS; else '
        "HOST:PORT of a cluster",
    )
    workers: int = Field(
        default=2, ge=1, le=100_000, description="processes that train, one a slot"
    )
    cpus_per_worker: float = Field(
        default=1.0, ge=0.0001, le=10_000.0, description="CPUs a slot holds"
    )
    gpus_per_worker: int = Field(
        default=0, ge=0, le=1024, description="GPUs a slot holds, one device each"
    )
    resources_per_worker: dict[str, float] = Field(
        default_factory=dict, description='custom resources of Ray, such as {"TPU" = 4}'
    )
    placement: Literal["pack", "spread", "strict_spread"] = Field(
        default="pack",
        description='"pack" = few nodes, "spread" = many if possible, "strict_spread" = one each',
    )
    placement_timeout_s: Seconds = Field(
        default=120.0, description="seconds until slots that fit but do not come are given up"
    )
    capacity_wait_s: float = Field(
        default=0.0,
        ge=0,
        le=YEAR_S,
        description="seconds to wait for nodes that the job lacks; 0 = fail",
    )
    node_failures_max: Limit = Field(
        default=3, description="lost nodes a window of budgets.window_s; -1 = no limit"
    )

    @field_validator("address")
    @classmethod
    def _no_client(cls, address: str) -> str:
        if "://" in address:
            raise ValueError(
                'Ray Client and URLs are not supported; write HOST:PORT of the head, or "local"'
            )
        host, _, port = address.rpartition(":")
        if address not in ("local", "auto") and not (_HOST.fullmatch(host) and _is_port(port)):
            raise ValueError(
                "must be HOST:PORT of the head, with a port from 1 to 65535, such as "
                '10.0.0.1:6379, or "local"'
            )
        return address

    @field_validator("resources_per_worker")
    @classmethod
    def _quantities(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, quantity in resources.items():
            if instead := _RESOURCES_OF_RAY.get(name):
                raise ValueError(f"holds {name}, which is not custom; {instead}")
            if not name.strip() or not RESOURCE_MIN <= quantity <= RESOURCE_MAX:
                raise ValueError(
                    f"needs a name and an amount from {RESOURCE_MIN:g} to {RESOURCE_MAX:g} for "
                    f"each resource; correct {name!r} or leave it out"
                )
        return resources


class HeartbeatSettings(Section):
    """How silence is noticed."""

    redis_url: str = Field(
        default="local",
        description='"local" = a redis-server of the job\'s own; else redis:// or rediss://HOST:PORT',
    )
    redis_password_file: PathText = Field(
        default="",
        description='holds the password if the URL does not; "" = EVERSTEP_REDIS_PASSWORD, if set',
    )
    redis_ca_file: PathText = Field(
        default="", description='PEM file of whoever signs a rediss:// server; "" = the system\'s'
    )
    every_s: float = Field(
        default=0.25, ge=0.01, le=60.0, description="seconds between two heartbeats"
    )
    lease_s: Seconds = Field(
        default=3.0, description="seconds without a heartbeat until a worker is suspected"
    )

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if url != "local" and (fault := fault_of(url)):
            raise ValueError(fault)
        return url

    def relations(self) -> Iterator[Relation]:
        """A file that nothing reads is a mistake, not a reserve."""
        if self.redis_ca_file and not self.redis_url.startswith("rediss://"):
            yield Relation(
                keys=("redis_ca_file", "redis_url"),
                message="only TLS has certificates; write rediss:// in redis_url, or leave the "
                "file out",
            )
        if self.redis_password_file and masked(self.redis_url) != self.redis_url:
            yield Relation(
                keys=("redis_password_file", "redis_url"),
                message="two passwords; take the one in redis_url out",
            )
        if self.redis_password_file and self.redis_url == "local":
            yield Relation(
                keys=("redis_password_file", "redis_url"),
                message="the job's own redis-server makes its own password; leave the file out",
            )


class DeadlineSettings(Section):
    """How long a phase may go on without progress; "auto" learns it from the run."""

    initialize_s: Deadline = Field(default="auto", description="seconds to start and join")
    compile_s: Deadline = Field(default="auto", description="seconds to compile")
    step_s: Deadline = Field(default="auto", description="seconds a training step")
    evaluate_s: Deadline = Field(default="auto", description="seconds an evaluation")
    checkpoint_s: Deadline = Field(
        default="auto", description="seconds that a save may block training"
    )
    restore_s: Deadline = Field(default="auto", description="seconds to load a restore point")
    drain_s: Seconds = Field(
        default=30.0, description="seconds for the last save, and for the proof of exit"
    )


class BudgetSettings(Section):
    """How often the job may be recovered before it fails."""

    failures_max: Limit = Field(
        default=10, description="recoveries from worker failures a window; -1 = no limit"
    )
    window_s: Seconds = Field(default=3600.0, description="seconds that failures are remembered")
    startup_failures_max: Limit = Field(
        default=3, description="failed starts (port taken, join timed out); -1 = no limit"
    )
    preemptions_max: Limit = Field(
        default=-1, description="no effect: nothing is charged to this budget yet"
    )
    no_progress_max: int = Field(
        default=10,
        ge=1,
        le=COUNT_MAX,
        description="generations in a row without a later restore point",
    )
    same_error_max: int = Field(
        default=3,
        ge=1,
        le=COUNT_MAX,
        description="times running that one error or crash occurs at one step",
    )
    backoff_base_s: float = Field(
        default=1.0,
        ge=0,
        le=YEAR_S,
        description="seconds before the second recovery in a row, then doubled",
    )
    backoff_max_s: float = Field(
        default=60.0, ge=0, le=YEAR_S, description="seconds of backoff at most"
    )

    def relations(self) -> Iterator[Relation]:
        """The backoff grows from its base to its limit."""
        if self.backoff_base_s > self.backoff_max_s:
            yield Relation(
                keys=("backoff_base_s", "backoff_max_s"),
                message="the first backoff may not be above the longest; raise backoff_max_s",
            )


class RecoverySettings(Section):
    """How a failure is judged, and how fast training goes on after it."""

    standby: Literal["generation", "spares", "none"] = Field(
        default="generation",
        description="kept ready: the next generation, processes with JAX imported, or nothing",
    )
    snapshot_every_steps: Annotated[int, Field(ge=0, le=COUNT_MAX)] | Auto = Field(
        default="auto",
        description='steps between snapshots in memory; "auto" = below 1 % of the time; 0 = none',
    )
    last_call_s: float = Field(
        default=1.0,
        ge=0,
        le=YEAR_S,
        description="seconds a victim's error waits for the cause to show itself",
    )
    orphan_after_s: float = Field(
        default=3600.0,
        ge=0,
        le=YEAR_S,
        description="seconds without any daemon until workers save and end; 0 = never",
    )


class ControlSettings(Section):
    """What an operator may do to the running job."""

    drills: bool | Auto = Field(
        default="auto", description='`fault` allowed? "auto" = only with address = "local"'
    )
    log: Literal["plain", "json"] = Field(
        default="plain",
        description='log lines where no terminal shows the panel: "plain" = for people, "json"',
    )


class Settings(Section):
    """All settings of a job."""

    job: JobSettings = Field(default_factory=JobSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)
    heartbeats: HeartbeatSettings = Field(default_factory=HeartbeatSettings)
    deadlines: DeadlineSettings = Field(default_factory=DeadlineSettings)
    budgets: BudgetSettings = Field(default_factory=BudgetSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    control: ControlSettings = Field(default_factory=ControlSettings)

    @property
    def devices(self) -> int:
        """Devices over all workers: one a GPU, or one a worker on CPUs."""
        return self.cluster.workers * max(1, self.cluster.gpus_per_worker)

    @property
    def drills_allowed(self) -> bool:
        """Whether `fault` orders are obeyed."""
        if self.control.drills == "auto":
            return self.cluster.address == "local"
        return self.control.drills

    def relations(self) -> Iterator[Relation]:
        """The chain of deadlines, and the division of the batch over the devices."""
        yield from self._chain()
        yield from self._phases()
        yield from self._shares()

    def _chain(self) -> Iterator[Relation]:
        every_s, lease_s = self.heartbeats.every_s, self.heartbeats.lease_s
        drain_s, last_call_s = self.deadlines.drain_s, self.recovery.last_call_s
        if not 2 * every_s <= lease_s:
            yield Relation(
                keys=("heartbeats.every_s", "heartbeats.lease_s"),
                message="a lease must outlast two heartbeats, or every late one is a death; "
                f"set lease_s to {2 * every_s:g} or more, or lower every_s",
            )
        if not lease_s < drain_s:
            yield Relation(
                keys=("heartbeats.lease_s", "deadlines.drain_s"),
                message="silence must be noticed before a drain is given up: every_s < lease_s < "
                f"drain_s; set drain_s above {lease_s:g}, or lower lease_s",
            )
        if 0 < self.recovery.orphan_after_s <= lease_s:
            yield Relation(
                keys=("recovery.orphan_after_s", "heartbeats.lease_s"),
                message="a daemon that is started again needs a moment, and its workers must not "
                f"end meanwhile; set orphan_after_s well above {lease_s:g}, or to 0",
            )
        if not last_call_s < drain_s:
            yield Relation(
                keys=("recovery.last_call_s", "deadlines.drain_s"),
                message="the cause must be known before the workers are ended; set last_call_s "
                f"below {drain_s:g}",
            )

    def _phases(self) -> Iterator[Relation]:
        shortest_s = 2 * self.heartbeats.every_s
        for name in DeadlineSettings.model_fields:
            deadline_s = getattr(self.deadlines, name)
            if name != "drain_s" and deadline_s != "auto" and deadline_s < shortest_s:
                yield Relation(
                    keys=(f"deadlines.{name}", "heartbeats.every_s"),
                    message="progress is seen only once a heartbeat, so a deadline must outlast "
                    f'two; set {name} to {shortest_s:g} or more, or to "auto"',
                )

    def _shares(self) -> Iterator[Relation]:
        batch, devices = self.trainer.data.batch_size, self.devices
        causes = ["cluster.workers"]
        causes += ["cluster.gpus_per_worker"] if self.cluster.gpus_per_worker else []
        mesh = self.trainer.mesh
        try:
            dp, fsdp, _ = mesh.sizes(devices)
        except SettingsError:
            keys = [f"trainer.mesh.{name}" for name in ("dp", "fsdp", "tp") if _is_set(mesh, name)]
            yield Relation(
                keys=(*keys, *causes),
                message=f"the mesh must use every device: make dp x fsdp x tp = {devices}, with -1 "
                "for what is left",
            )
            return
        shards = dp * fsdp
        if self.trainer.is_builtin and batch % shards:
            lower, upper = batch // shards * shards, -(-batch // shards) * shards
            choices = " or ".join(str(n) for n in (lower, upper) if n)
            yield Relation(
                keys=("trainer.data.batch_size", *causes),
                message=f"each of {shards} parts (dp x fsdp) takes the same share of a batch; set "
                f"batch_size to a multiple of {shards} ({choices})",
            )


def _is_set(mesh: MeshSettings, name: str) -> bool:
    return bool(getattr(mesh, name) not in (-1, 1))


class Location(Section):
    """The part of the settings that tells where a job's files are; blind to all the rest."""

    model_config = ConfigDict(extra="ignore")

    job: JobSettings = Field(default_factory=JobSettings)


def job_directory(job: JobSettings, config_path: Path | str) -> Path:
    """`<run_dir>/<name>`, absolute, so that the same command finds it from any directory."""
    return (Path(config_path).resolve().parent / job.run_dir / job.name).resolve()


def effective(settings: Settings, origins: Mapping[str, Origin]) -> dict[str, dict[str, Any]]:
    """Every setting in order: dotted key → {"value", "origin"}; secrets are masked."""
    rows: dict[str, dict[str, Any]] = {}
    for key, _ in walk(Settings):
        value: Any = settings
        for part in key.split("."):
            value = getattr(value, part)
        shown = masked(value) if key == "heartbeats.redis_url" else value
        rows[key] = {"value": shown, "origin": origins.get(key, "default")}
    return rows


def describe(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The effective settings as TOML, each line saying where its value came from."""
    lines: list[str] = []
    table = ""
    for key, row in rows.items():
        section, _, name = key.rpartition(".")
        if section != table:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
            table = section
        line = f"{name} = {show(row['value'])}"
        lines.append(f"{line:<40} # {row['origin']}")
    return "\n".join(lines)


def template() -> str:
    """A file of settings that names every setting with its default, each with what it does."""
    lines = [_TEMPLATE_HEAD]
    for section, rows in _sections():
        lines += ["", *(f"# {line}" for line in _about(section)), f"[{section}]"]
        for name, default, description in rows:
            setting, note = f"{name} = {default}", f"# {description}"
            one_line = f"{setting:<32} {note}"
            lines += [one_line] if len(one_line) <= 100 else [note, setting]
    return "\n".join(lines) + "\n"


def reference() -> str:
    """A page in Markdown with the same, a table per section."""
    lines = [_REFERENCE_HEAD]
    for section, rows in _sections():
        lines += ["", f"## `[{section}]`", "", " ".join(_about(section)), ""]
        lines += ["| setting | default | |", "| --- | --- | --- |"]
        for name, default, description in rows:
            about = description.replace("|", "\\|")
            lines.append(f"| `{name}` | `{default}` | {about} |")
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each section with its settings: name, default in TOML, description."""
    for section, found in groupby(walk(Settings), lambda one: one[0].rpartition(".")[0]):
        rows = []
        for key, field in found:
            default = field.get_default(call_default_factory=True, validated_data={})
            rows.append((key.rpartition(".")[2], show(default), str(field.description)))
        yield section, rows


_REFERENCE_HEAD = """\
# Settings

Every setting of `job.toml`, as `python -m supervisor check --reference` prints them. Names end in
their unit: `_s` is seconds. `check` prints what is in force in a job, `check --defaults` a file to
start from."""

_TEMPLATE_HEAD = """\
# A job for everstep. Every setting is here with its default: what you leave out stays as it is.
# Names end in their unit: _s is seconds. `python -m supervisor check` says what is in force."""


def _about(section: str) -> list[str]:
    """The lines of the section's docstring."""
    kind: type[Section] = Settings
    for part in section.split("."):
        inner = section_of(kind.model_fields[part])
        assert inner is not None
        kind = inner
    return [line.strip() for line in (kind.__doc__ or "").strip().splitlines() if line]
