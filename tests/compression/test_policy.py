"""Which codec travels where, and what is refused with a reason."""

from __future__ import annotations

import pytest

from starlings_compression.errors import SpecError
from starlings_compression.policy import Role, checked, objection_to, policy_for


@pytest.mark.parametrize("role", list(Role))
def test_small_tensors_travel_exactly(role: Role) -> None:
    policy = policy_for(role, "int8:128")
    assert policy.spec_for((31, 33)).text == "exact"
    assert policy.spec_for((32, 32)).text == "int8:128"
    assert policy.spec_for(()).text == "exact"
    assert policy_for(role, "int8:128", small_tensor_elements=0).spec_for(()).text == "int8:128"


def test_error_feedback_goes_with_sums_only() -> None:
    assert policy_for(Role.GRADIENT, "int4:64", decay=0.95).feedback_decay == 0.95
    assert policy_for(Role.DELTA, "int4:64").feedback_decay == 1.0
    assert policy_for(Role.GRADIENT, "exact|zstd").feedback_decay is None
    assert policy_for(Role.BOUNDARY, "int8:128").feedback_decay is None
    assert policy_for(Role.STATE, "fp16").feedback_decay is None


def test_fp8_goes_back_with_more_range() -> None:
    policy = policy_for(Role.BOUNDARY, "fp8:64|zstd")
    assert policy.spec_for((4096,)).text == "fp8:64|zstd:3"
    assert policy.spec_for((4096,), backward=True).text == "fp8-e5m2:64|zstd:3"
    assert policy_for(Role.BOUNDARY, "int8:64").spec_for((4096,), backward=True).text == "int8:64"


@pytest.mark.parametrize(
    ("spec", "role", "boundaries", "reason"),
    [
        ("int4:64", Role.BOUNDARY, 5, "int4 on 5 stage boundaries .* use int8:128"),
        ("int2:64", Role.BOUNDARY, 1, "int2 leaves too little"),
        ("sign", Role.BOUNDARY, 1, "sign leaves too little"),
        ("topk:64/4096", Role.BOUNDARY, 1, "topk drops whole parts"),
        ("lowrank:4", Role.BOUNDARY, 1, "lowrank drops whole parts"),
        ("topk:64/4096|int2", Role.STATE, 1, "not the state that was trained"),
        ("int4", Role.STATE, 1, "not the state that was trained"),
        ("fp8", Role.GRADIENT, 1, "keeps less of a block; use int8:128"),
    ],
)
def test_what_is_known_to_hurt_is_refused_unless_forced(
    spec: str, role: Role, boundaries: int, reason: str
) -> None:
    objection = objection_to(spec, role, boundaries=boundaries)
    assert objection is not None
    with pytest.raises(SpecError, match=reason) as caught:
        checked(spec, role, boundaries=boundaries)
    assert str(objection) in str(caught.value)
    assert "force = true" in str(caught.value)
    assert checked(spec, role, boundaries=boundaries, force=True) == objection.spec


@pytest.mark.parametrize(
    ("spec", "role", "boundaries"),
    [
        ("int8:128", Role.BOUNDARY, 30),
        ("int4:64", Role.BOUNDARY, 4),
        ("fp8", Role.BOUNDARY, 9),
        ("bf16|zstd", Role.BOUNDARY, 9),
        ("topk:64/4096|int2", Role.GRADIENT, 1),
        ("dct-topk|sign", Role.DELTA, 1),
        ("int4:64", Role.GRADIENT, 9),
        ("exact|zstd", Role.STATE, 1),
        ("int8:128", Role.STATE, 1),
    ],
)
def test_what_is_known_to_work_is_not(spec: str, role: Role, boundaries: int) -> None:
    assert checked(spec, role, boundaries=boundaries).text
    assert objection_to(spec, role, boundaries=boundaries) is None
