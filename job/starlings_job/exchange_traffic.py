"""What each worker sends in exchanges, by preset. Pure; sizes are the codecs' own estimates."""

from __future__ import annotations

from starlings_compression.sizes import size_estimate
from starlings_compression.spec import parse_spec
from starlings_job.codecs import exchange_bytes
from starlings_job.exchange_rules import ExchangeRules, Phase


def round_bytes(rules: ExchangeRules, phase: Phase, elements: int, members: int) -> int:
    """What a worker sends per slot: its swaps with one partner each, or its parts of the group's exchange.

    Args:
        elements: of the group's whole vector; a slot exchanges one fragment of it.
        members: replicas in the group. Alone, nothing is sent.
    """
    if members < 2:
        return 0
    part = -(-elements // rules.fragments)
    match rules.topology:
        case "all":
            return exchange_bytes(rules.codec, part, members)
        case "exponential":
            return vector_bytes(rules.codec, part)
        case "pairs":
            return rules.swaps_in(phase) * swap_bytes(rules, phase, elements)


def swap_bytes(rules: ExchangeRules, phase: Phase, elements: int) -> int:
    """What a worker sends to one partner in one swap: a fragment's weights, and momentum where somebody uses it."""
    part = -(-elements // rules.fragments)
    with_momentum = rules.momentum_codec is not None and phase.outer_momentum > 0
    momentum = vector_bytes(rules.momentum_codec, part) if rules.momentum_codec and with_momentum else 0
    return vector_bytes(rules.codec, part) + momentum


def job_bytes(rules: ExchangeRules, elements: int, members: int, steps: int) -> int:
    """What a worker sends over `steps` inner steps: warm-up, what follows, and the exact average at the end."""
    warmup_steps = round(rules.warmup_fraction * steps) if rules.warmup is not None else 0
    total = 0
    if rules.warmup is not None:
        total += (
            warmup_steps // rules.warmup.inner_steps * round_bytes(rules, rules.warmup, elements, members)
        )
    total += (
        (steps - warmup_steps) // rules.main.inner_steps * round_bytes(rules, rules.main, elements, members)
    )
    averaged_at_end = rules.preset != "allreduce"
    return total + (exchange_bytes("exact", elements, members) if averaged_at_end else 0)


def vector_bytes(codec: str, elements: int) -> int:
    """A flat float32 vector in that codec."""
    spec = parse_spec(codec)
    return 4 * elements if spec.raw else size_estimate(spec, (elements,)).likely_bytes
