"""What `convergence.py` trains: each row one way to exchange, with all that differs from its neighbours in its name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from starlings_job.exchange_rules import ExchangeRules, Preset, rules_for

# Of the long comparison, of the others (20 rounds of 50 steps), and before a warm start.
LONG_STEPS, STEPS, WARM_STEPS = 3000, 1000, 1000
SEEDS = 5
MICROBATCH = 4
# Tried for every preset before anything is compared, the middle ones first.
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
# A seed of its own, so that no rate is chosen by the runs that are compared.
RATE_SEED = 1000
PRESETS: tuple[Preset, ...] = ("allreduce", "pairs", "diloco", "noloco", "sparseloco", "gossip", "palsgd")


@dataclass(frozen=True, slots=True)
class Row:
    """One training, except for its seed and rate.

    group: rows that are compared with each other, and with the group's allreduce.
    lag: part of a round's steps that pass before its last swap stands, with training going on. diloco is a barrier,
        so both are compared with swaps that stand at once; what a lag costs is a part of its own.
    warm: it begins where synchronous training is after WARM_STEPS.
    delayed: gradients are as old as the pipeline is long.
    """

    group: str
    name: str
    rules: ExchangeRules
    steps: int = STEPS
    replicas: int = 4
    stages: int = 1
    lag: float = 0.0
    delayed: bool = False
    warm: bool = False

    @property
    def key(self) -> str:
        return f"{self.group} {self.name}"

    @property
    def settings(self) -> str:
        """Everything that its result depends on, beside what all rows have in common: what two groups share is trained
        once.
        """
        return repr(replace(self, group="", name=""))

    @property
    def quick(self) -> Row:
        """A few steps with a round in them."""
        main, warmup = self.rules.main, self.rules.warmup
        main = replace(main, inner_steps=min(3, main.inner_steps))
        if warmup is not None:
            warmup = replace(warmup, inner_steps=1)
        return replace(self, rules=replace(self.rules, main=main, warmup=warmup), steps=8)

    @property
    def rate_of(self) -> Row:
        """What its inner learning rate is the best for: as long a training by its preset's defaults, and in the long
        comparison by its own rules.
        """
        return row("rates", self.rules.preset, steps=self.steps) if self.group != "long" else self.alone

    @property
    def alone(self) -> Row:
        return replace(self, group="rates", name=f"{self.name}, {self.steps} steps")

    @property
    def synchronous(self) -> bool:
        return self.rules.preset == "allreduce"


def preset_rules(preset: Preset, **changes: Any) -> ExchangeRules:
    """A preset's defaults as language models are trained with them: with AdamW, or what comes nearest to it."""
    if preset == "gossip":
        changes = {"quasi_global": "adam", **changes}
    return rules_for(preset, **changes)


def row(group: str, preset: Preset, name: str = "", **changes: Any) -> Row:
    own = {key: changes.pop(key) for key in list(changes) if key in Row.__dataclass_fields__}
    return Row(group, name or preset, preset_rules(preset, **changes), **own)


def parts() -> list[Row]:
    """What each part of `pairs` brings: all of it, then without, or with more of, one of them."""
    rules = preset_rules("pairs")
    main, warmup = rules.main, rules.warmup
    assert warmup is not None
    plain = replace(main, outer_rate=1.0, outer_momentum=0.0)
    by_four = {
        "main": replace(main, inner_steps=main.inner_steps // 4),
        "warmup": replace(warmup, inner_steps=warmup.inner_steps // 4),
    }
    return [
        row("parts", "allreduce"),
        row("parts", "pairs"),
        row("parts", "pairs", "no warm-up", warmup=None, warmup_fraction=0.0),
        row("parts", "pairs", "warm-up of 10 %", warmup_fraction=0.1),
        row("parts", "pairs", "warm-up every 5 steps", warmup=replace(warmup, inner_steps=5)),
        row("parts", "pairs", "no outer step (1, 0)", main=plain),
        row("parts", "pairs", "less momentum (.7, .5)", main=replace(main, outer_momentum=0.5)),
        row("parts", "pairs", "one swap", swaps=1),
        row("parts", "pairs", "m travels as int4:64", momentum_codec="int4:64"),
        row("parts", "pairs", "exact z", codec="exact"),
        row("parts", "pairs", "four fragments", fragments=4, **by_four),
        row("parts", "pairs", "every 20 steps", main=replace(main, inner_steps=20)),
        row("parts", "pairs", "every 100 steps", main=replace(main, inner_steps=100)),
        row("parts", "pairs", "swaps stand after a fifth", lag=0.2),
        row("parts", "pairs", "after a fifth, m travels", lag=0.2, momentum_codec="int4:64"),
        row("parts", "pairs", "swaps stand at the next slot", lag=0.99),
        row("parts", "pairs", "3 stages, delayed", stages=3, delayed=True),
    ]


def all_rows() -> list[Row]:
    """In the order in which they are trained: what is promised first."""
    pairs = preset_rules("pairs")
    # As often as `pairs`, all along.
    as_often = {"main": pairs.main, "warmup": pairs.warmup, "warmup_fraction": pairs.warmup_fraction}
    warm = {"warm": True, "warmup": None, "warmup_fraction": 0.0}
    large = {"replicas": 8, "stages": 3}
    return [
        row("long", "allreduce", steps=LONG_STEPS),
        row("long", "pairs", steps=LONG_STEPS),
        row("long", "diloco", steps=LONG_STEPS, **as_often),
        row("warm", "allreduce", warm=True),
        row("warm", "pairs", **warm),
        *[row("presets", preset) for preset in PRESETS],
        row("large", "allreduce", **large),
        row("large", "pairs", delayed=True, **large),
        *parts(),
    ]
