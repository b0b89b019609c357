"""The outcome of ReplayStep: what the span's groups exchanged in a committed step, fetched from donors and applied."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlings_protos.state_fetch import Fetcher
from starlings_protos.state_transfer import StateTransferError
from starlings_worker.computer import Computer
from starlings_worker.core.effects import ReplayStep
from starlings_worker.core.events import ReplayFailed, StepReplayed
from starlings_worker.errors import EngineFault
from starlings_worker.history import PREFIX, Part, parse_part
from starlings_worker.loader import Donors, OnDevice

# A donor that has not applied the step yet will do so soon: it heard of the commit when this worker did.
_PATIENCE_S = 30.0
_ALLOWANCE_BYTES = 1 << 20


@dataclass(slots=True)
class Replayer:
    """All groups' updates are complete before the first is applied: a replay happens as a whole or not at all."""

    computer: Computer
    donors: Donors
    on_device: OnDevice
    log: Callable[[str, str], None]
    rng: random.Random = field(default_factory=random.Random)

    async def replay(self, effect: ReplayStep) -> StepReplayed | ReplayFailed:
        held = self.computer.held
        if held is None:
            return ReplayFailed(effect.step, "no span is held")
        groups = sorted(held.vectors)
        try:
            updates = await asyncio.gather(
                *(
                    self._fetch(effect.step, group, held.vectors[group].size, held.stage_count)
                    for group in groups
                )
            )
        except StateTransferError as error:
            return ReplayFailed(effect.step, str(error).splitlines()[0])
        by_group = dict(zip(groups, updates, strict=True))
        try:
            return await self.on_device(lambda: self.computer.replay(effect, by_group))
        except EngineFault as error:
            return ReplayFailed(effect.step, str(error))

    async def _fetch(self, step: int, group: str, size: int, stage_count: int) -> Sequence[Part]:
        """
        Raises:
            StateTransferError: no donor has it, or what they have is malformed.
        """
        fetcher = Fetcher(
            lambda: self.donors.of_update(group, stage_count),
            step + 1,
            True,
            # No codec needs more than the vector itself and its scales.
            8 * size + _ALLOWANCE_BYTES,
            self.rng,
            lambda donor, name, error: self.log(
                "warning", f"fetching {name} of step {step} from {donor}: {error}"
            ),
            _PATIENCE_S,
        )
        inbox = await fetcher.block(PREFIX + group)
        parts = []
        for name, tensor in inbox.tensors().items():
            try:
                number, begin, end, codec = parse_part(name)
            except ValueError:
                raise StateTransferError(f"the update of {group} has a part named {name[:40]!r}") from None
            parts.append(Part(begin, end, codec, tensor.data, number))
        return parts
