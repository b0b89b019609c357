"""What a plan's tensors take on the wire, in words, from the codecs' own sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlings_job.codecs import boundary_bytes, exchange_bytes
from starlings_job.exchange_settings import NONE
from starlings_job.exchange_traffic import round_bytes, swap_bytes
from starlings_job.profile import Profile
from starlings_job.spec import JobSpec
from starlings_protos.messages import Span, Stage, WorkerId


def largest_boundary_bytes(job: JobSpec, profile: Profile, stages: Sequence[Stage]) -> int:
    """Of one microbatch, there and back, over the widest boundary between two stages; 0 with one stage."""
    widest = 0
    for stage in stages[:-1]:
        elements = profile.blocks[stage.last_block].boundary_bytes_per_sample // 4 * job.train.microbatch
        shape = (elements,)
        forth = boundary_bytes(job.pipeline.codec, shape)
        widest = max(widest, forth + boundary_bytes(job.pipeline.codec, shape, backward=True))
    return widest


def largest_exchange_bytes(
    job: JobSpec, profile: Profile, stages: Sequence[Stage], spans: Mapping[WorkerId, Span]
) -> int:
    """What a worker sends to the other holders of its stages, at most, per step, or per slot after the warm-up; 0 where
    no stage has two, and where replicas are averaged at the end only.
    """
    if job.exchange.preset == NONE:
        return 0
    rules = job.pair_rules
    sent = []
    for index, stage in enumerate(stages):
        blocks = [profile.blocks[block] for block in stage.blocks]
        elements = sum(block.trainable_count for block in blocks)
        members = sum(index in span for span in spans.values())
        if rules is not None:
            # Nobody is met twice in a slot.
            pairwise = min(rules.swaps, members - 1) * swap_bytes(rules, rules.main, elements)
            in_group = rules.topology == "all"
            sent.append(round_bytes(rules, rules.main, elements, members) if in_group else pairwise)
        else:
            sent.append(
                exchange_bytes(
                    job.exchange.codec,
                    elements,
                    members,
                    matrix_elements=sum(block.matrix_count for block in blocks),
                    matrix_sides=sum(block.matrix_sides for block in blocks),
                )
            )
    return max((sum(sent[s] for s in span.stages) for span in spans.values()), default=0)


def traffic_words(
    job: JobSpec, profile: Profile, stages: Sequence[Stage], spans: Mapping[WorkerId, Span]
) -> str:
    """Such as "; 66 kB per microbatch and boundary, at most 1.2 MB per step and worker for averaging"."""
    boundary = largest_boundary_bytes(job, profile, stages)
    exchange = largest_exchange_bytes(job, profile, stages, spans)
    words = [f"{_size(boundary)} per microbatch and boundary"] if boundary else []
    time = f"{job.exchange.every} steps" if job.exchange.pairs else "step"
    words += [f"at most {_size(exchange)} per {time} and worker for averaging"] if exchange else []
    return "; " + ", ".join(words) if words else ""


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
