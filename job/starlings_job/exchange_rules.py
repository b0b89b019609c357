"""The numbers of every way to exchange (`[exchange] preset`), what may be combined, and what is known to diverge.

Torch-free and pure: coordinator, planner, worker and job file read the same record. The arithmetic that these numbers
go into is in `starlings_worker.outer`; formulas and papers are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from starlings_job.noloco_stability import noloco_growth

Preset = Literal["allreduce", "pairs", "diloco", "noloco", "sparseloco", "gossip", "palsgd"]
Topology = Literal["all", "pairs", "exponential"]
Robust = Literal["none", "clip", "trimmed", "centered_clip"]
Correction = Literal["none", "predict", "nadam"]

QuasiGlobal = Literal["none", "sgd", "adam"]

PRESETS: tuple[Preset, ...] = get_args(Preset)
TOPOLOGY: dict[Preset, Topology] = {
    "allreduce": "all",
    "pairs": "pairs",
    "diloco": "all",
    "noloco": "pairs",
    "sparseloco": "all",
    "gossip": "exponential",
    "palsgd": "pairs",
}
# `local` is a barrier every H steps, with quorum and deadline: neither a transaction per step nor no barrier at all.
SCHEDULE: dict[Preset, str] = {
    "allreduce": "sync",
    "pairs": "async",
    "noloco": "async",
    "palsgd": "async",
    "gossip": "async",
    "diloco": "local",
    "sparseloco": "local",
}
# NAdam without a reset of its first moment was unstable with outer (.7, .9) up to this H (design, section 6).
NADAM_INNER_STEPS_UNSTABLE = 65
_NADAM_MOMENTUM = 0.8
# Where momentum lies on what averaging does to the weights ("coupled"), drops make this much diverge.
COUPLED_MOMENTUM_LIMIT = 0.8
# Half of all swaps dropped: what a coupled rule must survive.
_DROP_RATE_CHECKED = 0.5


class RuleError(ValueError):
    """Settings of the exchange that cannot work, or are known to diverge. One sentence that says the fix."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What holds during a part of the training."""

    # H: inner steps from one slot to the next.
    inner_steps: int
    # eta and mu of the outer step.
    outer_rate: float
    outer_momentum: float


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """All that the arithmetic of an exchange needs to know. `rules_for` gives a preset's defaults."""

    preset: Preset
    # What holds after the warm-up.
    main: Phase
    # Before that: for the first `warmup_fraction` of the job's tokens. None: no warm-up.
    warmup: Phase | None = None
    warmup_fraction: float = 0.0
    # Averagings with different partners per round. More: replicas stay closer, bytes rise in proportion.
    swaps: int = 1
    # During the warm-up, whose rounds are more frequent. None: as many.
    warmup_swaps: int | None = None
    # P: a slot exchanges one P-th of the vector, and fragments take turns: each one every P H steps, for a P-th of the
    # bytes per step.
    fragments: int = 1
    # How weights (or displacements, or gradients) travel, and how the outer momentum does; None: it does not travel.
    # Outer steps are linear in m and averaging keeps the mean, so the mean of all replicas moves the same way without;
    # only their distance from it is larger.
    codec: str = "int8:128"
    momentum_codec: str | None = None
    # e' = decay e + x - q. None: no error feedback.
    feedback_decay: float | None = None
    # AdamW's betas between exchanges.
    inner_beta1: float = 0.9
    inner_beta2: float = 0.95
    # noloco: weight of the pull towards the pair's mean. Its alpha is `outer_momentum`, its beta `outer_rate`.
    gamma: float = 0.0
    # diloco by fragments: how much of the steps taken meanwhile stays, 0 (none) to 1 (all, and nothing of the others).
    merge_alpha: float = 0.0
    # palsgd: probability p that a step is a pull towards the last average instead, and alpha: it pulls by alpha lr / p.
    pull_probability: float = 0.0
    pull: float = 0.0
    # gossip: how its inner steps remember where gossip took the weights, by momentum (sgd) or second moment (adam).
    # none: the inner optimizer is the job's, as if there were no gossip.
    quasi_global: QuasiGlobal = "sgd"
    # sgd: mu of the quasi-global buffer, and beta with which it enters a step.
    quasi_global_mu: float = 0.9
    quasi_global_beta: float = 0.9
    robust: Robust = "none"
    # A gradient that is older than this many own steps is passed upstream and not added here.
    max_staleness: int = 8
    correction: Correction = "none"
    # nadam: forget its first moment at each outer step.
    reset_first_moment: bool = False
    # After so many rounds alone in a row mu = 0 and eta = 1.
    solo_rounds_limit: int = 4
    # Who comes back this many times the usual distance away fetches state instead of averaging.
    comeback_factor: float = 3.0

    @property
    def topology(self) -> Topology:
        return TOPOLOGY[self.preset]

    @property
    def schedule(self) -> str:
        """`sync`, `async`, or `local` (local steps with quorum and deadline)."""
        return SCHEDULE[self.preset]

    def swaps_in(self, phase: Phase) -> int:
        return self.warmup_swaps if phase == self.warmup and self.warmup_swaps is not None else self.swaps

    def phase_at(self, tokens_done: int, tokens_total: int) -> Phase:
        """What holds when `tokens_done` of the job's tokens are trained; equal on all who are told the same."""
        if self.warmup is not None and tokens_done < self.warmup_fraction * tokens_total:
            return self.warmup
        return self.main


_DEFAULTS: dict[Preset, ExchangeRules] = {
    "allreduce": ExchangeRules("allreduce", Phase(1, 1.0, 0.0), codec="exact", feedback_decay=1.0),
    # More than 80 times fewer bytes than an allreduce in float32, the average at the end included. Tried over 1,500
    # steps of `micro`, one seed (benchmarks/inprocess): momentum also in the warm-up costs 9 % more loss, one twice as
    # long of exchanges half as frequent 1.5 %, and (1, .5) after it some .7 %. Over 3,000 steps a warm-up that thins
    # out (H = 6, 10, 20) changes nothing, and plain averages (1, 0) for the last 10 or 15 % of them bring .2 or .1 %,
    # begun from the same weights: not worth numbers of their own.
    "pairs": ExchangeRules(
        "pairs",
        Phase(50, 0.7, 0.9),
        warmup=Phase(12, 1.0, 0.0),
        warmup_fraction=0.2,
        swaps=2,
    ),
    "diloco": ExchangeRules("diloco", Phase(50, 0.7, 0.9), feedback_decay=1.0),
    "noloco": ExchangeRules("noloco", Phase(50, 0.7, 0.5), gamma=0.7),
    "sparseloco": ExchangeRules(
        "sparseloco",
        Phase(30, 1.0, 0.0),
        codec="topk:64/4096|int2:64",
        feedback_decay=0.95,
        robust="clip",
    ),
    "gossip": ExchangeRules("gossip", Phase(1, 1.0, 0.0)),
    "palsgd": ExchangeRules("palsgd", Phase(50, 0.7, 0.9), pull_probability=0.2, pull=0.5),
}


def rules_for(preset: Preset, *, force: bool = False, **changes: Any) -> ExchangeRules:
    """The preset's defaults, with `changes` of single fields, checked.

    Args:
        force: as in `check`.

    Raises:
        RuleError: they are out of range or known to diverge.
    """
    rules = replace(_DEFAULTS[preset], **changes)
    check(rules, force=force)
    return rules


def check(rules: ExchangeRules, *, force: bool = False) -> None:
    """Whether these numbers make sense together.

    Args:
        force: take also what is known to diverge; what makes no sense stays refused.

    Raises:
        RuleError
    """
    _check_ranges(rules)
    if not force:
        for phase in _phases(rules):
            _check_divergence(rules, phase)


def check_schedule(preset: Preset, schedule: str) -> None:
    """Whether `[train] schedule` can use that preset.

    `sync` takes allreduce; `async` takes all others: also the local steps of diloco and sparseloco, whose rounds have a
    quorum and a deadline, are leased and counted as its are.

    Raises:
        RuleError
    """
    if schedule not in ("sync", "async"):
        raise RuleError(f'schedule = "{schedule}" does not exist; write "sync" or "async"')
    needed = _schedule_of(preset)
    if needed == schedule:
        return
    fitting = ", ".join(name for name in PRESETS if _schedule_of(name) == schedule)
    raise RuleError(
        f'preset = "{preset}" needs schedule = "{needed}"; write that, or with schedule = "{schedule}" one of {fitting}'
    )


def _schedule_of(preset: Preset) -> str:
    """As `[train] schedule` calls it."""
    return "async" if SCHEDULE[preset] == "local" else SCHEDULE[preset]


def _phases(rules: ExchangeRules) -> tuple[Phase, ...]:
    return (rules.main,) if rules.warmup is None else (rules.warmup, rules.main)


def _check_ranges(rules: ExchangeRules) -> None:
    for phase in _phases(rules):
        if phase.inner_steps < 1:
            raise RuleError(f"every = {phase.inner_steps} is no number of steps; write 1 or more")
        if not (math.isfinite(phase.outer_rate) and phase.outer_rate > 0):
            raise RuleError(
                f"an outer rate of {phase.outer_rate:g} does not move the weights; write more than 0"
            )
        if not 0 <= phase.outer_momentum < 1:
            raise RuleError(
                f"an outer momentum of {phase.outer_momentum:g} never forgets; write 0 or more and less than 1"
            )
    if rules.preset in ("allreduce", "gossip") and rules.main.inner_steps != 1:
        raise RuleError(f"{rules.preset} exchanges every step; write every = 1, or another preset")
    if rules.swaps < 1 or (rules.swaps > 1 and rules.preset not in ("pairs", "palsgd")):
        raise RuleError(f"swaps = {rules.swaps}: {rules.preset} takes 1; pairs and palsgd take 1 or more")
    if rules.warmup_swaps is not None and not 1 <= rules.warmup_swaps <= rules.swaps:
        raise RuleError(
            f"warmup_swaps = {rules.warmup_swaps} is out of range; write 1 to swaps = {rules.swaps}"
        )
    if rules.fragments < 1:
        raise RuleError(f"fragments = {rules.fragments} cuts nothing; write 1 or more")
    fractions = {
        "warmup_fraction": rules.warmup_fraction,
        "merge_alpha": rules.merge_alpha,
        "pull_probability": rules.pull_probability,
        "inner_beta1": rules.inner_beta1,
        "inner_beta2": rules.inner_beta2,
        "quasi_global_mu": rules.quasi_global_mu,
        "quasi_global_beta": rules.quasi_global_beta,
    }
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise RuleError(f"{name} = {value:g} is out of range; write 0 or more and less than 1")
    if not 0 <= rules.pull < math.inf:
        raise RuleError(f"pull = {rules.pull:g} is out of range; write 0 or more")
    if rules.preset == "gossip" and rules.quasi_global != "none" and rules.correction != "none":
        raise RuleError(
            f'correction = "{rules.correction}" is for the moments of an optimizer, and quasi-global momentum has '
            'others; write correction = "none", or quasi_global = false'
        )
    if rules.preset == "sparseloco" and any(phase.outer_momentum for phase in _phases(rules)):
        raise RuleError(
            "sparseloco's error feedback takes the place of outer momentum; write an outer momentum of 0"
        )
    if rules.feedback_decay is not None and not 0 <= rules.feedback_decay <= 1:
        raise RuleError(f"feedback_decay = {rules.feedback_decay:g} is out of range; write 0 to 1")
    if rules.robust != "none" and rules.topology != "all":
        raise RuleError(
            f'robust = "{rules.robust}" needs a group to compare in, and {rules.preset} exchanges in pairs; write '
            'robust = "none" (finite values and the norm bound are always checked), or diloco, sparseloco or allreduce'
        )
    if rules.max_staleness < 0:
        raise RuleError(f"max_staleness = {rules.max_staleness} is out of range; write 0 or more steps")
    if rules.solo_rounds_limit < 1 or not rules.comeback_factor > 1:
        raise RuleError("solo_rounds_limit must be 1 or more, and comeback_factor more than 1")


def _check_divergence(rules: ExchangeRules, phase: Phase) -> None:
    if (
        rules.correction == "nadam"
        and not rules.reset_first_moment
        and phase.outer_momentum >= _NADAM_MOMENTUM
        and phase.inner_steps <= NADAM_INNER_STEPS_UNSTABLE
    ):
        raise RuleError(
            f"nadam with an outer momentum of {phase.outer_momentum:g} every {phase.inner_steps} steps diverges; set "
            f"reset_first_moment = true, or write every = {NADAM_INNER_STEPS_UNSTABLE + 1} or more"
        )
    if rules.preset == "noloco":
        _check_noloco(rules, phase)


def _check_noloco(rules: ExchangeRules, phase: Phase) -> None:
    alpha, gamma = phase.outer_momentum, rules.gamma
    if alpha >= COUPLED_MOMENTUM_LIMIT:
        raise RuleError(
            f"noloco with a momentum of {alpha:g} diverges, because its momentum repeats what averaging did; write "
            f'less than {COUPLED_MOMENTUM_LIMIT:g} (0.5 is its paper\'s), or preset = "pairs"'
        )
    # Kolehmainen et al. 2025, the condition on gamma of their appendix: for subsets of two, alpha < gamma < 2 + alpha.
    if not alpha < gamma < 2 + alpha:
        raise RuleError(
            f"noloco keeps its replicas together for gamma between {alpha:g} and {2 + alpha:g}, not with {gamma:g}; "
            f"write gamma = {max(phase.outer_rate, alpha + 0.2):g}"
        )
    growth = max(noloco_growth(alpha, gamma, rate) for rate in (0.0, _DROP_RATE_CHECKED))
    if growth >= 1:
        raise RuleError(
            f"noloco with alpha = {alpha:g} and gamma = {gamma:g} drives its replicas apart when swaps fail (their "
            f"distance grows by {growth:.2f} a round); write alpha = 0.5 and gamma = 0.7"
        )


def pair_share(own_weight: float, partner_weight: float) -> float:
    """w: the own share of the pair's tokens, both by the ledger. Half each when neither has any."""
    total = own_weight + partner_weight
    if not (math.isfinite(total) and min(own_weight, partner_weight) >= 0):
        raise ValueError(f"weights {own_weight} and {partner_weight} are no token counts")
    # Neither side may vanish: it would take the other's weights whole.
    return 0.5 if total == 0 else min(0.99, max(0.01, own_weight / total))
