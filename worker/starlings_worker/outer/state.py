"""What outer optimizers keep per fragment, and the chunked arithmetic that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starlings_job.exchange_rules import Phase
from starlings_worker.chunks import chunks
from starlings_worker.digest import squared_norm


@dataclass(slots=True)
class FragmentState:
    """Per fragment and replica. Vectors are flat float32 of the fragment's size, wherever the caller wants them."""

    # The point that the next displacement is measured from.
    phi: Tensor
    # The outer momentum m (delta in NoLoCo).
    momentum: Tensor
    # What is sent when it is neither phi nor m; None: the rule needs none.
    outgoing: Tensor | None = None
    # What a codec dropped so far, where the rule itself feeds it back (sparseloco).
    residual: Tensor | None = None
    # Rounds without an average since the last one with.
    solo_rounds: int = 0
    # Average of the distances at which this replica met its partners; None: none yet in this phase.
    usual_distance: float | None = None
    # The phase of the last slot: distances of another phase say nothing.
    phase: Phase | None = None

    @classmethod
    def starting_at(cls, theta: Tensor, *, momentum: bool = True) -> FragmentState:
        """For a replica that begins (or begins again, with state that it fetched) at the weights `theta`.

        Args:
            momentum: False for rules without one (sparseloco): then `momentum` is empty.
        """
        return cls(theta.clone(), torch.zeros_like(theta) if momentum else theta.new_empty(0))

    @property
    def size(self) -> int:
        return self.phi.numel()

    def enter(self, phase: Phase) -> None:
        """To be called at each slot: distances of another phase are forgotten."""
        if phase != self.phase:
            self.phase, self.usual_distance = phase, None

    def note_distance(self, distance: float) -> None:
        self.usual_distance = usual(self.usual_distance, distance)

    def need_outgoing(self) -> Tensor:
        if self.outgoing is None:
            self.outgoing = torch.empty_like(self.phi)
        return self.outgoing

    def displacement(self, theta: Tensor) -> Tensor:
        """phi - theta, in `outgoing`."""
        return torch.sub(self.phi, theta, out=self.need_outgoing())


@dataclass(frozen=True, slots=True)
class Payload:
    """What a replica sends, or a decoded one. Flat float32 of the fragment's size.

    What `at_slot` returns are views of the state: encode them before the next call on the same state.
    """

    z: Tensor
    m: Tensor | None = None


def usual(before: float | None, distance: float) -> float:
    """An exponential average of distances, over about five swaps."""
    return distance if before is None else 0.8 * before + 0.2 * distance


def nesterov_step(phi: Tensor, momentum: Tensor, displacement: Tensor, eta: float, mu: float) -> None:
    """m = mu m + D ;  phi = phi - eta (D + mu m). In place; `displacement` (a chunk, D) is used up.

    Nesterov's momentum as SGD with momentum is usually written (Sutskever et al. 2013, section 2, with the parameters
    at the point looked ahead to); the outer step of DiLoCo (Douillard et al. 2023, algorithm 1). Each operation is
    rounded by itself, so that unlike machines, which fuse a product and a sum or do not, find the same bits.
    """
    momentum.mul_(mu).add_(displacement)
    displacement.add_(momentum.mul(mu))
    phi.sub_(displacement.mul_(eta))


def merge(theta: Tensor, phi: Tensor, alpha: float) -> None:
    """theta = alpha theta + (1 - alpha) phi, in place; with alpha 0 a copy, bit for bit.

    Douillard et al. 2025, "Streaming DiLoCo", section 2.3.
    """
    if alpha == 0:
        theta.copy_(phi)
    else:
        theta.lerp_(phi, 1 - alpha)


@torch.no_grad()
def add_correction(targets: tuple[Tensor, ...], theirs: Tensor, own: Tensor, factor: float) -> None:
    """target += factor (theirs - own), for all targets, chunk by chunk."""
    for here in chunks(own):
        correction = torch.sub(theirs[here], own[here]).mul_(factor)
        for target in targets:
            target[here].add_(correction)


def norm_of(vector: Tensor) -> float:
    """Euclidean, summed in float64; infinite or nan where values are not finite."""
    return math.sqrt(squared_norm(vector))


@torch.no_grad()
def distance(a: Tensor, b: Tensor) -> float:
    """Euclidean norm of a - b, summed in float64; infinite or nan where values are not finite or too far apart."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for here in chunks(a):
        difference = a[here].to(torch.float64, copy=True).sub_(b[here])
        total += torch.dot(difference, difference)
    return float(total.sqrt().item())
