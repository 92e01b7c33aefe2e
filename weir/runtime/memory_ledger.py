"""`MemoryLedger`: how much memory a process spends on what clients sent and on what they have not read yet.

Every place that holds such bytes charges them to an `Account` when they arrive, or begin to wait, and releases them when
they are gone. Only bytes that exist are counted: a client that announces a large body and sends nothing holds nothing.

Promises, for a ledger with the limit L:
- One account (a connection, or one of the gateway's own consumers) holds at most L / 2.
- All accounts of one principal (a client's IP address, "nats", "durable", ...) hold at most 3 L / 4 together, so one
  client always leaves a quarter for others.
- The less a principal has left, the less one account may hold: at most `SCARCITY_FACTOR` times what is left. So a few large
  transfers never take the last of it: they are refused at their next byte, while small ones go on.
- All accounts hold at most L together.
- One request at a time that is larger than the share may go beyond it, until its account holds `largest_request_bytes`:
  otherwise it could not be served at all. The others of its account have the share together. What goes beyond the share is
  not counted against other accounts. So a process holds at most L, or L + largest_request_bytes while it serves such a
  request.

No IO. Not thread-safe: charge and release in the event loop only.
"""

from __future__ import annotations

from typing import Protocol

from weir.runtime.containment import report

DEFAULT_LIMIT_BYTES = 512 * 1024 * 1024
"""The limit of a gateway's ledger, unless a quarter of the memory of its container or machine is less."""


SCARCITY_FACTOR = 4
"""One account may hold this many times what its principal has left (dynamic thresholds, Choudhury and Hahne 1998)."""


class Holder(Protocol):
    """One request, or one response: what may go beyond the share of its account."""

    @property
    def held_bytes(self) -> int:
        """What it holds now of what is charged to the account."""


class MemoryLedger:
    """The accounts of one process. `largest_request_bytes` is the most that an account may hold for the one request that
    goes beyond its share.

    `held_bytes` are the bytes held now, and `refused` the number of refused charges, both by kind. `total_bytes` are held
    now in all, and `peak_bytes` were the most that ever were; `recent_peak_bytes` is the same since its reader set it last.
    """

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES, largest_request_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.largest_request_bytes = largest_request_bytes
        self.held_bytes: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.total_bytes = 0
        self.peak_bytes = 0
        self.recent_peak_bytes = 0
        self._counted_bytes = 0  # without what the account beyond its share holds beyond it
        self._counted_by_principal: dict[str, int] = {}
        self._beyond_share: tuple[Account, Holder] | None = None

    @property
    def account_share_bytes(self) -> int:
        """The most that one account holds, but for the one that is allowed to go beyond its share."""
        return self.limit_bytes // 2

    @property
    def principal_share_bytes(self) -> int:
        """The most that the accounts of one principal hold together."""
        return self.limit_bytes * 3 // 4

    @property
    def is_short(self) -> bool:
        """Whether more than half of the limit is in use. Then those who hold memory idly are ended sooner."""
        return 2 * self._counted_bytes > self.limit_bytes

    def account(self, principal: str, has_many: bool = False) -> Account:
        """A new account of `principal`. Whoever opens it must close it.

        With `has_many` it is that of many requests at a time, each of which is named where it may go beyond the share.
        """
        return Account(self, principal, has_many)

    def _admits(self, account: Account, size_bytes: int, holder: Holder | None, whole_bytes: int) -> bool:
        share_bytes = self.account_share_bytes
        held_bytes = account.held_bytes + size_bytes
        if held_bytes > share_bytes:
            if holder is not None:
                whole_bytes = max(whole_bytes, holder.held_bytes + size_bytes)
            if not self._admits_beyond(account, held_bytes, holder, whole_bytes):
                return False
        counted_bytes = min(held_bytes, share_bytes)
        added_bytes = counted_bytes - min(account.held_bytes, share_bytes)
        of_principal_bytes = self._counted_by_principal.get(account.principal, 0)
        left_bytes = self.principal_share_bytes - of_principal_bytes - added_bytes
        return (
            self._counted_bytes + added_bytes <= self.limit_bytes
            and left_bytes >= 0
            and counted_bytes <= SCARCITY_FACTOR * left_bytes
        )

    def _admits_beyond(self, account: Account, held_bytes: int, holder: Holder | None, whole_bytes: int) -> bool:
        if self._beyond_share is None:
            return whole_bytes > self.account_share_bytes and held_bytes <= self.largest_request_bytes
        beyond, large = self._beyond_share
        if beyond is not account:
            return False
        if large is holder:
            return held_bytes <= self.largest_request_bytes
        return held_bytes - large.held_bytes <= self.account_share_bytes

    def _change(self, account: Account, kind: str, size_bytes: int, holder: Holder | None = None) -> None:
        share_bytes = self.account_share_bytes
        counted_bytes = -min(account.held_bytes, share_bytes)
        account.held_bytes += size_bytes
        counted_bytes += min(account.held_bytes, share_bytes)
        if account.held_bytes <= share_bytes:
            if self._beyond_share is not None and self._beyond_share[0] is account:
                self._beyond_share = None
        elif self._beyond_share is None and holder is not None:
            self._beyond_share = account, holder
        self._counted_bytes += counted_bytes
        of_principal_bytes = self._counted_by_principal.get(account.principal, 0) + counted_bytes
        if of_principal_bytes:
            self._counted_by_principal[account.principal] = of_principal_bytes
        else:
            self._counted_by_principal.pop(account.principal, None)
        self.held_bytes[kind] = self.held_bytes.get(kind, 0) + size_bytes
        self.total_bytes += size_bytes
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.total_bytes)
        self.peak_bytes = max(self.peak_bytes, self.recent_peak_bytes)

    def _count_refusal(self, kind: str) -> None:
        self.refused[kind] = self.refused.get(kind, 0) + 1


class Account:
    """What one connection, or one consumer, holds. Made by `MemoryLedger.account`.

    A kind is a constant word that says what the bytes are: "http", "grpc", "unsent", "nats", "durable", "object", ...
    `held_bytes` is what the account holds, of all kinds.
    """

    __slots__ = ("_by_kind", "_has_many", "_is_closed", "_ledger", "held_bytes", "principal")

    def __init__(self, ledger: MemoryLedger, principal: str, has_many: bool) -> None:
        self._ledger = ledger
        self._by_kind: dict[str, int] = {}
        self._has_many = has_many
        self._is_closed = False
        self.held_bytes = 0
        self.principal = principal

    @property
    def ledger(self) -> MemoryLedger:
        """The ledger that the account belongs to."""
        return self._ledger

    def charge(self, kind: str, size_bytes: int, holder: Holder | None = None, whole_bytes: int = 0) -> bool:
        """Counts `size_bytes` that have arrived, or begin to wait to be sent. False where there is no room for them:

        then nothing is charged, the refusal is counted, and the bytes must not be kept. A closed account refuses all.
        `holder` is whose bytes they are, if that may go beyond the share; always the account where it has one request.
        `whole_bytes` is what it will hold in the end, where it has announced that.
        """
        if self._is_closed:
            return False
        if not self._has_many:
            holder = self
        if not self._ledger._admits(self, size_bytes, holder, whole_bytes):
            self._ledger._count_refusal(kind)
            return False
        self._by_kind[kind] = self._by_kind.get(kind, 0) + size_bytes
        self._ledger._change(self, kind, size_bytes, holder)
        return True

    def fits(self, size_bytes: int, holder: Holder | None = None) -> bool:
        """Whether a charge of `size_bytes` would be granted now. Charges and counts nothing.

        For what announces its size: it is refused before its first byte is read, and the caller counts that by `refuse`.
        """
        if not self._has_many:
            holder = self
        return not self._is_closed and self._ledger._admits(self, size_bytes, holder, 0)

    def refuse(self, kind: str) -> None:
        """Counts a refusal that followed from `fits`."""
        self._ledger._count_refusal(kind)

    def release(self, kind: str, size_bytes: int) -> None:
        """Counts `size_bytes` of this kind as gone. Nothing happens once the account is closed."""
        if self._is_closed or not size_bytes:
            return
        held_bytes = self._by_kind.get(kind, 0)
        if size_bytes > held_bytes:
            report("weir.runtime.memory_ledger: release", ValueError(f"{size_bytes} of {held_bytes} bytes of {kind}"))
            size_bytes = held_bytes
        self._by_kind[kind] = held_bytes - size_bytes
        self._ledger._change(self, kind, -size_bytes)

    def close(self) -> None:
        """Releases all that the account still holds. Later charges are refused, later releases do nothing."""
        for kind, size_bytes in self._by_kind.items():
            if size_bytes:
                self._ledger._change(self, kind, -size_bytes)
        self._by_kind.clear()
        self._is_closed = True
