"""Who is calling: the verified certificate behind a gRPC context, and a guard that lets each role call its own rpcs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from starlings_protos.errors import PeerFault, RefusedError, abort_with
from starlings_protos.identity import PeerIdentity, Role, identity_of_certificate
from starlings_protos.messages import Refusal

Context = grpc.aio.ServicerContext[Any, Any]

# Full method name -> who may call it. What is not listed here nobody may call.
Policy = Mapping[str, frozenset[Role]]

CONTROL_POLICY: Policy = {
    "/starlings.v1.Control/Session": frozenset({Role.WORKER}),
    "/starlings.v1.Control/Status": frozenset({Role.OWNER, Role.OBSERVER}),
    "/starlings.v1.Control/Watch": frozenset({Role.OWNER, Role.OBSERVER}),
    "/starlings.v1.Control/Why": frozenset({Role.OWNER, Role.OBSERVER}),
    "/starlings.v1.Control/Advise": frozenset({Role.OWNER}),
    "/starlings.v1.Control/Stop": frozenset({Role.OWNER}),
    "/starlings.v1.Control/Pause": frozenset({Role.OWNER}),
    "/starlings.v1.Control/Resume": frozenset({Role.OWNER}),
    "/starlings.v1.Control/Drain": frozenset({Role.OWNER}),
    "/starlings.v1.Control/Evict": frozenset({Role.OWNER}),
    "/starlings.v1.Control/CreateInvite": frozenset({Role.OWNER}),
    "/starlings.v1.Control/ListInvites": frozenset({Role.OWNER}),
    "/starlings.v1.Control/RevokeInvite": frozenset({Role.OWNER}),
}
# Assignments are checked on top, per call (see assignments.py).
DATA_POLICY: Policy = {
    "/starlings.v1.Data/Forward": frozenset({Role.WORKER}),
    "/starlings.v1.Data/Backward": frozenset({Role.WORKER}),
    "/starlings.v1.Data/Contribute": frozenset({Role.WORKER}),
    "/starlings.v1.Data/Aggregate": frozenset({Role.WORKER}),
    "/starlings.v1.Data/Pair": frozenset({Role.WORKER}),
    "/starlings.v1.Data/Group": frozenset({Role.WORKER}),
    "/starlings.v1.Data/TellPair": frozenset({Role.WORKER}),
    "/starlings.v1.Data/FetchState": frozenset({Role.WORKER, Role.KEEPER}),
}
# On a relay's port: who may reach others through it. The ends check each other themselves.
RELAY_POLICY: Policy = {"/starlings.v1.Relay/Tunnel": frozenset({Role.WORKER, Role.KEEPER})}


def peer_identity(context: Context) -> PeerIdentity:
    """Id and role from the caller's certificate, which TLS has verified against the job's CA.

    Raises:
        RefusedError: NOT_YOU: no certificate, or not one of ours.
    """
    certificates = tuple((context.auth_context() or {}).get("x509_pem_cert") or ())
    if len(certificates) != 1:
        raise RefusedError(Refusal.NOT_YOU, "This port demands a client certificate of the job.")
    try:
        return identity_of_certificate(bytes(certificates[0]))
    except PeerFault as error:
        raise RefusedError(Refusal.NOT_YOU, f"The client certificate is not usable here: {error}.") from None


def peer_host(context: Context) -> str:
    """The caller's IP address without the port; "" when gRPC does not know it."""
    scheme, _, rest = unquote(context.peer()).partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return ""
    return rest.rpartition(":")[0].strip("[]").partition("%")[0]


async def require(context: Context, roles: frozenset[Role]) -> PeerIdentity:
    """The caller's identity; ends the rpc with NOT_YOU when its role is none of `roles`."""
    try:
        peer = peer_identity(context)
        _check_role(peer, roles)
    except RefusedError as error:
        await abort_with(context, error)
    return peer


def _check_role(peer: PeerIdentity, roles: frozenset[Role]) -> None:
    if peer.role not in roles:
        allowed = " or ".join(sorted(role.value for role in roles)) or "nobody"
        raise RefusedError(
            Refusal.NOT_YOU,
            f"This call is for {allowed}; the certificate of {peer.id} says {peer.role.value}.",
        )


class RoleGuard(grpc.aio.ServerInterceptor):
    """Checks every call's certificate before the servicer sees it.

    Args:
        policy: who may call what; a method that it does not name is refused.
        refuse: further reasons against a caller, such as a revoked certificate; asked at each call.
    """

    def __init__(
        self, policy: Policy, refuse: Callable[[PeerIdentity], RefusedError | None] = lambda peer: None
    ) -> None:
        self._policy = policy
        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler  # unknown method: gRPC answers UNIMPLEMENTED
        roles = self._policy.get(handler_call_details.method, frozenset())

        async def check(context: Context) -> None:
            try:
                peer = peer_identity(context)
                _check_role(peer, roles)
                reason = self._refuse(peer)
                if reason is not None:
                    raise reason
            except RefusedError as error:
                await abort_with(context, error)

        return _guarded(handler, check)


def _guarded(
    handler: grpc.RpcMethodHandler[Any, Any], check: Callable[[Context], Awaitable[None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    kind = (
        f"{'stream' if handler.request_streaming else 'unary'}"
        f"_{'stream' if handler.response_streaming else 'unary'}"
    )
    behaviour: Callable[[Any, Context], Any] = getattr(handler, kind)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    guarded: Callable[[Any, Context], Any]

    if inspect.isasyncgenfunction(behaviour):

        async def guarded_stream(request: Any, context: Context) -> AsyncIterator[Any]:
            await check(context)
            # Closed with this generator, so that a cancelled call ends the servicer's code at once.
            async with aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    yield reply

        guarded = guarded_stream
    elif inspect.iscoroutinefunction(behaviour):

        async def guarded_call(request: Any, context: Context) -> Any:
            await check(context)
            return await behaviour(request, context)

        guarded = guarded_call
    else:
        # Our servicers are asynchronous; what is not is the generated method that nobody has overridden.

        async def not_there(request: Any, context: Context) -> None:
            await check(context)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "This version does not offer this call.")

        guarded = not_there
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(
        guarded,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped
