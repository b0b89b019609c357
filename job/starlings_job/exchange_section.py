"""`[exchange]` of `job.toml`: how replicas of a stage come together. What each preset's numbers mean and when they
diverge: exchange_rules.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from starlings_compression.errors import SpecError
from starlings_compression.policy import Role
from starlings_compression.spec import parse_spec
from starlings_job.codecs import check_codec, linear_rank
from starlings_job.exchange_rules import (
    ExchangeRules,
    Phase,
    QuasiGlobal,
    Robust,
    RuleError,
    check_schedule,
    rules_for,
)
from starlings_job.exchange_settings import BY_SLOTS, GROUPS, HEEDED_BY, NONE, left_out, misplaced
from starlings_job.sections import Codec, Real, Section, Switch, TrainSection, Whole

_QUASI_GLOBAL: dict[str, QuasiGlobal] = {"sgd": "sgd", "adamw": "adam"}


def _momentum_codec(value: object) -> object:
    return value if value == NONE or not isinstance(value, str) else parse_spec(value).text


class ExchangeSection(Section):
    # "allreduce": every step, with `sync`. All others with `async`. "pairs": every H steps each replica steps for
    # itself and then averages with a partner. "noloco": momentum and averaging with a partner in one formula. "palsgd":
    # "pairs", and pulls towards the last average in between. "diloco": every H steps all replicas of a stage average
    # how far they have come, and step by that. "sparseloco": the same with few values of it. "gossip": an average with
    # one peer at every step, by the exponential graph (Ying et al. 2021). "none": replicas go their own ways and are
    # averaged at the end.
    preset: Literal["allreduce", "pairs", "noloco", "palsgd", "diloco", "sparseloco", "gossip", "none"] = (
        "allreduce"
    )
    # Use the codec also where it is known to hurt, and settings that are known to diverge.
    force: Switch = False
    # "allreduce": how gradients travel; what a codec drops comes with the next step (error feedback). Others: how
    # weights travel, "int8:128" when left out. Both sides use what was decoded, one's own too, so a pair's weighted
    # mean is kept exactly whatever the codec drops. "diloco", "sparseloco": how displacements travel ("int8:128",
    # "topk:64/4096|int2"), with error feedback.
    codec: Codec = "exact"
    # H: steps between exchanges; 50 when left out, but for "allreduce". A slot lasts H times the median step of a
    # stage's replicas. Bytes fall with 1 / H, and replicas run apart for longer.
    every: Whole = Field(default=1, ge=1, le=1_000_000)
    # "diloco", "sparseloco": how displacements become one, when some may be wrong. "none": the weighted mean; "clip":
    # each at most as long as the median one; "trimmed": per value, without the largest and smallest; "centered_clip":
    # around a centre, none farther from it than the median one. What is not finite, or ten times too long, is refused
    # whatever stands here.
    robust: Robust = "none"
    # From here on: exchange_settings.py says which preset heeds what. Averagings with different partners in a slot.
    # Each costs a payload; n of them bring replicas about as close as one every H / n steps (Boyd et al. 2006, section
    # 2: the distance falls by a factor for each).
    swaps: Whole = Field(default=2, ge=1, le=16)
    # P: slot k exchanges fragment k mod P of each stage's vector, so a slot sends a P-th, and each fragment is averaged
    # every P H steps (Douillard et al. 2025, "Streaming DiLoCo", section 2.2).
    fragments: Whole = Field(default=1, ge=1, le=1024)
    # eta and mu: Delta = phi - theta; m = mu m + Delta; theta = phi = phi - eta (Delta + mu m). That is Nesterov's
    # momentum over the displacement of H steps: Douillard et al. 2023 ("DiLoCo"), algorithm 1, with its (.7, .9).
    # "noloco": beta and alpha of delta = alpha delta - beta Delta - gamma (phi - mean(phi)), (.7, .5) when left out
    # (Kolehmainen et al. 2025, "NoLoCo", section 3).
    outer_rate: Real = Field(default=0.7, gt=0, le=10)
    outer_momentum: Real = Field(default=0.9, ge=0, lt=1)
    # How the outer momentum m travels, to be averaged like the weights; "none": it stays at home. Outer steps are
    # linear in m, and averaging keeps the mean: so the replicas' mean moves the same way without, for a third fewer
    # bytes, and only their distance from it is larger. Where replicas' texts differ, so do their m: then "int4:64".
    momentum_codec: Annotated[str, BeforeValidator(_momentum_codec)] = NONE
    # The warm-up: for this share of the job's tokens H is `warmup_every`, with eta = 1 and mu = 0, which is plain
    # averaging (local SGD that begins with frequent averaging: Lin et al. 2020, "Don't use large mini-batches, use
    # local SGD", section 3). Young weights run apart fast, and momentum of a curved path points aside. 0: none. Left
    # out, "pairs" alone has one.
    warmup_fraction: Real = Field(default=0.2, ge=0, lt=1)
    warmup_every: Whole = Field(default=12, ge=1, le=1_000_000)
    # Swaps in a slot of the warm-up; 0: as many as later.
    warmup_swaps: Whole = Field(default=0, ge=0, le=16)
    # Who meets whom follows from this and from the job's seed.
    seed: Whole = Field(default=0, ge=0, lt=2**63)
    # "noloco": gamma of the formula above, the pull towards the pair's mean. Replicas stay together for alpha < gamma <
    # 2 + alpha at most (Kolehmainen et al. 2025, appendix), and for less where swaps fail: noloco_stability.py.
    gamma: Real = Field(default=0.7, ge=0, le=10)
    # "palsgd": p and alpha. A share p of a replica's steps is theta = theta - alpha r / p (theta - phi) with phi its
    # last average, the others are steps of the optimizer with r / (1 - p) = `lr` (Naganuma et al. 2025,
    # "Pseudo-Asynchronous Local SGD", algorithm 1).
    pull_probability: Real = Field(default=0.2, ge=0, lt=1)
    pull: Real = Field(default=0.5, ge=0, le=1000)
    # "diloco", "sparseloco". 0: nothing is computed while a round is under way. More: training goes on, and so much of
    # what was trained meanwhile stays (alpha of Douillard et al. 2025, "Streaming DiLoCo", section 2.3).
    merge_alpha: Real = Field(default=0.0, ge=0, lt=1)

    # "gossip": inner steps remember where gossip took the weights (Lin et al. 2021, "Quasi-Global Momentum", algorithm
    # 1): with optimizer "sgd" theta = theta - lr (mu m^ + g), and after gossip m^ = mu m^ + (1 - mu) (theta_before -
    # theta) / lr, mu being `momentum`; with "adamw" the second moment is made so, of the change scaled to norm 1.
    # False: the optimizer as it is.
    quasi_global: Switch = True

    @property
    def pairs(self) -> bool:
        """Whether replicas exchange beside training, by slots."""
        return self.preset in BY_SLOTS

    def rules(self, train: TrainSection) -> ExchangeRules | None:
        """The numbers of a preset that goes by slots, checked; None for the others.

        Raises:
            RuleError: they make no sense, or are known to diverge and `force` is not set.
        """
        if self.preset not in BY_SLOTS:
            return None
        warmup = Phase(self.warmup_every, 1.0, 0.0) if self.warmup_fraction > 0 else None
        values: dict[str, Any] = {
            "swaps": self.swaps,
            "warmup_swaps": self.warmup_swaps or None,
            "fragments": self.fragments,
            "momentum_codec": None if self.momentum_codec == NONE else self.momentum_codec,
            "warmup_fraction": self.warmup_fraction,
            "gamma": self.gamma,
            "pull_probability": self.pull_probability,
            "pull": self.pull,
            "robust": self.robust,
            "merge_alpha": self.merge_alpha,
        }
        changes: dict[str, Any] = {
            **{key: value for key, value in values.items() if self.preset in HEEDED_BY[key]},
            "main": Phase(self.every, self.outer_rate, self.outer_momentum),
            "warmup": warmup,
            "codec": self.codec,
            "inner_beta1": train.beta1,
            "inner_beta2": train.beta2,
            "max_staleness": train.max_staleness,
            "correction": train.correction,
            # Without that it diverges at almost every H that a job may have.
            "reset_first_moment": train.correction == "nadam",
        }
        if self.preset == "gossip":
            changes |= {
                "quasi_global": self._quasi_global(train),
                "quasi_global_mu": train.momentum,
                "quasi_global_beta": train.momentum,
            }
        return rules_for(self.preset, force=self.force, **changes)

    def _quasi_global(self, train: TrainSection) -> QuasiGlobal:
        if not self.quasi_global:
            return "none"
        if train.optimizer not in _QUASI_GLOBAL:
            raise RuleError(
                f'quasi-global momentum has forms of "adamw" and "sgd", not of "{train.optimizer}"; write one of them, '
                "or quasi_global = false"
            )
        if train.optimizer == "sgd" and not train.momentum:
            return "none"
        return _QUASI_GLOBAL[train.optimizer]

    def check_schedule(self, schedule: str) -> None:
        """Whether the preset goes with `[train] schedule`.

        Raises:
            RuleError
        """
        if self.preset != "none":
            check_schedule(self.preset, schedule)
        elif schedule != "async":
            raise RuleError(
                f'preset = "none" needs schedule = "async"; write that, or with schedule = "{schedule}" the preset '
                "allreduce"
            )

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        if preset in BY_SLOTS:
            return {**left_out(preset, values.get("every")), **values}
        return values

    @field_validator("codec")
    @classmethod
    def _suits(cls, value: str, info: ValidationInfo) -> str:
        preset = info.data.get("preset")
        if preset in GROUPS and linear_rank(parse_spec(value)) is not None:
            raise SpecError(
                f"codec {value}: its factors need a sum, and a group refuses some; use int8:128 or int4:64"
            )
        role = Role.STATE if preset in BY_SLOTS and preset not in GROUPS else Role.GRADIENT
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

    @model_validator(mode="after")
    def _belongs_to_preset(self) -> Self:
        fields = type(self).model_fields
        defaults = {key: fields[key].default for key in HEEDED_BY}
        if self.preset in BY_SLOTS:
            defaults |= left_out(self.preset)
        if problem := misplaced(self.preset, {key: getattr(self, key) for key in HEEDED_BY}, defaults):
            raise RuleError(problem)
        return self
