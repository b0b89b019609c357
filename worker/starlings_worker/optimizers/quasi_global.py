"""The inner optimizer of `gossip` on flat vectors: `outer/quasi_global.py` with clipping and weight decay.

With "sgd" the quasi-global momentum m^ lies in `momentum`; with "adam" the own first moment lies in `exp_avg` and the
quasi-global second moment v^ in `exp_avg_sq`: what checkpoints, copies and the average at the end hold of SGD with
momentum and of AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlings_job.exchange_rules import ExchangeRules
from starlings_job.optimizers import Kept
from starlings_worker.flat import Entry, FlatVector, keeps
from starlings_worker.optimizers.elementary import clipped, decay
from starlings_worker.outer.quasi_global import QuasiGlobal, QuasiGlobalState

_sgd = keeps("momentum")
_adam = keeps("exp_avg", "exp_avg_sq")


class QuasiGlobalOptimizer:
    """An `Optimizer` of one span. It remembers, by group, where the weights were when gossip was last through."""

    def __init__(self, rules: ExchangeRules, weight_decay: float) -> None:
        """`weight_decay`: decoupled, as AdamW's; "sgd" has none."""
        self._inner = QuasiGlobal(rules)
        self._adam = rules.quasi_global == "adam"
        self._weight_decay = weight_decay if self._adam else 0.0
        self._states: dict[str, QuasiGlobalState] = {}

    def keeps(self, entry: Entry) -> Sequence[Kept]:
        return _adam(entry) if self._adam else _sgd(entry)

    def step(self, vector: FlatVector, *, number: int, learning_rate: float, clip_factor: float) -> None:
        state = self._of(vector)
        # The bias of young moments is that of the stage's steps, whoever made them.
        state.steps = number - 1
        clipped(vector.gradient, clip_factor)
        decay(vector, vector.decaying(), 1.0 - learning_rate * self._weight_decay)
        self._inner.step(state, vector.parameters, vector.gradient, learning_rate)

    def after_gossip(self, vector: FlatVector) -> None:
        """To be called when a slot begins: what the slot before it did to the weights is in them."""
        self._inner.after_gossip(self._of(vector), vector.parameters)

    def restart(self) -> None:
        """The weights are new."""
        self._states.clear()

    def _of(self, vector: FlatVector) -> QuasiGlobalState:
        state = self._states.get(vector.group)
        if state is None:
            kept = vector.state
            first = kept["exp_avg"] if self._adam else None
            buffer = kept["exp_avg_sq"] if self._adam else kept["momentum"]
            state = QuasiGlobalState(vector.parameters.clone(), buffer, first, met=bool(buffer.any()))
            self._states[vector.group] = state
        return state
