"""The table of invite tokens: a frozen state, records that change it, and the verdict on a token that somebody shows.

Pure: no clock, no dice. Secrets are kept as SHA-256 only; they have 192 random bits, so no salt and no slow hash is
needed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from starlings_protos.invite import spoken_duration, spoken_time
from starlings_protos.messages import Refusal

DEFAULT_LIFETIME_S = 86400.0
LIFETIME_LIMIT_S = 366 * 86400.0
ROLES = ("worker", "observer")


@dataclass(frozen=True, slots=True)
class TokenCreated:
    token_id: str
    secret_sha256: str
    role: str
    created_s: float
    expires_s: float
    # How many workers may enrol with it; 0 = any number.
    uses: int


@dataclass(frozen=True, slots=True)
class TokenRedeemed:
    token_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class TokenRevoked:
    token_id: str


@dataclass(frozen=True, slots=True)
class WorkerRevoked:
    worker_id: str


TokenRecord = TokenCreated | TokenRedeemed | TokenRevoked | WorkerRevoked


@dataclass(frozen=True, slots=True)
class Token:
    created: TokenCreated
    # Who enrolled with it, in order of arrival.
    workers: tuple[str, ...] = ()
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class TokenTable:
    tokens: Mapping[str, Token] = field(default_factory=dict)
    revoked_workers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Denied:
    """The verdict against a token; the message is for the volunteer."""

    refusal: Refusal
    message: str


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def apply(table: TokenTable, record: TokenRecord) -> TokenTable:
    """The table after `record`. The same record twice, or one of an unknown token, changes nothing."""
    match record:
        case TokenCreated():
            if record.token_id in table.tokens:
                return table
            return replace(table, tokens={**table.tokens, record.token_id: Token(record)})
        case TokenRedeemed():
            token = table.tokens.get(record.token_id)
            if token is None or record.worker_id in token.workers:
                return table
            return _with(table, replace(token, workers=(*token.workers, record.worker_id)))
        case TokenRevoked():
            token = table.tokens.get(record.token_id)
            return table if token is None else _with(table, replace(token, revoked=True))
        case WorkerRevoked():
            return replace(table, revoked_workers=table.revoked_workers | {record.worker_id})
        case _:
            assert_never(record)


def fold(records: Iterable[TokenRecord]) -> TokenTable:
    table = TokenTable()
    for record in records:
        table = apply(table, record)
    return table


def _with(table: TokenTable, token: Token) -> TokenTable:
    return replace(table, tokens={**table.tokens, token.created.token_id: token})


def open_token(table: TokenTable, token_id: str, secret: str, now_s: float) -> Token | Denied:
    """The token, if the secret is right and it is neither revoked nor expired.

    Only who knows the secret learns more than "wrong". `now_s` is seconds since 1970.
    """
    token = table.tokens.get(token_id)
    # Compared also when there is no such token, and in constant time: how long an answer takes tells nothing.
    expected = token.created.secret_sha256 if token else hash_secret("")
    right = hmac.compare_digest(hash_secret(secret), expected)
    if token is None or not right:
        return Denied(
            Refusal.INVITE_WRONG,
            "The coordinator does not know this invite: it was mistyped, or belongs to an earlier job. Ask the owner "
            "for a new one (starlings invite create).",
        )
    if token.revoked:
        return Denied(
            Refusal.REVOKED,
            "The owner has revoked this invite. Ask the owner for a new one if that was a mistake.",
        )
    if now_s >= token.created.expires_s:
        return Denied(Refusal.INVITE_EXPIRED, expired_message(token.created.expires_s, now_s))
    return token


def expired_message(expires_s: float, now_s: float) -> str:
    return (
        f"This invite expired at {spoken_time(expires_s)} ({spoken_duration(now_s - expires_s)} ago). "
        "Ask the owner for a new one (starlings invite create)."
    )


def redeem(table: TokenTable, token: Token, worker_id: str) -> TokenRedeemed | Denied:
    """Whether `worker_id` may enrol with `token`. Who has done so before may again, without using it up further."""
    if worker_id in table.revoked_workers:
        return Denied(
            Refusal.REVOKED, f"The owner has shut out {worker_id}; another invite does not change that."
        )
    uses = token.created.uses
    if worker_id not in token.workers and uses and len(token.workers) >= uses:
        times = "once" if uses == 1 else f"{uses} times"
        return Denied(
            Refusal.INVITE_USED_UP,
            f"This invite could be used {times} and was. Ask the owner for a new one (starlings invite create).",
        )
    return TokenRedeemed(token.created.token_id, worker_id)


def find(table: TokenTable, token_id: str) -> Token | None:
    """By id, or by the beginning of one (4 characters or more) that no other token shares."""
    exact = table.tokens.get(token_id)
    if exact is not None or len(token_id) < 4:
        return exact
    found = [token for key, token in table.tokens.items() if key.startswith(token_id)]
    return found[0] if len(found) == 1 else None


def revocation(table: TokenTable, token: Token, *, workers: bool) -> tuple[TokenRecord, ...]:
    """The records that revoke a token and, with `workers`, those who came with it and are not shut out yet."""
    records: list[TokenRecord] = [] if token.revoked else [TokenRevoked(token.created.token_id)]
    if workers:
        records += [WorkerRevoked(w) for w in token.workers if w not in table.revoked_workers]
    return tuple(records)
