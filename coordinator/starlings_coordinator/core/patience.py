"""How long a step may take under the present plan before somebody is at fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlings_protos.messages import Span

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core


class Patience:
    """Seconds; worked out once per plan."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: tuple[int, float, float] = (-1, 0.0, 0.0)

    def _of_plan(self) -> tuple[int, float, float]:
        version = self._core.state.plan_version
        if self._known[0] != version:
            self._known = (version, self._of_exchanges(), self._of_leases())
        return self._known

    @property
    def exchange_s(self) -> float:
        """With an exchange: the least, and time to send the largest span's gradient thrice both ways."""
        return self._of_plan()[1]

    @property
    def lease_s(self) -> float:
        """With a lease: the least, and twenty passes through full queues of the slowest holders."""
        return self._of_plan()[2]

    def _of_exchanges(self) -> float:
        core = self._core
        largest = max(map(self._parameters, core.state.spans.values()), default=0)
        probes = [holder.probe for holder in core.holders if holder.probe is not None]
        rates = [probe.uplink_bytes_per_s for probe in probes if probe.uplink_bytes_per_s > 0]
        slowest = max(1e5, min([*rates, core.config.timings.unknown_uplink_bytes_per_s]))
        return core.config.timings.exchange_s + 3 * 2 * 4 * largest / slowest

    def _parameters(self, span: Span) -> int:
        stages = self._core.state.stages
        first, last = stages[span.first_stage].first_block, stages[span.last_stage].last_block
        return self._core.config.profile.stage_parameters(first, last)

    def _of_leases(self) -> float:
        core = self._core
        slowest = [0.0] * len(core.state.stages)
        for holder in core.holders:
            span = core.state.spans[holder.worker_id]
            peer = holder.peer(span, core.state.stages, core.config.profile, 1) if holder.probe else None
            for at, stage in enumerate(span.stages if peer is not None else ()):
                assert peer is not None
                slowest[stage] = max(slowest[stage], peer.forward_seconds[at] + peer.backward_seconds[at])
        return core.config.timings.lease_s + 20 * 8 * sum(slowest)
