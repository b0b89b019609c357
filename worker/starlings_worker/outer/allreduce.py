"""`allreduce`: the mean gradient of every step, and no outer step at all (Goyal et al. 2017, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import ExchangeRules
from starlings_worker.outer.state import Payload


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Group rule over a gradient: `at_slot`, then `commit` with the aggregate before the inner optimizer's step."""

    rules: ExchangeRules

    def at_slot(self, gradient: Tensor) -> Payload:
        return Payload(gradient)

    @torch.no_grad()
    def commit(self, gradient: Tensor, aggregate: Tensor) -> None:
        """The gradient becomes the group's weighted mean, which everybody decoded from the same bytes."""
        gradient.copy_(aggregate)
