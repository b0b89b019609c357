"""A plan comes from another process: it is checked before anybody acts on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from starlings_protos.messages import PlanReply, Span, WorkerId


def flaw_of(
    reply: PlanReply,
    spans: Mapping[WorkerId, Span],
    there: Collection[WorkerId],
    blocks: int,
    stages_most: int,
    stages_wanted: int = 0,
) -> str:
    """What is wrong with a plan, in words; empty when nothing is.

    Args:
        there: who could hold a span now.
        blocks: how many the model has.
        stages_most: how many stages the pipeline's codec bears; 0 for any number, or when the cut is fixed.
        stages_wanted: how many the job demands; 0 for the planner's choice.
    """
    at = 0
    for stage in reply.stages:
        if stage.first_block != at or stage.last_block < stage.first_block:
            return "the stages do not follow each other"
        at = stage.last_block + 1
    if at != blocks:
        return f"the stages cover {at} of {blocks} blocks"
    if stages_most and len(reply.stages) > stages_most:
        return f"{len(reply.stages)} stages, where the pipeline's codec bears {stages_most}"
    if stages_wanted and len(reply.stages) != stages_wanted:
        return f"{len(reply.stages)} stages, where the job demands {stages_wanted}"
    for worker_id, span in spans.items():
        if worker_id not in there:
            return f"{worker_id} is not there"
        if not 0 <= span.first_stage <= span.last_stage < len(reply.stages):
            return f"{worker_id} has no valid span"
    for stage_index in range(len(reply.stages)):
        if not any(stage_index in span for span in spans.values()):
            return f"nobody holds stage {stage_index}"
    return ""
