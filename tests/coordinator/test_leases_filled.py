"""What the shell adds to the core's messages: records, texts, signatures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_coordinator.detokenise import byte_level_alphabet, bytes_to_text, detokeniser
from starlings_coordinator.leases import PROMPT_TOKENS, filled_lease, generation_context
from starlings_coordinator.signing import RENEW_AFTER_S, AssignmentSigner
from starlings_job.records import RecordStore, unpack_tokens
from starlings_protos.assignments import verify_assignment
from starlings_protos.errors import RefusedError
from starlings_protos.identity import new_key
from starlings_protos.messages import (
    Assignment,
    Lease,
    LeaseKind,
    MicrobatchKey,
    Span,
    Stage,
    WorkerId,
)
from support.prepared_job import write_prepared_job

WORKER = WorkerId("w" + "a" * 16)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordStore:
    return RecordStore(write_prepared_job(tmp_path_factory.mktemp("leases") / "job"))


def _lease(kind: LeaseKind, samples: tuple[int, ...]) -> Lease:
    return Lease(MicrobatchKey(kind, 0, 0, 0), samples, 1.0, 60.0)


def test_training_and_evaluation_read_their_own_files(records: RecordStore) -> None:
    train = filled_lease(_lease(LeaseKind.TRAIN, (3, 0)), records)
    assert train.records == records.read((3, 0))
    assert len(train.records) == 2 * records.record_bytes
    assert filled_lease(_lease(LeaseKind.EVALUATE, (1,)), records).records == records.read_held_out((1,))


def test_sample_that_does_not_exist_is_our_own_defect(records: RecordStore) -> None:
    with pytest.raises(ValueError, match="sample 50"):
        filled_lease(_lease(LeaseKind.TRAIN, (50,)), records)


@given(st.lists(st.integers(0, 255), max_size=400))
def test_generation_continues_prompt_and_text_within_the_context(
    records: RecordStore, text: list[int]
) -> None:
    context = generation_context((2, *text), records)
    prompt = records.held_out_tokens(2, PROMPT_TOKENS)
    assert len(context) <= records.meta.context_tokens
    assert (*prompt, *text)[-len(context) :] == context
    filled = filled_lease(_lease(LeaseKind.GENERATE, (2, *text)), records)
    assert unpack_tokens(filled.records, records.meta.token_bytes) == context


# ------------------------------------------------------------------ text


@given(st.lists(st.integers(-5, 70000), max_size=60))
def test_any_tokens_become_harmless_text(tokens: list[int]) -> None:
    assert all(c.isprintable() or c in "\n\t" for c in bytes_to_text(tokens))


def test_text_survives_and_escape_sequences_do_not() -> None:
    assert bytes_to_text("straße\n\tx".encode()) == "straße\n\tx"
    assert "\x1b" not in bytes_to_text(b"\x1b[2Jx")


def test_byte_level_tokenizer_is_decoded_without_its_library(tmp_path: Path) -> None:
    text = "def f(x):\n    return 'ä €'"
    stand_in = {byte: char for char, byte in byte_level_alphabet().items()}
    vocabulary = {stand_in[b]: b for b in range(256)}
    (tmp_path / "tokenizer").mkdir()
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.write_text(
        json.dumps(
            {
                "model": {"type": "BPE", "vocab": vocabulary},
                "decoder": {"type": "ByteLevel"},
                "added_tokens": [{"id": 300, "content": "<end>"}],
            }
        )
    )
    decode = detokeniser("huggingface", tmp_path)
    assert decode([*text.encode(), 300, 999]) == text + "<end>"


def test_sentencepiece_vocabulary_and_no_vocabulary_at_all(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(
        json.dumps(
            {
                "model": {
                    "type": "Unigram",
                    "vocab": [["\N{LOWER ONE EIGHTH BLOCK}Hello", 0.0], ["<0x21>", 0.0], ["ja", 0]],
                }
            }
        )
    )
    assert detokeniser("huggingface", tmp_path)([0, 2, 1]) == " Helloja!"
    for broken in ("{", "[]", '{"model": {"vocab": 3}}', '{"model": {"vocab": [[]]}}'):
        file.write_text(broken)
        assert detokeniser("huggingface", tmp_path)([1, 2]) == "1 2"


# ------------------------------------------------------------------ signatures


def _assignment() -> Assignment:
    return Assignment(
        plan_version=4,
        stages=(Stage(0, 5),),
        span=Span(0, 0),
        version=0,
        donors=(),
        peers=(),
        slots=1,
        recompute=False,
        topology="all",
        gossip_peers=(),
        seed=1,
        step=0,
        attempt=0,
        tensor_limit_bytes=1,
    )


def _claim(signer: AssignmentSigner, signed: object, now_s: float) -> object:
    return verify_assignment(signer.key_der, signed, worker_id=WORKER, job="job", now_wall_s=now_s)  # type: ignore[arg-type]


def test_assignment_is_signed_for_the_life_that_was_welcomed() -> None:
    signer = AssignmentSigner(new_key(), "job")
    signer.welcomed(WORKER, 3)
    signed = signer.sign(_assignment(), WORKER, 1, 1000.0).signed
    claim = verify_assignment(signer.key_der, signed, worker_id=WORKER, job="job", now_wall_s=1000.0)
    assert (claim.incarnation, claim.plan_version, claim.span, claim.role) == (3, 4, Span(0, 0), "worker")
    with pytest.raises(RefusedError, match="expired"):
        _claim(signer, signed, 1000.0 + 2000.0)


def test_renewal_comes_before_expiry_and_after_a_clock_was_set_back() -> None:
    signer = AssignmentSigner(new_key(), "job")
    signer.welcomed(WORKER, 1)
    signer.sign(_assignment(), WORKER, 7, 1000.0)
    assert list(signer.renewals(1000.0 + RENEW_AFTER_S - 1)) == []
    ((session, worker_id, message),) = signer.renewals(1000.0 + RENEW_AFTER_S)
    assert (session, worker_id) == (7, WORKER)
    _claim(signer, message.signed, 1000.0 + RENEW_AFTER_S + 800)
    assert list(signer.renewals(1000.0 + RENEW_AFTER_S + 1)) == []
    # Set back by an hour: a claim that is not valid yet for those with right clocks would be worse than a fresh one.
    assert len(list(signer.renewals(1000.0 - 3600.0))) == 1


def test_nothing_is_renewed_for_who_has_no_assignment_any_more() -> None:
    signer = AssignmentSigner(new_key(), "job")
    signer.welcomed(WORKER, 1)
    signer.sign(_assignment(), WORKER, 7, 1000.0)
    signer.welcomed(WORKER, 2)  # a new life has no assignment yet
    assert list(signer.renewals(5000.0)) == []
    signer.sign(_assignment(), WORKER, 8, 1000.0)
    signer.forget(WORKER)
    assert list(signer.renewals(5000.0)) == []


def test_keepers_claim_has_no_span() -> None:
    signer = AssignmentSigner(new_key(), "job")
    claim = verify_assignment(
        signer.key_der, signer.sign_keeper(1000.0), worker_id="keeper", job="job", now_wall_s=1000.0
    )
    assert (claim.role, claim.span) == ("keeper", None)
