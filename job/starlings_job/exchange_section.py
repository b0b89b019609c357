"""`[exchange]` of `job.toml`: how replicas of a stage come together. What each preset's numbers mean and when they
diverge: exchange_rules.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from starlings_compression.errors import SpecError
from starlings_compression.policy import Role
from starlings_compression.spec import parse_spec
from starlings_job.codecs import check_codec
from starlings_job.exchange_rules import (
    PRESETS,
    ExchangeRules,
    Phase,
    RuleError,
    check_schedule,
    rules_for,
)
from starlings_job.sections import Codec, Real, Section, Switch, TrainSection, Whole

# Of those that exchange_rules.py knows, what a job can have; "none" beside them.
AVAILABLE = ("allreduce", "pairs")
# What replicas that do not meet on the way are called.
NONE = "none"
# Settings that mean nothing to other presets.
_OF_PAIRS = (
    "swaps",
    "fragments",
    "outer_rate",
    "outer_momentum",
    "momentum_codec",
    "warmup_fraction",
    "warmup_every",
    "warmup_swaps",
    "seed",
)


def _momentum_codec(value: object) -> object:
    return value if value == NONE or not isinstance(value, str) else parse_spec(value).text


class ExchangeSection(Section):
    # "allreduce": every step, with `sync`. "pairs": with `async`, every H steps each replica steps for itself and then
    # averages with a partner. "none": with `async`, replicas go their own ways and are averaged at the end.
    preset: Literal["allreduce", "pairs", "none"] = "allreduce"
    # Use the codec also where it is known to hurt, and settings that are known to diverge.
    force: Switch = False
    # "allreduce": how gradients travel; what a codec drops comes with the next step (error feedback). "pairs": how
    # weights travel, "int8:128" when left out. Both sides use what was decoded, one's own too, so a pair's weighted
    # mean is kept exactly whatever the codec drops.
    codec: Codec = "exact"
    # H: steps between exchanges. For "pairs" 50 when left out: a slot lasts H times the median step of a stage's
    # replicas. Bytes fall with 1 / H, and replicas run apart for longer.
    every: Whole = Field(default=1, ge=1, le=1_000_000)
    robust: Literal["none"] = "none"
    # From here on "pairs" alone. Averagings with different partners in a slot. Each costs a payload; n of them bring
    # replicas about as close as one every H / n steps (Boyd et al. 2006, section 2: the distance falls by a factor
    # for each).
    swaps: Whole = Field(default=2, ge=1, le=16)
    # P: slot k exchanges fragment k mod P of each stage's vector, so a slot sends a P-th, and each fragment is averaged
    # every P H steps (Douillard et al. 2025, "Streaming DiLoCo", section 2.2).
    fragments: Whole = Field(default=1, ge=1, le=1024)
    # eta and mu: Delta = phi - theta; m = mu m + Delta; theta = phi = phi - eta (Delta + mu m). That is Nesterov's
    # momentum over the displacement of H steps: Douillard et al. 2023 ("DiLoCo"), algorithm 1, with its (.7, .9).
    outer_rate: Real = Field(default=0.7, gt=0, le=10)
    outer_momentum: Real = Field(default=0.9, ge=0, lt=1)
    # How the outer momentum m travels, to be averaged like the weights; "none": it stays at home.
    momentum_codec: Annotated[str, BeforeValidator(_momentum_codec)] = "int4:64"
    # The warm-up: for this share of the job's tokens H is `warmup_every`, with eta = 1 and mu = 0, which is plain
    # averaging (local SGD that begins with frequent averaging: Lin et al. 2020, "Don't use large mini-batches, use
    # local SGD", section 3). Young weights run apart fast, and momentum of a curved path points aside. 0: none.
    warmup_fraction: Real = Field(default=0.2, ge=0, lt=1)
    warmup_every: Whole = Field(default=5, ge=1, le=1_000_000)
    # Swaps in a slot of the warm-up; 0: as many as later.
    warmup_swaps: Whole = Field(default=0, ge=0, le=16)
    # Who meets whom follows from this and from the job's seed.
    seed: Whole = Field(default=0, ge=0, lt=2**63)

    @property
    def pairs(self) -> bool:
        """Whether replicas exchange in pairs."""
        return self.preset == "pairs"

    def rules(self, train: TrainSection) -> ExchangeRules | None:
        """The numbers of a preset that exchanges in pairs, checked; None for the others.

        Raises:
            RuleError: they make no sense, or are known to diverge and `force` is not set.
        """
        if not self.pairs:
            return None
        warmup = Phase(self.warmup_every, 1.0, 0.0) if self.warmup_fraction > 0 else None
        changes: dict[str, Any] = {
            "main": Phase(self.every, self.outer_rate, self.outer_momentum),
            "warmup": warmup,
            "warmup_fraction": self.warmup_fraction,
            "swaps": self.swaps,
            "warmup_swaps": self.warmup_swaps or None,
            "fragments": self.fragments,
            "codec": self.codec,
            "momentum_codec": None if self.momentum_codec == NONE else self.momentum_codec,
            "inner_beta1": train.beta1,
            "inner_beta2": train.beta2,
            "max_staleness": train.max_staleness,
            "correction": train.correction,
            # Without that it diverges at almost every H that a job may have.
            "reset_first_moment": train.correction == "nadam",
        }
        return rules_for("pairs", force=self.force, **changes)

    def check_schedule(self, schedule: str) -> None:
        """Whether the preset goes with `[train] schedule`.

        Raises:
            RuleError
        """
        if self.preset != "none":
            check_schedule(self.preset, schedule, AVAILABLE)
        elif schedule != "async":
            raise RuleError(
                f'preset = "none" needs schedule = "async"; write that, or with schedule = "{schedule}" the preset '
                "allreduce"
            )

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("preset") == "pairs":
            defaults = rules_for("pairs")
            return {"codec": defaults.codec, "every": defaults.main.inner_steps, **values}
        return values

    @field_validator("codec")
    @classmethod
    def _suits(cls, value: str, info: ValidationInfo) -> str:
        role = Role.STATE if info.data.get("preset") == "pairs" else Role.GRADIENT
        return check_codec(value, role, force=info.data.get("force", False))

    @field_validator("momentum_codec")
    @classmethod
    def _suits_momentum(cls, value: str, info: ValidationInfo) -> str:
        if value == NONE:
            return value
        if parse_spec(value).reducer is not None and not info.data.get("force", False):
            raise SpecError(
                f"codec {value}: nothing brings back what a reducer drops of a momentum; use int4:64, or set "
                "force = true"
            )
        return check_codec(value, Role.DELTA, force=info.data.get("force", False))

    @field_validator("preset", mode="before")
    @classmethod
    def _preset(cls, value: object) -> object:
        if value in PRESETS and value not in AVAILABLE:
            raise ValueError(
                f'{value!r} is not there yet (it comes in a later version); write "allreduce", or with '
                'schedule = "async" one of "pairs" and "none"'
            )
        return value

    @field_validator("robust", mode="before")
    @classmethod
    def _robust(cls, value: object) -> object:
        if value != "none":
            raise ValueError(
                f"{value!r} is not there yet (centred clipping and the trimmed mean come in later versions); write "
                "'none'"
            )
        return value

    @model_validator(mode="after")
    def _belongs_to_preset(self) -> Self:
        if not self.pairs:
            if self.every != 1:
                raise RuleError(
                    f'every = {self.every} is for preset = "pairs" (with schedule = "async"); write every = 1 with '
                    f'"{self.preset}"'
                )
            fields = type(self).model_fields
            for key in _OF_PAIRS:
                if getattr(self, key) != fields[key].default:
                    raise RuleError(
                        f'{key} = {getattr(self, key)!r} is for preset = "pairs", and means nothing to '
                        f'"{self.preset}": remove it'
                    )
        return self
