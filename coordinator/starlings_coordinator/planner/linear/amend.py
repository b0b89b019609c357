"""Amendments of a plan that stands, priced by duals: who joined, left or became slower, and who should move for it.

    joined   the newcomer takes the span that lifts F most: it reinforces what binds
    left     routing reacts at once, which is what `rate_now` says; then whoever lifts F most may move
    drifted  as if the worker had left and another one, as it is measured now, had come with the same span

Nothing is solved here: it is a look at the accounts of `Standing`, in at most 50 ms with a thousand workers. In the
background the plan is made anew with the change in it, which confirms or corrects what was priced (`confirm`). Prices
know the neighbourhood of the plan only, so gains are estimates, rather too high: the gain rule asks for margins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.gain import Amendment, Verdict, Worthwhile, judge
from starlings_coordinator.planner.linear.board import Board, Change
from starlings_coordinator.planner.linear.migration import KEEPER_BYTES_PER_S, Taking, migrate
from starlings_coordinator.planner.linear.problem import Ints
from starlings_coordinator.planner.linear.standing import Standing, standing
from starlings_protos.messages import Span, WorkerId

# Holders that one amendment moves at most: each further one rests on prices that are less true.
MOVES_MOST = 3


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the gain rule needs to know of the future, and of the owner's machine."""

    # Until the job ends.
    remaining_s: float
    # How long a worker is still expected to stay, where that is known.
    lifetimes_s: Mapping[WorkerId, float] | None = None
    keeper_bytes_per_s: float = KEEPER_BYTES_PER_S

    def horizon_s(self, moved: Sequence[WorkerId]) -> float:
        """How long a gain lasts: until the job ends, or somebody who moved is expected to leave."""
        lifetimes = self.lifetimes_s or {}
        return min([self.remaining_s, *(lifetimes.get(worker_id, inf) for worker_id in moved)])


@dataclass(frozen=True, slots=True)
class Answer:
    """`amendment.moves` is empty where nobody should move. Rates in microbatches/s.

    `rate_before`: of the plan before the change.
    """

    amendment: Amendment
    verdict: Verdict
    rate_before: float

    @property
    def made(self) -> bool:
        return bool(self.amendment.moves) and isinstance(self.verdict, Worthwhile)


def price(plan: Standing, change: Change, outlook: Outlook) -> Answer:
    """What should be done about `change`, and whether it is worth it. Asks no programme.

    Of amendments with more and more moves it is the one that is worth most by the gain rule; if none is worth it, the
    one that would be fastest, with the reason why not.
    """
    board = Board(plan, change)
    before = board.now.copy()
    rate_now = board.rate()
    moved: list[int] = []
    answers: list[Answer] = []
    for newcomer in board.newcomers:
        option = board.best_move([newcomer])
        if option is not None:
            board.now[newcomer] = option
            moved.append(newcomer)
    if moved:
        answers.append(_answer(board, before, moved, rate_now, outlook))
    # Whoever comes moves nobody else.
    while not board.newcomers and len(answers) < MOVES_MOST and (option := board.best_move()) is not None:
        worker = int(board.owner[option])
        board.now[worker] = option
        moved = [*(n for n in moved if n != worker), worker]
        answers.append(_answer(board, before, moved, rate_now, outlook))
    if any(answer.made for answer in answers):
        return max(answers, key=_net)
    if answers:
        return max(answers, key=lambda answer: answer.amendment.rate_then)
    nothing = Amendment({}, rate_now, rate_now, rate_now, 0.0, 0.0)
    return Answer(nothing, judge(nothing, board.holders(before), outlook.remaining_s), plan.rate)


def _net(answer: Answer) -> float:
    match answer.verdict:
        case Worthwhile(gained, cost):
            return gained - cost
        case _:
            return -inf


def _answer(board: Board, before: Ints, moved: Sequence[int], rate_now: float, outlook: Outlook) -> Answer:
    plan, after = board.plan, board.now
    moves: dict[WorkerId, tuple[Span | None, Span | None]] = {}
    taking, away = [], []
    for worker in moved:
        old, new = board.span(int(before[worker])), board.span(int(after[worker]))
        moves[board.ids[worker]] = (old, new)
        wanted = [s for s in (new.stages if new else ()) if old is None or s not in old]
        taking.append(Taking(int(board.site[worker]), wanted))
        if old is not None and not _keeps_both(plan, worker, old, wanted):
            away.append(worker)
    donors = board.donors(before, {stage for take in taking for stage in take.stages})
    copies = migrate(board.links, taking, donors, plan.copied, keeper_bytes_per_s=outlook.keeper_bytes_per_s)
    rate_then = board.rate()
    board.now = before
    rate_meanwhile = max(0.0, board.rate(away) - copies.lost)
    board.now = after
    amendment = Amendment(moves, rate_now, rate_meanwhile, rate_then, copies.bytes, copies.seconds)
    verdict = judge(amendment, board.holders(before), outlook.horizon_s(tuple(moves)))
    return Answer(amendment, verdict, plan.rate)


def _keeps_both(plan: Standing, worker: int, old: Span, wanted: Sequence[int]) -> bool:
    """Whether it can serve its old stages while it fetches the new ones: make before break needs room for both."""
    need = plan.needs[:, old.first_stage, old.last_stage].min() + plan.problem.state[list(wanted)].sum()
    return bool(need <= plan.problem.memory[worker])


def amended(
    plan: Standing, change: Change, moves: Mapping[WorkerId, tuple[Span | None, Span | None]]
) -> Standing:
    """The plan with the change in it and these moves made: solved, so that the next one can be priced.

    Raises:
        ArithmeticError: the solver gave up.
        ValueError: nobody can hold some stage.
    """
    measured = {worker.worker_id: worker for worker in change.measured}
    workers = {worker.worker_id: worker for worker in plan.fleet.workers}
    held = plan.holders
    for worker_id, worker in measured.items():
        workers[worker_id] = replace(worker, held=held.get(worker_id))
    for worker_id, (_, span) in moves.items():
        workers[worker_id] = replace(workers[worker_id], held=span)
    there = tuple(worker for worker_id, worker in workers.items() if worker_id not in change.left)
    fleet = Fleet(replace(plan.fleet.request, workers=there), plan.fleet.profile)
    return standing(fleet, plan.codec, plan.copied)


def confirm(plan: Standing, change: Change, answer: Answer, outlook: Outlook) -> tuple[Answer, Standing]:
    """The answer with the programme's own rates, and the plan that stands afterwards: with the moves, if they are
    still worth it. In the background: it takes as long as two or three plans.

    Raises:
        ArithmeticError, ValueError: as `amended`.
    """
    without = amended(plan, change, {})
    moves = answer.amendment.moves
    if not moves:
        nothing = Amendment({}, without.rate, without.rate, without.rate, 0.0, 0.0)
        return Answer(nothing, judge(nothing, without.holders, outlook.remaining_s), plan.rate), without
    then = amended(plan, change, moves)
    # What copies cost meanwhile is a part of what flows.
    kept = (
        answer.amendment.rate_meanwhile / answer.amendment.rate_now if answer.amendment.rate_now > 0 else 0.0
    )
    solved = replace(
        answer.amendment, rate_now=without.rate, rate_meanwhile=kept * without.rate, rate_then=then.rate
    )
    verdict = judge(solved, without.holders, outlook.horizon_s(tuple(moves)))
    found = Answer(solved, verdict, plan.rate)
    return found, then if found.made else without
