"""What the parts of a timed simulation share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlings_protos.messages import KEEPER, WorkerId
from starlings_simulator.clock import Clock
from starlings_simulator.timed.costs import Costs
from starlings_simulator.timed.figures import Books
from starlings_simulator.timed.links import Links
from starlings_simulator.timed.machines import Machine, Swarm

if TYPE_CHECKING:
    from starlings_simulator.timed.engine import Engine


@dataclass(slots=True)
class World:
    swarm: Swarm
    costs: Costs
    clock: Clock = field(default_factory=Clock)
    links: Links = field(init=False)
    books: Books = field(init=False)
    machines: dict[WorkerId, Machine] = field(init=False)
    # Lives that take pushes, and machines that answer nothing, not even that they are gone.
    engines: dict[WorkerId, Engine] = field(default_factory=dict)
    vanished: set[WorkerId] = field(default_factory=set)
    # Of a connection that is refused.
    connect_s: float = 0.002

    def __post_init__(self) -> None:
        self.links = Links(self.clock, self.swarm)
        self.machines = {machine.worker_id: machine for machine in self.swarm.machines}
        self.books = Books(self.clock)

    def site_of(self, worker_id: WorkerId) -> str:
        machine = self.machines.get(worker_id)
        assert machine is not None or worker_id == KEEPER, f"nobody knows {worker_id}"
        return machine.site if machine is not None else self.swarm.owner_site

    def control_s(self, worker_id: WorkerId) -> float:
        """One way between a worker and the coordinator."""
        return self.swarm.one_way_s(self.site_of(worker_id), self.swarm.owner_site)
