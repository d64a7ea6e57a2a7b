"""The settings that shape training: what may stand in `[trainer]` and `[checkpoint]`.

Only the schema with its defaults and relations; reading files is `trainer.settings`. Imports
neither jax nor Ray: the supervisor reads these too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from trainer.settings import PathText, Relation, Section, SettingsError, walk

TASK_OF_THE_HOUSE = "language_model"

COUNT_MAX = 2**31 - 1
"""The largest number of anything: steps and sizes are 32-bit integers on devices."""

MATRICES = ("query", "key", "value", "attention_out", "gate", "up", "down")
"""The matrices of a block of the built-in model; low-rank factors may be added to any of them."""


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_VARIABLES = frozenset({"NPROC", "OMP_NUM_THREADS", "JAX_PLATFORMS", "PYTHONUNBUFFERED"})
"""What `trainer.host.environment.worker_environment` decides: losses and devices depend on it."""


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class MeshSettings(Section):
    """How the devices of all workers are arranged: dp by fsdp by tp; one of them may be -1."""

    dp: int = Field(
        default=-1,
        ge=-1,
        le=COUNT_MAX,
        description="replicas of the model; -1 = as many as devices are left",
    )
    fsdp: int = Field(
        default=1,
        ge=-1,
        le=COUNT_MAX,
        description="parts of the state, gathered as they are needed",
    )
    tp: int = Field(
        default=1,
        ge=-1,
        le=COUNT_MAX,
        description="parts of each matrix; within a node, if you can",
    )

    @field_validator("dp", "fsdp", "tp")
    @classmethod
    def _some(cls, size: int) -> int:
        if size == 0:
            raise ValueError("must be -1 (what is left) or a positive number")
        return size

    def relations(self) -> Iterator[Relation]:
        """One axis takes what the others leave."""
        free = tuple(name for name in ("dp", "fsdp", "tp") if getattr(self, name) == -1)
        if len(free) > 1:
            yield Relation(keys=free, message="only one of them can be -1 (what is left)")

    def sizes(self, devices: int) -> tuple[int, int, int]:
        """dp, fsdp and tp over so many devices.

        Raises `SettingsError` where they do not come out even.
        """
        given = (self.dp, self.fsdp, self.tp)
        fixed = math.prod(size for size in given if size != -1)
        dp, fsdp, tp = (devices // fixed if size == -1 else size for size in given)
        if dp * fsdp * tp != devices:
            raise SettingsError(
                f"[trainer.mesh] dp = {self.dp}, fsdp = {self.fsdp}, tp = {self.tp}: the workers "
                f"have {devices} devices in all; make the product {devices}, with -1 for what is "
                "left"
            )
        return dp, fsdp, tp


class ModelSettings(Section):
    """A decoder of the Llama family: pretrained, or over bytes with the sizes below."""

    pretrained: PathText = Field(
        default="",
        description='a model\'s folder, a .gguf file, or "package:NAME" of one; "" = from the seed',
    )
    layers: int = Field(default=3, ge=1, le=COUNT_MAX, description="transformer blocks")
    width: int = Field(default=128, ge=2, le=COUNT_MAX, description="size of the residual stream")
    heads: int = Field(
        default=4, ge=1, le=COUNT_MAX, description="query heads; the width is split over them"
    )
    key_value_heads: int = Field(
        default=2, ge=1, le=COUNT_MAX, description="heads that share keys and values"
    )
    hidden: int = Field(
        default=352, ge=1, le=COUNT_MAX, description="inner size of the SwiGLU block"
    )
    rope_base: float = Field(
        default=10000.0, gt=1.0, le=1e15, description="base of the rotary angles"
    )
    dropout: float = Field(
        default=0.0, ge=0.0, le=0.99999, description="share of each block's output left out"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description='of matrix products; the state stays "float32"'
    )
    remat: bool = Field(
        default=False, description="compute blocks again in the backward pass: slower, less memory"
    )
    lora_rank: int = Field(
        default=0,
        ge=0,
        le=COUNT_MAX,
        description="train low-rank additions of this rank only; 0 = everything",
    )
    lora_alpha: float = Field(
        default=16.0, ge=1e-30, le=1e6, description="the additions count alpha / rank times"
    )
    lora_targets: tuple[str, ...] = Field(
        default=MATRICES, min_length=1, description="matrices that get low-rank additions"
    )

    @field_validator("lora_targets")
    @classmethod
    def _targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(targets) - set(MATRICES)):
            raise ValueError(f"has no matrix {unknown[0]!r}; choose among {', '.join(MATRICES)}")
        return tuple(name for name in MATRICES if name in targets)

    def relations(self) -> Iterator[Relation]:
        """Heads fit the width, and a pretrained model brings its own sizes."""
        if self.pretrained:
            for name in ("layers", "width", "heads", "key_value_heads", "hidden", "rope_base"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield Relation(
                        keys=("pretrained", name),
                        message=f"the pretrained model brings its own; leave {name} out",
                    )
            return
        if self.lora_rank:
            yield Relation(
                keys=("lora_rank", "pretrained"),
                message="low-rank additions need a pretrained model to be added to; name one, "
                "or leave lora_rank out",
            )
        if self.width % self.heads or (self.width // self.heads) % 2:
            yield Relation(
                keys=("width", "heads"),
                message="the width must split over the heads into an even size each (RoPE turns "
                f"pairs); make width a multiple of {2 * self.heads}",
            )
        if self.heads % self.key_value_heads:
            yield Relation(
                keys=("heads", "key_value_heads"),
                message="each key-value head serves equally many query heads; make heads a "
                f"multiple of {self.key_value_heads}",
            )


class DataSettings(Section):
    """The data, and how a batch is cut from it."""

    path: Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple)] = Field(
        default=(),
        description="files or folders; none = the sources of Python's standard library",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "dataset", "ray"] = Field(
        default="auto",
        description='of path; "dataset" = saved by Hugging Face, "ray" = "module:function"',
    )
    suffixes: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        default=(".py", ".txt", ".md", ".rst"),
        description="which text files count inside a folder",
    )
    text_key: str = Field(
        default="text",
        min_length=1,
        description="key or column of the text of records without prompt and messages",
    )
    packing: Literal["auto", "stream", "documents", "none"] = Field(
        default="auto",
        description='a row is a cut of all text, some whole documents, or one; "auto" by format',
    )
    bytes_max: int = Field(
        default=4_000_000,
        ge=1024,
        le=2**53,
        description="text for a model of bytes may be so long; the standard library is cut there",
    )
    batch_size: int = Field(
        default=16, ge=1, le=COUNT_MAX, description="sequences a step, over all workers"
    )
    sequence_length: int = Field(default=128, ge=2, le=COUNT_MAX, description="tokens a sequence")
    held_out_fraction: float = Field(
        default=0.05, gt=0.0, le=0.5, description="of each text the tail, of records every so many"
    )
    held_out_path: Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple)] = Field(
        default=(), description="held-out data of your own, in place of that fraction"
    )
    cache: PathText = Field(
        default="runs/.data",
        min_length=1,
        description="tokenised data is kept here; a relative path starts at this file",
    )

    def relations(self) -> Iterator[Relation]:
        """What needs a path."""
        if self.format not in ("auto", "text") and not self.path:
            yield Relation(
                keys=("format", "path"),
                message="there is nothing to read; name files or folders in path",
            )
        if self.format == "ray" and any(":" not in one for one in self.path):
            yield Relation(
                keys=("format", "path"),
                message='functions make the data; write path = "module:function"',
            )


class OptimizerSettings(Section):
    """AdamW with a linear warm-up and a cosine decay over the steps of the job."""

    learning_rate: float = Field(default=3e-3, ge=1e-30, le=1e6, description="at the peak")
    final_fraction: float = Field(
        default=0.1, ge=0.0, le=1.0, description="of the peak, at the last step"
    )
    warmup_steps: int = Field(
        default=30,
        ge=0,
        le=COUNT_MAX,
        description="from zero to the peak; half of a short job's steps at most",
    )
    weight_decay: float = Field(default=0.1, ge=0.0, le=1e6, description="on matrices only")
    beta1: float = Field(default=0.9, ge=0.0, le=0.99999, description="memory of the gradient")
    beta2: float = Field(default=0.95, ge=0.0, le=0.99999, description="memory of its square")
    gradient_norm_max: float = Field(
        default=1.0, ge=1e-30, le=1e30, description="larger ones are scaled"
    )


Policy = Literal["stop", "skip", "rollback"]


class GuardSettings(Section):
    """What happens when the numbers of a step go wrong."""

    nonfinite: Policy = Field(
        default="stop",
        description="a loss or another metric that is not finite: fail, leave the step out, or go "
        "back to the checkpoint before and leave out the batches in between",
    )
    spike_factor: float = Field(
        default=0.0,
        ge=0.0,
        le=1e30,
        description="a loss is a spike if it exceeds the median of the last steps by more than "
        "(spike_factor - 1) times their median size; 0 = off",
    )
    spike: Policy = Field(default="rollback", description="the same for such a loss")
    spike_window_steps: int = Field(
        default=64, ge=2, le=COUNT_MAX, description="steps of the median"
    )
    skips_max: int = Field(
        default=10, ge=0, le=COUNT_MAX, description="steps left out in a row before a stop"
    )
    rollbacks_max: int = Field(
        default=3, ge=-1, le=COUNT_MAX, description="within budgets.window_s; -1 = no limit"
    )
    compare_every_steps: int = Field(
        default=100,
        ge=0,
        le=COUNT_MAX,
        description="equality of the replicas' parameters is checked; 0 = never",
    )

    @field_validator("spike_factor")
    @classmethod
    def _above_one(cls, factor: float) -> float:
        if 0 < factor <= 1:
            raise ValueError("must be above 1, or 0 (no loss is a spike)")
        return factor

    @property
    def leaves_out(self) -> bool:
        """Whether a step must be able to keep the state that it was given."""
        return "skip" in (self.nonfinite, self.spike if self.spike_factor else "")


class TrainerSettings(Section):
    """What is trained, for how long, from which seed."""

    task: str = Field(
        default=TASK_OF_THE_HOUSE,
        min_length=1,
        description='"language_model", or a "module:Class" or "module:function" beside this file',
    )
    steps: int = Field(
        default=600, ge=1, le=COUNT_MAX, description="the job is complete after so many"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the weights and of the batches")
    accumulation_steps: int = Field(
        default=1,
        ge=1,
        le=COUNT_MAX,
        description="parts of a batch computed one after the other: less memory",
    )
    evaluate_every_steps: int = Field(
        default=100, ge=0, le=COUNT_MAX, description="on held-out text; 0 = only at the end"
    )
    evaluate_batches: int = Field(
        default=8, ge=1, le=COUNT_MAX, description="held-out batches an evaluation"
    )
    tensorboard: bool = Field(
        default=False, description="metrics for TensorBoard too, in <run_dir>/<job>/tensorboard"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="a free table for a task of your own"
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description='variables of the workers, such as {"HF_HOME" = "/data/hf"}; no secrets',
    )
    mesh: MeshSettings = Field(default_factory=MeshSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    data: DataSettings = Field(default_factory=DataSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    guards: GuardSettings = Field(default_factory=GuardSettings)

    @property
    def is_builtin(self) -> bool:
        """Whether the built-in task is trained, whose sections of the settings then count."""
        return self.task == TASK_OF_THE_HOUSE

    def without_effect(self) -> list[str]:
        """Return the dotted keys that are set and that only the built-in task reads.

        A task of the user's own may read the sizes of a batch and the paths of `data`.
        """
        keys = [key for key in _ONLY_BUILTIN if _differs(self, key)]
        return [f"trainer.{key}" for key in keys]

    def relations(self) -> Iterator[Relation]:
        """A batch splits into equal parts."""
        if self.is_builtin and self.data.batch_size % self.accumulation_steps:
            yield Relation(
                keys=("accumulation_steps", "data.batch_size"),
                message="a batch is computed in parts of equal size; make batch_size a multiple of "
                f"{self.accumulation_steps}",
            )

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, text in env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"has {name!r}, which is no name of a variable; write A_Z0_9")
            if "\0" in text:
                raise ValueError(f"{name} holds a NUL character, which no variable can")
            if name in RESERVED_VARIABLES or name.startswith("EVERSTEP_"):
                raise ValueError(f"{name} is set by everstep itself; leave it out")
        return env

    @field_validator("task")
    @classmethod
    def _known(cls, task: str) -> str:
        module, _, name = task.partition(":")
        if task != TASK_OF_THE_HOUSE and not (module and name.isidentifier()):
            raise ValueError(
                f'must be "{TASK_OF_THE_HOUSE}", or for your own "module:Class" (a Task) or '
                '"module:function" (a loop)'
            )
        return task


_SHARED = ("data.batch_size", "data.sequence_length", "data.path", "data.held_out_path")
_ONLY_BUILTIN = (
    "accumulation_steps",
    *(
        key
        for key, _ in walk(TrainerSettings)
        if key.partition(".")[0] in ("model", "data", "optimizer") and key not in _SHARED
    ),
)


def _differs(settings: TrainerSettings, key: str) -> bool:
    section, _, name = key.rpartition(".")
    table: Section = getattr(settings, section) if section else settings
    default = (
        type(table).model_fields[name].get_default(call_default_factory=True, validated_data={})
    )
    return bool(getattr(table, name) != default)


def refuse_without_effect(settings: TrainerSettings) -> None:
    """Raise `SettingsError` if something is set that a task of the user's own does not read."""
    if keys := settings.without_effect():
        raise SettingsError(
            *(
                f"{key}: only the built-in task reads it, not {settings.task!r}; leave it out, or "
                "put what your task needs into [trainer.options]"
                for key in keys
            )
        )


class CheckpointSettings(Section):
    """How often the state is saved, and how many saved states stay."""

    every_steps: Annotated[int, Field(ge=1, le=COUNT_MAX)] | Literal["auto"] = Field(
        default=50,
        description='steps between two checkpoints; "auto" = by what one costs and by how often '
        "something fails",
    )
    keep: int = Field(
        default=3, ge=2, le=COUNT_MAX, description="verified checkpoints that stay on disk"
    )
