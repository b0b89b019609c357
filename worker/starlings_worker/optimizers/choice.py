"""From a job's settings to its optimizer."""

from __future__ import annotations

from typing import assert_never

from starlings_job.exchange_rules import ExchangeRules
from starlings_job.sections import TrainSection
from starlings_worker.optimizers.adam import AdamW, AdamW8bit, NAdam
from starlings_worker.optimizers.elementary import Optimizer
from starlings_worker.optimizers.muon import Muon
from starlings_worker.optimizers.quasi_global import QuasiGlobalOptimizer
from starlings_worker.optimizers.sgd import Sgd


def make_optimizer(train: TrainSection, rules: ExchangeRules | None = None) -> Optimizer:
    """The optimizer that `[train]` names, with its settings.

    Args:
        rules: of replicas that exchange beside training; gossip's may ask for quasi-global momentum.
    """
    if rules is not None and rules.preset == "gossip" and rules.quasi_global != "none":
        return QuasiGlobalOptimizer(rules, train.weight_decay)
    adamw = AdamW(train.beta1, train.beta2, train.epsilon, train.weight_decay)
    match train.optimizer:
        case "adamw":
            return adamw
        case "nadam":
            return NAdam(train.beta1, train.beta2, train.epsilon, train.weight_decay, train.momentum_decay)
        case "sgd":
            return Sgd(momentum=train.momentum, weight_decay=0.0)
        case "muon":
            return Muon(adamw, train.momentum, train.muon_scale, train.muon_iterations, train.muon_adamw_lr)
        case "adamw8bit":
            return AdamW8bit(adamw)
        case _:
            assert_never(train.optimizer)
