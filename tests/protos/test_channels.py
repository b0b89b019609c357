"""Mutual TLS on real servers: who is let in, who may call what, and what a refused port says."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from starlings_protos import channels, control_pb2, control_pb2_grpc
from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import PortBusy, RefusedError, UsageError, refusal_of
from starlings_protos.identity import (
    COORDINATOR,
    KEEPER,
    OWNER,
    Identity,
    PeerIdentity,
    Role,
    key_id,
    key_to_pem,
    new_key,
)
from starlings_protos.messages import Refusal
from starlings_protos.peers import CONTROL_POLICY, DATA_POLICY, RoleGuard, peer_host, peer_identity, require

QUICK = replace(channels.CONTROL, reconnect_min_s=0.05)


def _join(authority: CertificateAuthority, role: Role = Role.WORKER, now_s: float | None = None) -> Identity:
    key = new_key()
    peer = PeerIdentity(key_id(key.public_key(), role), role)
    pem = authority.issue(key.public_key(), peer, now_s or time.time())
    return Identity(peer, key_to_pem(key), pem, authority.certificate_pem)


class _Control(control_pb2_grpc.ControlServicer):
    """Answers with who called."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def Status(self, request, context):
        return control_pb2.StatusReply(job=peer_identity(context).id, phase=peer_host(context))

    async def Watch(self, request, context):
        try:
            for _ in range(1_000_000):
                yield control_pb2.StatusReply(job=peer_identity(context).id)
                await asyncio.sleep(0.001)
        finally:
            self.closed.set()

    async def Session(self, request_iterator, context):
        async for message in request_iterator:
            yield control_pb2.ToWorker(standby=control_pb2.Standby(reason=message.hello.worker_id))

    async def Stop(self, request, context):
        await require(context, frozenset({Role.OBSERVER}))
        raise AssertionError("the owner is no observer")


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority.create("job", time.time())


@pytest.fixture(scope="module")
def stranger() -> CertificateAuthority:
    return CertificateAuthority.create("job", time.time())


@asynccontextmanager
async def _served(identity, servicer=None, refuse=lambda peer: None, transport=QUICK):
    server = channels.make_server(transport, (RoleGuard(CONTROL_POLICY, refuse),))
    control_pb2_grpc.add_ControlServicer_to_server(servicer or _Control(), server)
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identity))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def _status(address: str, identity: Identity) -> control_pb2.StatusReply:
    async with channels.control_channel(address, identity, QUICK) as channel:
        return await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)


async def _refused(address: str, identity: Identity) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await _status(address, identity)
    return failed.value


async def test_the_owner_is_known_by_certificate(authority: CertificateAuthority):
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        reply = await _status(address, authority.issue_identity(OWNER, time.time()))
        assert (reply.job, reply.phase) == ("owner", "127.0.0.1")


async def test_without_certificate_or_with_a_strangers(authority, stranger):
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        imposter = replace(stranger.issue_identity(OWNER, time.time()), ca_pem=authority.certificate_pem)
        error = await _refused(address, imposter)
        assert (error.code(), refusal_of(error)) == (grpc.StatusCode.UNAVAILABLE, None)

        options = channels.client_options(QUICK, "coordinator.starlings")
        bare = grpc.ssl_channel_credentials(authority.certificate_pem)
        async with grpc.aio.secure_channel(channels.target(address), bare, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate(authority):
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        old = authority.issue_identity(OWNER, time.time() - 8 * 86400)
        assert (await _refused(address, old)).code() == grpc.StatusCode.UNAVAILABLE


async def test_nobody_can_pose_as_the_coordinator(authority, stranger):
    owner = authority.issue_identity(OWNER, time.time())
    for imposter in (
        stranger.issue_identity(COORDINATOR, time.time()),
        _join(authority),
        authority.issue_identity(KEEPER, time.time()),
    ):
        async with _served(imposter) as address:
            assert (await _refused(address, owner)).code() == grpc.StatusCode.UNAVAILABLE


async def test_peers_are_known_by_id_whatever_their_address(authority):
    server_identity, caller = _join(authority), _join(authority)
    async with _served(server_identity) as address:
        async with channels.peer_channel(address, server_identity.id, caller, QUICK) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)
            assert refusal_of(failed.value) is Refusal.NOT_YOU  # reached it; a worker has no business there
        async with channels.peer_channel(address, "w" + "0" * 16, caller, QUICK) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_roles(authority):
    worker, owner, observer = (
        _join(authority),
        authority.issue_identity(OWNER, time.time()),
        _join(authority, Role.OBSERVER),
    )
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        for identity in (owner, observer):
            assert (await _status(address, identity)).job == identity.id
        for identity in (worker, authority.issue_identity(KEEPER, time.time())):
            error = await _refused(address, identity)
            assert refusal_of(error) is Refusal.NOT_YOU
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
            assert identity.peer.role.value in str(error.details())
        async with channels.control_channel(address, observer, QUICK) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            for call, request in (
                (stub.Stop, control_pb2.StopRequest()),
                (stub.CreateInvite, control_pb2.CreateInviteRequest()),
                (stub.RevokeInvite, control_pb2.RevokeInviteRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call(request, timeout=10)
                assert refusal_of(failed.value) is Refusal.NOT_YOU


async def test_every_worker_rpc_is_closed_to_workers_of_the_owners(authority):
    """A worker's certificate opens Session and nothing else."""
    worker = _join(authority)
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        async with channels.control_channel(address, worker, QUICK) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            session = stub.Session()
            hello = control_pb2.Hello(worker_id=worker.id)
            await session.write(control_pb2.ToCoordinator(hello=hello))
            assert (await session.read()).standby.reason == worker.id
            session.cancel()
            requests = {
                "Status": control_pb2.StatusRequest(),
                "Watch": control_pb2.StatusRequest(),
                "Stop": control_pb2.StopRequest(),
                "CreateInvite": control_pb2.CreateInviteRequest(),
                "ListInvites": control_pb2.ListInvitesRequest(),
                "RevokeInvite": control_pb2.RevokeInviteRequest(),
            }
            for method, request in requests.items():
                call = getattr(stub, method)(request, timeout=10)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await (call.read() if method == "Watch" else call)
                assert refusal_of(failed.value) is Refusal.NOT_YOU, method
        async with channels.control_channel(
            address, authority.issue_identity(OWNER, time.time()), QUICK
        ) as channel:
            session = control_pb2_grpc.ControlStub(channel).Session()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await session.read()
            assert refusal_of(failed.value) is Refusal.NOT_YOU


def test_the_policies_name_every_rpc_there_is():
    from starlings_protos import data_pb2

    for policy, module, service in (
        (CONTROL_POLICY, control_pb2, "Control"),
        (DATA_POLICY, data_pb2, "Data"),
    ):
        methods = module.DESCRIPTOR.services_by_name[service].methods
        assert set(policy) == {f"/starlings.v1.{service}/{method.name}" for method in methods}


async def test_what_no_policy_names_nobody_may_call(authority):
    server = channels.make_server(QUICK, (RoleGuard({}),))
    control_pb2_grpc.add_ControlServicer_to_server(_Control(), server)
    identity = authority.issue_identity(COORDINATOR, time.time())
    port = channels.bind(server, "127.0.0.1", 0, channels.server_credentials(identity))
    await server.start()
    try:
        error = await _refused(f"127.0.0.1:{port}", authority.issue_identity(OWNER, time.time()))
        assert refusal_of(error) is Refusal.NOT_YOU
    finally:
        await server.stop(0)


async def test_a_revoked_certificate_is_refused_at_the_next_call(authority):
    shut_out: set[str] = set()

    def refuse(peer: PeerIdentity) -> RefusedError | None:
        return RefusedError(Refusal.REVOKED, "shut out") if peer.id in shut_out else None

    owner = authority.issue_identity(OWNER, time.time())
    async with (
        _served(authority.issue_identity(COORDINATOR, time.time()), refuse=refuse) as address,
        channels.control_channel(address, owner, QUICK) as channel,
    ):
        stub = control_pb2_grpc.ControlStub(channel)
        await stub.Status(control_pb2.StatusRequest(), timeout=10)
        shut_out.add("owner")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Status(control_pb2.StatusRequest(), timeout=10)
        assert refusal_of(failed.value) is Refusal.REVOKED


async def test_a_cancelled_stream_ends_the_servicers_code(authority):
    servicer = _Control()
    owner = authority.issue_identity(OWNER, time.time())
    async with (
        _served(authority.issue_identity(COORDINATOR, time.time()), servicer) as address,
        channels.control_channel(address, owner, QUICK) as channel,
    ):
        call = control_pb2_grpc.ControlStub(channel).Watch(control_pb2.StatusRequest())
        assert (await call.read()).job == "owner"
        call.cancel()
        async with asyncio.timeout(10):
            await servicer.closed.wait()


async def test_a_call_that_is_not_there_is_guarded_too(authority):
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        owner = authority.issue_identity(OWNER, time.time())
        async with channels.control_channel(address, owner, QUICK) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await control_pb2_grpc.ControlStub(channel).ListInvites(
                    control_pb2.ListInvitesRequest(), timeout=10
                )
            assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_require_inside_a_servicer(authority):
    owner = authority.issue_identity(OWNER, time.time())
    async with (
        _served(authority.issue_identity(COORDINATOR, time.time())) as address,
        channels.control_channel(address, owner, QUICK) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await control_pb2_grpc.ControlStub(channel).Stop(control_pb2.StopRequest(), timeout=10)
        assert refusal_of(failed.value) is Refusal.NOT_YOU


async def test_a_renewed_server_certificate_is_used_without_a_restart(authority):
    issued = [authority.issue_identity(COORDINATOR, time.time() - 8 * 86400)]  # expired
    owner = authority.issue_identity(OWNER, time.time())
    async with _served(lambda: issued[-1]) as address:
        assert (await _refused(address, owner)).code() == grpc.StatusCode.UNAVAILABLE
        issued.append(authority.issue_identity(COORDINATOR, time.time()))
        assert (await _status(address, owner)).job == "owner"


async def test_messages_above_the_limit_are_refused(authority):
    owner = authority.issue_identity(OWNER, time.time())
    small = replace(QUICK, receive_limit_bytes=1000)
    async with (
        _served(authority.issue_identity(COORDINATOR, time.time()), transport=small) as address,
        channels.control_channel(address, owner, QUICK) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await control_pb2_grpc.ControlStub(channel).Stop(
                control_pb2.StopRequest(reason="x" * 2000), timeout=10
            )
        assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


# ------------------------------------------------------------------ ports


async def test_a_busy_port(authority):
    credentials = channels.server_credentials(authority.issue_identity(COORDINATOR, time.time()))
    async with _served(authority.issue_identity(COORDINATOR, time.time())) as address:
        port = int(address.rpartition(":")[2])
        server = channels.make_server(QUICK)
        with pytest.raises(PortBusy, match=f"Port {port} on 127.0.0.1 is busy") as busy:
            channels.bind(server, "127.0.0.1", port, credentials)
        assert busy.value.exit_code == 10
        await server.stop(0)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        server = channels.make_server(QUICK)
        with pytest.raises(PortBusy):
            channels.bind(server, "127.0.0.1", held.getsockname()[1], credentials)
        await server.stop(0)


async def test_a_port_that_is_busy_on_one_address_only(authority):
    credentials = channels.server_credentials(authority.issue_identity(COORDINATOR, time.time()))
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        for host in ("", "0.0.0.0", "::"):
            server = channels.make_server(QUICK)
            with pytest.raises(PortBusy):
                channels.bind(server, host, held.getsockname()[1], credentials)
            await server.stop(0)


async def test_a_machine_without_ipv6(authority, monkeypatch: pytest.MonkeyPatch):
    real = socket.socket

    def without_ipv6(family=socket.AF_INET, *rest, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *rest, **options)

    with real() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(socket, "socket", without_ipv6)
    channels._try_port("::", port)


async def test_a_port_can_be_opened_again_at_once(authority):
    identity = authority.issue_identity(COORDINATOR, time.time())
    owner = authority.issue_identity(OWNER, time.time())
    async with _served(identity) as address:
        await _status(address, owner)
    server = channels.make_server(QUICK)
    port = int(address.rpartition(":")[2])
    assert channels.bind(server, "127.0.0.1", port, channels.server_credentials(identity)) == port
    await server.stop(0)


async def test_addresses_that_are_not_ours(authority):
    credentials = channels.server_credentials(authority.issue_identity(COORDINATOR, time.time()))
    server = channels.make_server(QUICK)
    with pytest.raises(UsageError, match="no address of this machine"):
        channels.bind(server, "192.0.2.1", 7700, credentials)
    with pytest.raises(UsageError, match="no address of this machine"):
        channels.bind(server, "host.invalid", 7700, credentials)
    assert channels.bind(server, "", 0, credentials) > 0
    await server.stop(0)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:7700", "ipv4:10.0.0.1:7700"),
        ("::1:7700", "ipv6:[::1]:7700"),
        ("[2001:db8::1]:7700", "ipv6:[2001:db8::1]:7700"),
        ("train.example.org:7700", "dns:///train.example.org:7700"),
    ],
)
def test_targets(address: str, expected: str):
    assert channels.target(address) == expected
