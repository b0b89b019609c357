"""The token table of a running coordinator: what the owner's commands change, recorded before it is in force."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Sequence

from starlings_coordinator import tokens
from starlings_coordinator.token_journal import TokenJournal
from starlings_coordinator.tokens import Token, TokenCreated, TokenRecord, TokenTable
from starlings_protos import control_pb2
from starlings_protos.errors import RefusedError, clean_text
from starlings_protos.messages import Refusal

# The table is kept in memory.
TOKEN_LIMIT = 10_000
USES_LIMIT = 1_000_000


class TokenBook:
    """Thread-safe. `table` is frozen, so readers need no lock; `lock` spans a decision and its record."""

    def __init__(self, journal: TokenJournal) -> None:
        self._journal = journal
        self.lock = threading.RLock()
        self.table: TokenTable = tokens.fold(journal.read())

    def record(self, records: Sequence[TokenRecord]) -> None:
        """Durable first, then in force.

        Raises:
            OSError: none of them is.
        """
        with self.lock:
            self._journal.append(records)
            for record in records:
                self.table = tokens.apply(self.table, record)

    def create(self, lifetime_s: float, uses: int, role: str, now_s: float) -> tuple[Token, str]:
        """A new token and its secret, which is stored nowhere. Lifetime 0 = a day, uses 0 = any number.

        Raises:
            RefusedError: MALFORMED: an argument out of range; LIMIT: too many tokens.
            OSError: it could not be recorded, and does not exist.
        """
        lifetime_s = lifetime_s or tokens.DEFAULT_LIFETIME_S
        if not 1 <= lifetime_s <= tokens.LIFETIME_LIMIT_S:
            raise RefusedError(Refusal.MALFORMED, "An invite lives between a second and 366 days.")
        if not 0 <= uses <= USES_LIMIT:
            raise RefusedError(
                Refusal.MALFORMED, f"An invite has at most {USES_LIMIT} uses (0 = any number)."
            )
        role = role or "worker"
        if role not in tokens.ROLES:
            raise RefusedError(Refusal.MALFORMED, f"An invite's role is {' or '.join(tokens.ROLES)}.")
        secret = secrets.token_urlsafe(24)
        # Hexadecimal, so that it can never look like an option of a command.
        created = TokenCreated(
            secrets.token_hex(5),
            tokens.hash_secret(secret),
            role,
            now_s,
            # Whole seconds: what the invite says is exactly what holds.
            float(math.ceil(now_s + lifetime_s)),
            uses,
        )
        with self.lock:
            if len(self.table.tokens) >= TOKEN_LIMIT:
                raise RefusedError(Refusal.LIMIT, f"There are {len(self.table.tokens)} invites already.")
            self.record((created,))
        return Token(created), secret

    def by_age(self) -> list[Token]:
        return sorted(self.table.tokens.values(), key=lambda t: (t.created.created_s, t.created.token_id))

    def revoke(self, token_id: str, *, workers: bool) -> tuple[str, ...]:
        """Revokes a token (by id, or by a beginning that only one has); with `workers` also who came with it.

        Returns:
            Ids of those shut out; empty without `workers`.

        Raises:
            RefusedError: NOT_HELD: no such token.
            OSError: it could not be recorded: nothing is revoked.
        """
        with self.lock:
            token = tokens.find(self.table, token_id)
            if token is None:
                raise RefusedError(
                    Refusal.NOT_HELD,
                    f"There is no invite {clean_text(token_id, 40)!r}: see `starlings invite list`.",
                )
            self.record(tokens.revocation(self.table, token, workers=workers))
        return token.workers if workers else ()


def invite_message(token: Token, invite: str = "") -> control_pb2.Invite:
    return control_pb2.Invite(
        invite=invite,
        token_id=token.created.token_id,
        role=token.created.role,
        expires_s=token.created.expires_s,
        uses=token.created.uses,
        used=len(token.workers),
        revoked=token.revoked,
    )
