"""The sections of `job.toml`, one class each: keys, defaults, ranges. The comments document the keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from starlings_compression.policy import Role
from starlings_compression.spec import parse_spec
from starlings_job.codecs import check_codec, stages_most
from starlings_job.cut import Stages, parse_stages, stage_count
from starlings_job.optimizers import MUON_MOMENTUM, SETTINGS, OptimizerName, misplaced
from starlings_job.presets import PRESETS
from starlings_job.units import parse_bytes, parse_count
from starlings_protos.bus.address import parse_bus_url

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

Count = Annotated[int, BeforeValidator(parse_count)]
# Strict: true is no number, and neither is "3".
Whole = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
Switch = Annotated[bool, Field(strict=True)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]


def _codec(value: object) -> object:
    """The spec in its canonical form. A SpecError is a ValueError that says what is allowed."""
    return parse_spec(value).text if isinstance(value, str) else value


Codec = Annotated[str, BeforeValidator(_codec)]


def _texts(value: object, allowed: str) -> object:
    """One string or a list of them, as a list."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v for v in value):
        raise ValueError(f"must be {allowed}")
    return value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class JobSection(Section):
    # Names directories, certificates and the invite.
    name: str
    # Everything random about the job follows from it: weights, held-out split, order of samples, plans.
    seed: Whole = Field(default=0, ge=0, lt=2**63)
    # Training ends after the first step that reaches this many tokens (for classifiers: samples).
    tokens: Count

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "must be 1 to 63 of the characters A-Z a-z 0-9 . _ - beginning with a letter or digit"
            )
        return value


class ModelSection(Section):
    preset: str | None = None
    # Path of a Hugging Face config.json (a file, or the directory that holds it): weights start at random.
    config: str | None = None
    # Directory with config.json and safetensors: weights start from there.
    from_: str | None = Field(default=None, alias="from")
    # Give input and output embeddings weights of their own where the configuration ties them.
    untie: bool = False

    @field_validator("preset")
    @classmethod
    def _preset(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"{value!r} is no preset; allowed: {', '.join(sorted(PRESETS))}")
        return value

    @property
    def chosen(self) -> tuple[str, ...]:
        names = (("preset", self.preset), ("config", self.config), ("from", self.from_))
        return tuple(name for name, value in names if value is not None)


class DataSection(Section):
    # "stdlib", "shapes", or globs of files, relative to the job file.
    source: tuple[str, ...] = ("stdlib",)
    format: Literal["text", "jsonl"] = "text"
    # "bytes", or a directory with tokenizer.json, or the file itself; "auto" is the one in the model's own
    # directory, or bytes where there is none.
    tokenizer: str = "auto"
    # Tokens per sample; the preset's own when left out.
    sequence_length: Whole = Field(default=256, ge=1, le=1 << 20)
    # About how many samples are kept back for evaluation, taken from whole documents where possible.
    held_out: Whole = Field(default=256, ge=1, le=10**6)
    # Use about this much text and no more.
    limit: Bytes | None = None
    # alpha of a Dirichlet distribution: with `async`, each worker that holds the first stage leases samples by a
    # distribution over the sources of its own, to study unequal data (skew.py; Hsu et al. 2019: 100 is nearly equal, 1
    # unequal, 0.1 a few sources each). Left out: everybody draws from everything. A source is a folder of the text, or
    # a file that lies in none.
    skew: Real | None = Field(default=None, gt=0, le=1e6)

    @field_validator("source", mode="before")
    @classmethod
    def _source(cls, value: object) -> object:
        return _texts(value, '"stdlib", "shapes", a glob such as "texts/**/*.txt", or a list of globs')


# beta1 and momentum_decay with which NAdam corrects for delays (Ajanthan et al. 2025).
_NADAM_CORRECTS = (0.99, 0.0)


class TrainSection(Section):
    # "sync": a step is a transaction of all workers. "async": no barrier, each replica of a stage steps on its own.
    schedule: Literal["sync", "async"] = "sync"
    # Samples per optimizer step, over all workers. In `async` the unit in which progress is counted.
    batch: Whole = Field(default=16, ge=1, le=1 << 20)
    # Samples that travel together; `batch` must be a multiple of it.
    microbatch: Whole = Field(default=4, ge=1, le=1 << 16)
    # `async`: microbatches after which a replica steps its inner optimizer; 0: as many as make a `batch`.
    inner_batch: Whole = Field(default=0, ge=0, le=1 << 16)
    # `async`: a gradient is passed upstream and not added where the stage made more steps than this since its forward.
    max_staleness: Whole = Field(default=8, ge=0, le=10_000)
    # `async`: what is done about stale gradients. "nadam": the optimizer of that name, with beta1 = 0.99 and
    # momentum_decay = 0.
    # "predict": forward passes with the weights that are expected when the microbatch comes back, as many steps later
    # as was measured (Chen et al. 2018, "SpecTrain", section 4; for Adam Guan et al. 2019, "XPipe", section 3).
    correction: Literal["none", "predict", "nadam"] = "none"
    # `async`: how often a part of the held-out text is evaluated on the way, evenly over the job, beside training: with
    # the weights of one live replica, and with those of the last average where replicas meet. 0: only at the end.
    evaluations: Whole = Field(default=0, ge=0, le=10_000)
    # What each keeps of a parameter: `optimizers.py`.
    optimizer: OptimizerName = "adamw"
    lr: Real = Field(default=1e-3, gt=0, le=1e3)
    # The rate after the cosine, as a fraction of `lr`.
    lr_end: Real = Field(default=0.1, ge=0, le=1)
    decay: Literal["cosine", "none"] = "cosine"
    # Steps of linear warm-up; a number below 1 is a fraction of all steps.
    warmup: Real = Field(default=0.05, ge=0)
    # Limit on the global gradient norm; 0 = no clipping.
    clip: Real = Field(default=1.0, ge=0)
    # AdamW, Loshchilov & Hutter 2019, algorithm 2: m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    # w = (1 - lr weight_decay) w - lr m' / (sqrt(v') + epsilon), with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t).
    # NAdam, AdamW with 8-bit moments and what Muon leaves to AdamW have them too. Decay acts on tensors of two or more
    # dimensions only.
    beta1: Real = Field(default=0.9, ge=0, lt=1)
    beta2: Real = Field(default=0.95, ge=0, lt=1)
    epsilon: Real = Field(default=1e-8, gt=0)
    weight_decay: Real = Field(default=0.1, ge=0)
    # SGD: v = momentum v + g; w = w - lr v. Muon: 0.95 when left out, v likewise, and g + momentum v is orthogonalised.
    momentum: Real = Field(default=0.0, ge=0, lt=1)
    # NAdam, Dozat 2016, algorithm 2: the step's momentum is beta1 (1 - 0.96^(t momentum_decay) / 2), so it rises from
    # half of beta1 to beta1 over some 25 / momentum_decay steps; with 0 it stays at half.
    momentum_decay: Real = Field(default=0.004, ge=0, le=1)
    # Muon: the update of a rows x columns matrix is multiplied by 0.2 sqrt(max(rows, columns)), which makes it as large
    # as AdamW's are, so one `lr` suits all ("rms", Liu et al. 2025, section 2.2), or by sqrt(max(1, rows / columns)) as
    # Jordan et al. 2024 do ("original"; rates are some 0.02 then).
    muon_scale: Literal["rms", "original"] = "rms"
    # Muon: Newton-Schulz iterations (Jordan et al. 2024).
    muon_iterations: Whole = Field(default=5, ge=1, le=20)
    # Muon: the rate of what it leaves to AdamW (embedding, head, everything that is no matrix), as a fraction of `lr`.
    muon_adamw_lr: Real = Field(default=1.0, gt=0, le=1e3)
    # Parameters to train, as globs over Hugging Face names, such as "*.mlp.*"; the others stay as they are.
    trainable: tuple[str, ...] = ("*",)

    @property
    def streams(self) -> bool:
        """Whether there is no barrier between steps."""
        return self.schedule == "async"

    @property
    def microbatches_per_inner_step(self) -> int:
        return self.inner_batch or self.batch // self.microbatch

    @field_validator("trainable", mode="before")
    @classmethod
    def _trainable(cls, value: object) -> object:
        return _texts(value, 'a glob over parameter names such as "*.mlp.*", or a list of them')

    @field_validator("warmup", mode="before")
    @classmethod
    def _warmup(cls, value: object) -> object:
        if isinstance(value, int | float) and value >= 1 and value % 1 != 0:
            raise ValueError("must be a whole number of steps, or a fraction of all steps below 1")
        return value

    @model_validator(mode="after")
    def _own_settings(self) -> Self:
        defaults = {key: type(self).model_fields[key].default for key in SETTINGS}
        if problem := misplaced(self.optimizer, {key: getattr(self, key) for key in SETTINGS}, defaults):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _belongs_to_schedule(self) -> Self:
        if not self.streams:
            fields = type(self).model_fields
            for key in ("inner_batch", "max_staleness", "correction", "evaluations"):
                if getattr(self, key) != fields[key].default:
                    raise ValueError(
                        f'{key} = {getattr(self, key)!r} is for schedule = "async", and means nothing to "sync": '
                        "remove it"
                    )
        if self.correction == "nadam" and self.optimizer != "nadam":
            raise ValueError(
                f'correction = "nadam" needs optimizer = "nadam", not "{self.optimizer}"; write that'
            )
        if self.correction == "nadam" and (self.beta1, self.momentum_decay) != _NADAM_CORRECTS:
            raise ValueError(
                f'correction = "nadam" is stable with beta1 = {_NADAM_CORRECTS[0]} and momentum_decay = 0; remove '
                'both, or write correction = "none" with optimizer = "nadam"'
            )
        if self.correction == "predict" and not (
            self.optimizer == "adamw" or (self.optimizer == "sgd" and self.momentum > 0)
        ):
            raise ValueError(
                f'correction = "predict" goes by the momentum of "adamw" or "sgd" (with momentum above 0), not of '
                f'"{self.optimizer}"; write one of them, or correction = "none"'
            )
        return self

    @model_validator(mode="after")
    def _whole_microbatches(self) -> Self:
        if self.batch % self.microbatch:
            raise ValueError(
                f"batch = {self.batch} is not a multiple of microbatch = {self.microbatch}; "
                f"write batch = {-(-self.batch // self.microbatch) * self.microbatch} or another microbatch"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, values: Any) -> Any:
        if isinstance(values, dict) and "microbatch" not in values and isinstance(values.get("batch"), int):
            batch = values["batch"]
            values = {**values, "microbatch": next((m for m in (4, 3, 2) if batch % m == 0), 1)}
        if isinstance(values, dict) and values.get("optimizer") == "muon":
            values = {"momentum": MUON_MOMENTUM, **values}
        if (
            isinstance(values, dict)
            and values.get("correction") == "nadam"
            and values.get("optimizer", "nadam") == "nadam"
        ):
            # Ajanthan et al. 2025: a stale gradient wants a long memory, and the look-ahead from the first step on.
            beta1, momentum_decay = _NADAM_CORRECTS
            values = {"optimizer": "nadam", "beta1": beta1, "momentum_decay": momentum_decay, **values}
        return values


class PipelineSection(Section):
    # Use the codec also where it is known to hurt. Stands before it, because its check looks here.
    force: Switch = False
    # How activations and their gradients travel between stages.
    codec: Codec = "int8:128"
    # Into how many stages the model is cut, or the blocks of each; 0 leaves it to the planner.
    stages: Annotated[Stages, BeforeValidator(parse_stages)] = 0

    @field_validator("codec")
    @classmethod
    def _suits(cls, value: str, info: ValidationInfo) -> str:
        return check_codec(value, Role.BOUNDARY, force=info.data.get("force", False))

    @model_validator(mode="after")
    def _codec_bears_the_stages(self) -> Self:
        most, wanted = stages_most(self.codec, force=self.force), stage_count(self.stages)
        if most and wanted > most:
            raise ValueError(
                f"codec {self.codec} bears {most} stages at most, and stages wants {wanted}; write int8:128, fewer "
                "stages, or force = true"
            )
        return self


class SwarmSection(Section):
    # Training waits until this many workers are there.
    min_workers: Whole = Field(default=1, ge=1, le=100_000)
    # ... and until nobody has joined for this long.
    settle_s: Real = Field(default=10.0, ge=0, le=86400)


class CheckpointSection(Section):
    # Directory or fsspec URL (s3://bucket/path); the job's own directory when left out.
    to: str | None = None
    # Steps between checkpoints; 0 = only at the end.
    every: Whole = Field(default=0, ge=0)
    # How many to keep.
    keep: Whole = Field(default=3, ge=1, le=10_000)


class PortsSection(Section):
    """0 = any free port; the chosen one is reported."""

    control: Whole = Field(default=7700, ge=0, le=65535)
    enrolment: Whole = Field(default=7701, ge=0, le=65535)
    page: Whole = Field(default=7702, ge=0, le=65535)


class NetworkSection(Section):
    # Names or addresses under which volunteers reach the coordinator, for the invite; detected when left out.
    host: tuple[str, ...] = ()
    ports: PortsSection = PortsSection()

    @field_validator("host", mode="before")
    @classmethod
    def _host(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("host")
    @classmethod
    def _host_characters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}", host):
                raise ValueError(f"{host!r} is no host name or address (without a port)")
        return value


class BusSection(Section):
    # Where the MQTT broker is; left out: the job has no bus.
    url: str | None = None
    # How messages on the bus are written: compactly, or for tools that have no schema compiler.
    payload: Literal["protobuf", "json"] = "protobuf"

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else str(parse_bus_url(value))
