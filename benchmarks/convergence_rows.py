"""What `convergence.py` trains: each row one way to exchange, with all that differs from its neighbours in its name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from starlings_job.exchange_rules import ExchangeRules, Phase, Preset, rules_for

# Of the long comparison, of the others (20 rounds of 50 steps), and before a warm start.
LONG_STEPS, STEPS, WARM_STEPS = 3000, 1000, 1000
SEEDS = 5
MICROBATCH = 4
# Tried for every preset before anything is compared.
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
RATE_STEPS = 600
# A seed of its own, so that no rate is chosen by the runs that are compared.
RATE_SEED = 1000
# A round's bytes take a fifth of the steps until the next one, and training goes on meanwhile.
LAG = 0.2
PRESETS: tuple[Preset, ...] = ("allreduce", "pairs", "diloco", "noloco", "sparseloco", "gossip", "palsgd")


@dataclass(frozen=True, slots=True)
class Row:
    """One training, except for its seed and rate.

    group: rows that are compared with each other, and with the group's allreduce.
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
        phase = replace(self.rules.main, inner_steps=min(3, self.rules.main.inner_steps))
        return replace(self, rules=replace(self.rules, main=phase), steps=8)

    @property
    def synchronous(self) -> bool:
        return self.rules.preset == "allreduce"


def preset_rules(preset: Preset, **changes: Any) -> ExchangeRules:
    """A preset's defaults as language models are trained with them: with AdamW, or what comes nearest to it."""
    if preset == "gossip":
        changes = {"quasi_global": "adam", **changes}
    return rules_for(preset, **changes)


def lag_of(rules: ExchangeRules) -> float:
    """Pairs meet in the background; the others are barriers, or exchange every step."""
    return LAG if rules.topology == "pairs" else 0.0


def row(group: str, preset: Preset, name: str = "", **changes: Any) -> Row:
    own = {key: changes.pop(key) for key in list(changes) if key in Row.__dataclass_fields__}
    rules = preset_rules(preset, **changes)
    return Row(group, name or preset, rules, **{"lag": lag_of(rules), **own})


def parts() -> list[Row]:
    """What each part of `pairs` brings: all of it, then without, or with more of, one of them."""
    main = preset_rules("pairs").main
    plain = replace(main, outer_rate=1.0, outer_momentum=0.0)
    return [
        row("parts", "allreduce"),
        row("parts", "pairs"),
        row("parts", "pairs", "no warm-up", warmup=None, warmup_fraction=0.0),
        row("parts", "pairs", "warm-up with one swap", warmup_swaps=1),
        row("parts", "pairs", "warm-up of 10 %", warmup_fraction=0.1),
        row("parts", "pairs", "warm-up of 10 %, one swap in it", warmup_fraction=0.1, warmup_swaps=1),
        row("parts", "pairs", "no outer step (1, 0)", main=plain),
        row("parts", "pairs", "less momentum (.7, .5)", main=replace(main, outer_momentum=0.5)),
        row("parts", "pairs", "one swap", swaps=1),
        row("parts", "pairs", "m stays at home", momentum_codec=None),
        row("parts", "pairs", "exact z and m", codec="exact", momentum_codec="exact"),
        row(
            "parts",
            "pairs",
            "four fragments",
            fragments=4,
            main=Phase(12, 0.7, 0.9),
            warmup=Phase(1, 1.0, 0.0),
        ),
        row("parts", "pairs", "every 20 steps", main=replace(main, inner_steps=20)),
        row("parts", "pairs", "every 100 steps", main=replace(main, inner_steps=100)),
        row("parts", "pairs", "swaps stand at once", lag=0.0),
        row("parts", "pairs", "swaps stand at the next slot", lag=0.99),
        row("parts", "pairs", "3 stages, delayed", stages=3, delayed=True),
    ]


def all_rows() -> list[Row]:
    """In the order in which they are trained: what is promised first."""
    warm = {"warm": True, "warmup": None, "warmup_fraction": 0.0}
    large = {"replicas": 8, "stages": 3}
    return [
        row("long", "allreduce", steps=LONG_STEPS),
        row("long", "pairs", steps=LONG_STEPS),
        row("long", "diloco", steps=LONG_STEPS),
        row("warm", "allreduce", warm=True),
        row("warm", "pairs", **warm),
        *[row("presets", preset) for preset in PRESETS],
        row("large", "allreduce", **large),
        row("large", "pairs", delayed=True, **large),
        *parts(),
    ]
