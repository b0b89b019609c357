"""The job's specification: what `job.toml` says, checked, with every default filled in.

Torch-free. `load_job` reads a file; `prepared.load_prepared` adds what `starlings prepare` found out (the
resolved model and the dataset's record format); `to_json` is what workers get.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from starlings_job.codecs import stages_most
from starlings_job.cut import cut_problem, stage_count
from starlings_job.description import ModelDescription
from starlings_job.errors import JobFileError
from starlings_job.exchange_rules import ExchangeRules, RuleError
from starlings_job.exchange_section import ExchangeSection
from starlings_job.memory import bytes_per_parameter
from starlings_job.presets import PRESETS, SHAPES
from starlings_job.records import DatasetMeta
from starlings_job.sections import (
    BusSection,
    CheckpointSection,
    DataSection,
    JobSection,
    ModelSection,
    NetworkSection,
    PipelineSection,
    Section,
    SwarmSection,
    TrainSection,
)
from starlings_job.spec_errors import explain_syntax_error, explain_validation_error

# A job file and a resolved job are small; bytes from outside are looked at only below this.
JSON_LIMIT_BYTES = 4 << 20


class PreparedSection(Section):
    """What `starlings prepare` found out: model.json and dataset.json. Never in a job file."""

    model: dict[str, Any]
    dataset: dict[str, Any]


class JobSpec(Section):
    """A checked job. Two jobs with equal `digest()` train alike, whoever owns them and however long."""

    job: JobSection
    model: ModelSection
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    pipeline: PipelineSection = PipelineSection()
    exchange: ExchangeSection = ExchangeSection()
    swarm: SwarmSection = SwarmSection()
    checkpoint: CheckpointSection = CheckpointSection()
    network: NetworkSection = NetworkSection()
    bus: BusSection = BusSection()
    prepared: PreparedSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_model_and_source(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        model, data = values.get("model"), values.get("data", {})
        if not isinstance(model, dict) or not isinstance(data, dict):
            return values
        defaults: dict[str, Any] = {}
        preset = PRESETS.get(str(model.get("preset")))
        if preset is not None:
            defaults["sequence_length"] = preset.sequence_length
            if preset.family == "sequential":
                defaults["source"] = [SHAPES]
        if data.get("source") in (SHAPES, [SHAPES]):
            defaults["sequence_length"] = 1
        return {**values, "data": {**defaults, **data}}

    @model_validator(mode="before")
    @classmethod
    def _default_of_schedule(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(train := values.get("train"), dict):
            exchange = values.get("exchange", {})
            if train.get("schedule") == "async" and isinstance(exchange, dict):
                return {**values, "exchange": {"preset": "pairs", **exchange}}
        return values

    @model_validator(mode="after")
    def _exchange_fits(self) -> Self:
        try:
            self.exchange.check_schedule(self.train.schedule)
            self.exchange.rules(self.train)
        except RuleError as error:
            raise ValueError(f"[exchange] {error}") from None
        return self

    @model_validator(mode="after")
    def _skew_means_something(self) -> Self:
        if self.data.skew is not None and not self.train.streams:
            raise ValueError(
                f'[data] skew = {self.data.skew:g} needs [train] schedule = "async"; with "sync" each step is the '
                "gradient of all its samples, whoever computes which, so it would change nothing: remove it"
            )
        if self.data.skew is not None and SHAPES in self.data.source:
            raise ValueError(
                '[data] skew is for text: the images of source "shapes" have no sources; remove it'
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.prepared is not None:
            return self
        if len(self.model.chosen) != 1:
            given = " and ".join(self.model.chosen) or "none of them"
            raise ValueError(f"[model] needs exactly one of preset, config, from; it has {given}")
        preset, images = PRESETS.get(self.model.preset or ""), self.data.source == (SHAPES,)
        if preset is not None and (preset.family == "sequential") != images:
            raise ValueError('[data] source "shapes" and [model] preset "shapes" belong together')
        if SHAPES in self.data.source and (not images or self.data.sequence_length != 1):
            raise ValueError('[data] source "shapes" goes with no other source and with sequence_length = 1')
        return self

    # ---------------------------------------------------------------- numbers that follow

    @property
    def tokens_per_sample(self) -> int:
        """Target tokens of one sample as the job counts them; 1 for classifiers."""
        return self.data.sequence_length

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch * self.tokens_per_sample

    @property
    def steps_total(self) -> int:
        return math.ceil(self.job.tokens / self.tokens_per_step)

    @property
    def microbatches_per_step(self) -> int:
        return self.train.batch // self.train.microbatch

    @property
    def unties(self) -> bool:
        """Whether tied embeddings get weights of their own: in `async` no step joins both ends of a pipeline. Where
        each worker holds the whole model, both ends are one stage's.
        """
        return self.model.untie or (self.train.streams and stage_count(self.pipeline.stages) != 1)

    @property
    def bytes_per_parameter(self) -> float:
        """What a trained parameter takes on a worker (`memory.py`): live plans and offline ones count alike."""
        return float(
            bytes_per_parameter(
                self.train,
                self.exchange.codec,
                pair_rules=self.pair_rules,
                # The weights that are expected, beside those that are.
                extra_versions=int(self.train.correction == "predict"),
            )
        )

    @cached_property
    def pair_rules(self) -> ExchangeRules | None:
        """All numbers of exchanges in pairs; None where replicas do not exchange so."""
        return self.exchange.rules(self.train)

    @property
    def stages_most(self) -> int:
        """Into how many stages the pipeline's codec lets the model be cut; 0: as many as it has blocks."""
        return stages_most(self.pipeline.codec, force=self.pipeline.force)

    def check_cut(self, blocks: Sequence[str]) -> None:
        """Raises JobFileError when a model of these blocks cannot be cut as `[pipeline] stages` says."""
        if problem := cut_problem(self.pipeline.stages, blocks):
            raise JobFileError(problem)

    # ---------------------------------------------------------------- what preparation added

    @cached_property
    def description(self) -> ModelDescription:
        """The resolved model. Raises JobFileError when the job is not prepared."""
        return ModelDescription.from_record(self._prepared().model)

    @cached_property
    def dataset(self) -> DatasetMeta:
        """The format of the dataset's records. Raises JobFileError when the job is not prepared."""
        return DatasetMeta.from_record(self._prepared().dataset)

    def _prepared(self) -> PreparedSection:
        if self.prepared is None:
            raise JobFileError(
                f"job {self.job.name!r} is not prepared: run `starlings prepare` on its job file"
            )
        return self.prepared

    # ---------------------------------------------------------------- bytes and digests

    def to_json(self) -> bytes:
        """What workers get: all that they must agree on, without the owner's paths and addresses."""
        record = self.model_dump(mode="json", by_alias=True)
        if self.prepared is not None:
            record["model"] = {"untie": self.model.untie}
            record["data"].update(source=["prepared"], tokenizer="prepared")
            for section in ("checkpoint", "network", *(() if self.bus.url else ("bus",))):
                del record[section]
        return _canonical(record)

    @classmethod
    def from_json(cls, data: bytes) -> JobSpec:
        """The inverse of `to_json`.

        Raises:
            JobFileError: not a job of this version; names the field.
        """
        if len(data) > JSON_LIMIT_BYTES:
            raise JobFileError(f"a job of {len(data)} bytes is above the limit of {JSON_LIMIT_BYTES}")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise JobFileError(explain_validation_error(error, cls, "the job", "")) from None

    def digest(self) -> str:
        """SHA-256 hex over what all must agree on. A longer `tokens` or another address leave it as it is."""
        record = json.loads(self.to_json())
        del record["job"]["tokens"]
        for section in ("swarm", "checkpoint", "network", "bus"):
            record.pop(section, None)
        return hashlib.sha256(_canonical(record)).hexdigest()

    def preparation_digest(self) -> str:
        """SHA-256 hex over what `starlings prepare` depends on; while it is equal, a preparation is good."""
        record = self.model_dump(mode="json", by_alias=True, include={"model", "data"})
        # Who is given which samples is decided later.
        del record["data"]["skew"]
        record["seed"], record["trainable"] = self.job.seed, list(self.train.trainable)
        if self.unties:
            record["model"]["untie"] = True
        return hashlib.sha256(_canonical(record)).hexdigest()


def load_job(path: str | Path) -> JobSpec:
    """The job that a `job.toml` describes.

    Raises:
        JobFileError: the file cannot be read, is no TOML, or says something that cannot be; names file, line,
            key and what is allowed.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JobFileError(
            f"{path}: cannot read the job file ({error.strerror}); `starlings init` writes one"
        ) from None
    if len(data) > JSON_LIMIT_BYTES:
        raise JobFileError(f"{path}: a job file of {len(data)} bytes is above {JSON_LIMIT_BYTES}")
    try:
        text = data.decode("utf-8")
        return parse_job(text, str(path))
    except UnicodeDecodeError as error:
        raise JobFileError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def parse_job(text: str, where: str = "job.toml") -> JobSpec:
    """As `load_job`, from the file's text; `where` names it in errors."""
    try:
        record = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Most are TOMLDecodeErrors; a number of 5000 digits and brackets 5000 deep are not.
        raise JobFileError(explain_syntax_error(error, where)) from None
    if "prepared" in record:
        raise JobFileError(f"{where}: [prepared] is for `starlings prepare` and cannot stand in a job file")
    try:
        return JobSpec.model_validate(record)
    except ValidationError as error:
        raise JobFileError(explain_validation_error(error, JobSpec, where, text)) from None


def _canonical(record: object) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
