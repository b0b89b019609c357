"""Identity, the job's files and the coordinator's log: any bytes give a valid result or a coded error.

See tests/support/fuzzing.py.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import typing
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from starlings_protos import control_pb2, convert, messages
from starlings_protos.messages import Span, Stage, WorkerId
from support.fuzzing import Builders, Parser, check_memory, check_parser

# The warning says that these will be refused by the library itself one day.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")

BUILDERS: Builders = {}


def parser(builder: Callable[[], Parser]) -> Callable[[], Parser]:
    """Built on demand, so that one part's import error fails that part's test only."""
    BUILDERS[builder.__name__] = builder
    return builder


SPAN = Span(0, 1)


def wire(record: Any, message: Message) -> bytes:
    return convert.to_proto(record, message).SerializeToString()


# ---------------------------------------------------------------------- identity


@parser
def invite() -> Parser:
    from starlings_protos.invite import Address, Invite, InviteError, format_invite, parse_invite

    sample = Invite((Address("host.example", 7701),), "job", "p" * 43, "i" * 10, "s" * 32, 1_900_000_000)
    text = format_invite(sample).encode()
    return Parser(lambda data: parse_invite(data.decode("utf-8", "surrogateescape")), (InviteError,), (text,))


def pem(der: bytes, label: str) -> bytes:
    """Damage is done to the DER inside: damaged base64 would rarely get beyond the first check."""
    return f"-----BEGIN {label}-----\n{base64.encodebytes(der).decode()}-----END {label}-----\n".encode()


def der(pem_bytes: bytes) -> bytes:
    return base64.b64decode(b"".join(pem_bytes.splitlines()[1:-1]))


@parser
def certificate_request() -> Parser:
    from starlings_protos.errors import PeerFault
    from starlings_protos.identity import make_csr, new_key, read_csr

    label = "CERTIFICATE REQUEST"
    return Parser(lambda data: read_csr(pem(data, label)), (PeerFault,), (der(make_csr(new_key())),))


@parser
def certificate_request_pem() -> Parser:
    from starlings_protos.errors import PeerFault
    from starlings_protos.identity import make_csr, new_key, read_csr

    return Parser(read_csr, (PeerFault,), (make_csr(new_key()),))


@parser
def certificate() -> Parser:
    from starlings_protos.authority import CertificateAuthority
    from starlings_protos.errors import PeerFault
    from starlings_protos.identity import KEEPER, identity_of_certificate

    issued = CertificateAuthority.create("job", 1.7e9).issue_identity(KEEPER, 1.7e9).certificate_pem
    return Parser(
        lambda data: identity_of_certificate(pem(data, "CERTIFICATE")), (PeerFault,), (der(issued),)
    )


def _claim() -> Any:
    from starlings_protos.assignments import AssignmentClaim

    values = {"job": "job", "worker_id": WorkerId("w0123456789abcdef"), "incarnation": 2, "plan_version": 3}
    times = {"not_before_s": 1.7e9, "expires_s": 1.7e9 + 900, "role": "worker"}
    return AssignmentClaim(span=SPAN, **values, **times)


@parser
def signed_assignment() -> Parser:
    from starlings_protos.assignments import assignment_key_der, sign_assignment, verify_assignment
    from starlings_protos.errors import RefusedError
    from starlings_protos.identity import new_key

    key = new_key()
    public = assignment_key_der(key)

    def parse(data: bytes) -> object:
        signed = convert.from_proto(control_pb2.SignedAssignment.FromString(data), messages.SignedAssignment)
        return verify_assignment(
            public, signed, worker_id="w0123456789abcdef", job="job", now_wall_s=1.7e9 + 1
        )

    sample = wire(sign_assignment(key, _claim()), control_pb2.SignedAssignment())
    return Parser(parse, (RefusedError, DecodeError), (sample,))


@parser
def claim_of_a_signed_assignment() -> Parser:
    """Signed rightly, so that damage reaches what comes after the signature."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    from starlings_protos.assignments import assignment_key_der, verify_assignment
    from starlings_protos.errors import RefusedError
    from starlings_protos.identity import new_key

    key = new_key()
    public = assignment_key_der(key)

    def parse(data: bytes) -> object:
        signed = messages.SignedAssignment(data, key.sign(data, ec.ECDSA(hashes.SHA256())))
        return verify_assignment(
            public, signed, worker_id="w0123456789abcdef", job="job", now_wall_s=1.7e9 + 1
        )

    return Parser(parse, (RefusedError,), (wire(_claim(), control_pb2.AssignmentClaim()),), inputs=2_000)


@parser
def public_key() -> Parser:
    from starlings_protos.errors import PeerFault
    from starlings_protos.identity import new_key, public_key_from_der, spki_der

    return Parser(public_key_from_der, (PeerFault,), (spki_der(new_key().public_key()),))


@parser
def private_key() -> Parser:
    from starlings_protos.errors import UsageError
    from starlings_protos.identity import key_from_pem, key_to_pem, new_key

    return Parser(key_from_pem, (UsageError,), (key_to_pem(new_key()),))


# ---------------------------------------------------------------------- the job's files


@parser
def job_json() -> Parser:
    from starlings_job.errors import JobFileError
    from starlings_job.spec import JobSpec, parse_job

    job = parse_job('[job]\nname = "demo"\ntokens = 1000\n[model]\npreset = "tiny"\n')
    return Parser(JobSpec.from_json, (JobFileError,), (job.to_json(),), json=True)


@parser
def job_toml() -> Parser:
    from starlings_job.errors import JobFileError
    from starlings_job.spec import parse_job

    text = b'[job]\nname = "demo"\ntokens = 1000\n[model]\npreset = "tiny"\n[train]\nlr = 1e-3\nbatch = 16\n'
    nested = tuple(b"x = " + start * 5_000 for start in (b"[", b"{a = ", b"9"))
    return Parser(lambda data: parse_job(data.decode("latin-1")), (JobFileError,), (text,), hostile=nested)


@parser
def profile_json() -> Parser:
    from starlings_job.profile import BlockProfile, Profile, ProfileError

    def filled(cls: Any, **given: Any) -> Any:
        hints = typing.get_type_hints(cls)
        values = {f.name: 7 if hints[f.name] is int else "layer" for f in dataclasses.fields(cls)}
        return cls(**{**values, **given})

    profile = filled(Profile, blocks=(filled(BlockProfile), filled(BlockProfile, name="head")))
    return Parser(Profile.from_json, (ProfileError,), (profile.to_json(),), json=True)


@parser
def dataset_json() -> Parser:
    from starlings_job.errors import JobFileError
    from starlings_job.records import DatasetMeta

    meta = DatasetMeta("tokens", 100, 10, 128, 256, stride_tokens=128, unigram_entropy=3.0)
    return Parser(DatasetMeta.from_json, (JobFileError,), (meta.to_json().encode(),), json=True)


@parser
def model_json() -> Parser:
    from starlings_job.description import ModelDescription, describe
    from starlings_job.errors import JobFileError
    from starlings_job.presets import PRESETS

    samples = tuple(
        describe(PRESETS[name].family, PRESETS[name].config, name).to_json().encode()
        for name in ("tiny", "shapes")
    )
    return Parser(ModelDescription.from_json, (JobFileError,), samples, json=True)


@parser
def checkpoint_manifest() -> Parser:
    from starlings_job.checkpoint import BlockEntry, FileEntry, Manifest
    from starlings_job.errors import CheckpointError

    file = FileEntry("layers.0.safetensors", 100, "ab" * 32)
    manifest = Manifest(3, {"layers.0": BlockEntry("cd" * 32, file, None)}, {"tokens": 5})
    return Parser(Manifest.from_json, (CheckpointError,), (manifest.to_json(),), json=True)


@parser
def safetensors_file() -> Parser:
    from starlings_job.errors import CheckpointError
    from starlings_job.safetensors_io import read_buffer, write_file
    from starlings_job.state import RawTensor

    buffer = io.BytesIO()
    write_file(buffer, {"weight": RawTensor("F32", (2, 3), memoryview(bytes(24)))})
    return Parser(read_buffer, (CheckpointError,), (buffer.getvalue(),))


# ---------------------------------------------------------------------- the coordinator's log


@parser
def log_record() -> Parser:
    from starlings_coordinator.core.records import PlanAdopted, RecordError, record_from_json, record_to_json

    record = PlanAdopted(1, (Stage(0, 1),), ((WorkerId("w1"), SPAN),), 2, 0, "enough workers")
    return Parser(record_from_json, (RecordError,), (record_to_json(record),), json=True)


@parser
def state_snapshot() -> Parser:
    from starlings_coordinator.core.records import RecordError
    from starlings_coordinator.core.state import Durable, snapshot_from_json, snapshot_to_json

    return Parser(snapshot_from_json, (RecordError,), (snapshot_to_json(Durable()),), json=True)


@parser
def token_record() -> Parser:
    from starlings_coordinator.token_journal import decode, encode
    from starlings_coordinator.tokens import TokenCreated

    record = TokenCreated("i" * 10, "ab" * 32, "worker", 1.7e9, 1.8e9, 3)
    # The journal's own reader turns these into one error with the line's number.
    return Parser(decode, (ValueError, RecursionError), (encode(record),), json=True)


# ---------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_any_bytes_give_a_result_or_a_coded_error(name: str) -> None:
    check_parser(name, BUILDERS[name](), share=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_many_more_bytes_do_too(name: str) -> None:
    check_parser(name, BUILDERS[name]())


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_errors_can_be_shown_and_memory_stays_flat(name: str) -> None:
    check_memory(name, BUILDERS[name]())
