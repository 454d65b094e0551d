"""The protocol of the inbound log: takeovers of source partitions, claims of transactions, receipts. Without IO: no Kafka, no threads.

A member of the group takes over a source partition with an owner entry, and a transaction claims a record with a claim entry. Both append
their entry and then read the log up to it: the entry counts unless the entry of another owner comes before it. So a process that was
replaced cannot commit a record that its successor handles, no matter when it continues.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from bascule.adapter.inbound.state import CLAIM, FAILED, FLIGHT, OWNER, READ, Flights, LogFold, Place, PlaceState, Ref, key_of, owner_value
from bascule.core import crash
from bascule.core.errors import Unavailable
from bascule.core.xid import Xid
from bascule.xa.errors import BranchRolledBack, Code, ResourceFailed, XaError

R = TypeVar("R")


class LogViolation(enum.StrEnum):
    """Rules of the inbound log that a test may break."""

    TAKE_UNCHECKED = "a member takes over a partition without checking whether another member owns it"
    OWNERS_BEFORE_VOID = "a new owner deletes the entries of earlier owners before it deletes the entries that those made invalid"
    READ_ENTRIES_IGNORED = "a new owner starts at the offset of the group although the log shows that more was read"
    FORMER_READ_ENTRIES_DELETED_UNREAD = "a member deletes earlier read entries without checking whether its own entry counts"
    ADVANCED_BEFORE_FLIGHTS = "the log shows a partition as read up to an offset before it lists the records as in flight"
    CLAIM_UNCHECKED = "a claim counts whichever member owns the partition and whether or not the record is already claimed"
    CLAIM_ENDS_FIRST = "a commit deletes the claim before it deletes the entries of the record"
    ROLLBACK_ENDS_FLIGHT = "a rollback deletes the entries of the record, as a commit does"
    OPEN_CLAIMS_IGNORED = "a new owner delivers records that a prepared transaction has claimed"
    OFFSETS_BEFORE_LOG = "a member commits the offsets of the group before the records are in the log"
    DELIVERED_BEFORE_COMMIT = "a member delivers records before the log and the offsets of the group show them as read"
    RECEIPT_BEFORE_WORK = "a member writes the receipt of a record before its endpoint has returned"
    DOUBTFUL_TOKEN_KEPT = "a member keeps its token after an append failed"
    AHEAD_DELIVERED_AT_ONCE = "a new owner immediately delivers records in flight that are ahead of the group's offset"


class Superseded(BranchRolledBack):
    """Raised when another member of the group has taken over the record's partition and handles the record, or the record is done."""


class LogEffects(Protocol):
    """The operations on the log's topic. Entries of a source partition are stored and read in one order."""

    async def append(self, key: bytes, value: bytes | None, place: Place) -> int | None:
        """Store an entry, and return its offset or None if the offset is unknown. Raises Unavailable: the entry may be stored or not."""

    async def store(self, entries: Sequence[tuple[Place, bytes, bytes | None]], *, many: bool) -> None:
        """Return when all entries are stored. If ``many``, they may wait a moment for other entries.

        Raises Unavailable: each entry may be stored or not.
        """

    def send(self, key: bytes, value: bytes | None, place: Place) -> None:
        """Store an entry at some time. The entry may get lost."""

    def delete_soon(self, place: Place, keys: Sequence[bytes]) -> None:
        """Delete entries at some time. A deletion that gets lost is repeated."""

    async def read(self, see: Callable[[LogFold], R]) -> R:
        """Return the result of ``see`` on the current log, whichever node answers. Raises Unavailable."""

    async def look(self, see: Callable[[LogFold], R]) -> R:
        """Do the same as ``read``, but accept the answer of a replaced node, which may have less of the log. Raises Unavailable."""

    async def reach(self, place: Place, offset: int | None, see: Callable[[PlaceState], R]) -> R:
        """Return the result of ``see`` when the log is read up to an offset of the place's entries (None: the current end).

        Raises Unavailable.
        """

    def known(self, see: Callable[[LogFold], R]) -> R:
        """Return the result of ``see`` on what was read so far, which may be a part of the log."""


class DeliveryEffects(Protocol):
    """The effects of a delivery outside of transactions."""

    async def work(self) -> None:
        """Call the endpoint. Raises the error of the endpoint."""

    async def receipt(self) -> None:
        """Store that the record is done. Raises Unavailable."""


async def at_least_once(delivery: DeliveryEffects, violations: Collection[enum.StrEnum] = ()) -> None:
    """Deliver a record. It is done when its endpoint has returned."""
    if LogViolation.RECEIPT_BEFORE_WORK in violations:
        await delivery.receipt()
    await delivery.work()
    await delivery.receipt()


class LogProtocol:
    """The rules of the log, on top of the effects of one process."""

    def __init__(self, effects: LogEffects, by: str, *, violations: Collection[enum.StrEnum] = ()) -> None:
        """``by`` names the process in entries."""
        self._effects = effects
        self._by = by
        self._violations = frozenset(violations)
        #: The tokens of this process.
        self._tokens: set[str] = set()

    # -- owners

    async def owner(self, place: Place) -> str | None:
        """Return the token of a source partition's owner, or of an earlier one; in that case ``take`` fails. Raises Unavailable."""
        return await self._effects.look(lambda fold: fold.place(place).owner)

    async def take(self, place: Place, token: str, after: str | None) -> None:
        """Take over a source partition under a new token.

        ``after`` is the previous owner, read while the group assigned the partition to this member: if another member has taken over the
        partition since then, the partition stays with that member. Raises Unavailable, in that case too.
        """
        self._tokens.add(token)
        offset = await self._effects.append(key_of(OWNER, Ref(place, token, -1)), owner_value(self._by, after), place)
        crash.point("inbound.take.owner")
        owner, void, owners = await self._effects.reach(
            place, offset, lambda state: (state.owner, tuple(sorted(state.void)), _owners_before(state, token))
        )
        if owner != token and LogViolation.TAKE_UNCHECKED not in self._violations:
            raise Unavailable(f"partition {place} was taken over by another member")
        # Delete void entries before the owners that make them void: without those owners they would count.
        if LogViolation.OWNERS_BEFORE_VOID in self._violations:
            self._delete(place, owners)
        await self._effects.store([(place, key, None) for key in void], many=True)
        self._delete(place, owners)

    def _delete(self, place: Place, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._effects.send(key, None, place)

    # -- flights

    async def flights(self, place: Place) -> Flights:
        """Return the records in flight of a source partition. Raises Unavailable."""
        return await self._effects.read(lambda fold: fold.place(place).seen())

    async def schedule(self, refs: Sequence[Ref]) -> None:
        """Return when the entries that say that records are in flight are stored.

        Raises Unavailable: the entries may still be stored at any time, even after they were deleted. Therefore the token must not be used
        any more (``pass_on``): entries of an earlier token do not count.
        """
        await self._effects.store([(ref.place, key_of(FLIGHT, ref), b"1") for ref in refs], many=True)

    async def advance(self, ends: Sequence[Ref]) -> None:
        """Store that the log has all records before these. Raises Unavailable, as ``schedule``."""
        await self._effects.store([(ref.place, key_of(READ, ref), b"1") for ref in ends], many=False)
        if LogViolation.FORMER_READ_ENTRIES_DELETED_UNREAD in self._violations:
            for ref in ends:
                former = self._effects.known(lambda fold, at=ref.place: list(fold.place(at).reads))  # type: ignore[misc]
                self._effects.delete_soon(ref.place, [key for key in former if key != key_of(READ, ref)])

    def tidy(self) -> None:
        """Delete ``read`` entries that later ones have replaced, as far as the log was read.

        A replaced owner may not know that it was replaced: its last entry may not count, so the entries before it must stay until it was
        read.
        """
        for place, former in self._effects.known(self._replaced):
            self._effects.delete_soon(place, former)

    def _replaced(self, fold: LogFold) -> list[tuple[Place, list[bytes]]]:
        own = [(place, state) for place, state in fold.places.items() if state.owner in self._tokens]
        return [(place, list(state.reads)[:-1]) for place, state in own if len(state.reads) > 1]

    async def failed(self, ref: Ref, failures: int) -> bytes:
        """Store the number of a record's failures, and return the key of the entry. Raises Unavailable; then repeat the call.

        An entry that is stored late, when the record is done, does not count: only ``flight`` entries put a record in flight.
        """
        key = key_of(FAILED, ref)
        await self._effects.append(key, str(failures).encode(), ref.place)
        return key

    async def done(self, place: Place, keys: Iterable[bytes], *, wait: bool = True) -> None:
        """Delete the entries of a record that is done; if ``wait``, return when that is stored. Can be repeated. Raises Unavailable."""
        crash.point("inbound.done.before")
        if wait:
            for key in keys:
                await self._effects.append(key, None, place)
        else:
            self._effects.delete_soon(place, list(keys))
        crash.point("inbound.done.after")

    # -- claims

    async def claim(self, xid: Xid, ref: Ref) -> None:
        """Claim a record for a prepared transaction.

        Raises Superseded, BranchRolledBack: the claim is withdrawn. Raises ResourceFailed if the claim of another transaction, whose
        outcome is open, comes first, and Unavailable. In both cases the claim may count, so the rollback of the transaction must withdraw
        it.
        """
        key = key_of(CLAIM, ref, xid)
        offset = await self._effects.append(key, b"1", ref.place)
        crash.point("inbound.claim.after")
        refused = await self._effects.reach(ref.place, offset, lambda state: refusal(state, xid, ref))
        if refused is None or LogViolation.CLAIM_UNCHECKED in self._violations:
            return
        if isinstance(refused, BranchRolledBack):
            self._effects.send(key, None, ref.place)
        raise refused

    async def withdraw(self, xid: Xid, ref: Ref) -> None:
        """Delete a claim of this process, even an unanswered one: if the claim is stored at all, it comes before its deletion."""
        if LogViolation.ROLLBACK_ENDS_FLIGHT in self._violations:
            await self.done(ref.place, [key_of(FLIGHT, ref)])
        await self._effects.append(key_of(CLAIM, ref, xid), None, ref.place)

    async def finish(self, xid: Xid, *, commit: bool) -> bool:
        """Commit or roll back a stored claim of any process. Return False if there is none. Raises Unavailable."""
        # Look at the claim and the record's entries at one moment: between two looks the log may be read again.
        found = self._effects.known(lambda fold: fold.claimed(xid)) or await self._effects.read(lambda fold: fold.claimed(xid))
        if found is None:
            return False
        if LogViolation.CLAIM_ENDS_FIRST in self._violations:
            await self._effects.append(found.claim.key, None, found.place)
        if commit or LogViolation.ROLLBACK_ENDS_FLIGHT in self._violations:
            # Store this before the claim is deleted: a record that is in flight and unclaimed would be redelivered. In this order a crash
            # only repeats the commit, which does no harm.
            await self.done(found.place, found.keys)
        await self._effects.append(found.claim.key, None, found.place)
        return True

    async def claims(self) -> Sequence[Xid]:
        """Return the prepared transactions. Raises Unavailable."""
        return await self._effects.read(lambda fold: [xid for state in fold.places.values() for xid in state.claims])


def refusal(state: PlaceState, xid: Xid, ref: Ref) -> XaError | None:
    """Return why a claim does not count, or None. The first claim of a record in flight counts, if it was made by the record's owner."""
    first = state.first_claim(ref.offset)
    where = f"{ref.place}, offset {ref.offset}"
    claim = state.claims.get(xid)
    if ref.offset in state.flights and first == xid and claim is not None and claim.key == key_of(CLAIM, ref, xid):
        return None
    if state.owner != ref.token:
        return Superseded(f"{where} was taken over by another member")
    if ref.offset not in state.flights:
        return Superseded(f"{where} is already settled")
    if first is None or first == xid:
        return BranchRolledBack(f"{where}: branch {xid} was rolled back by another process", Code.XA_RBTRANSIENT)
    return ResourceFailed(f"{where} is claimed by branch {first}, which is in doubt")


def _owners_before(state: PlaceState, token: str) -> tuple[bytes, ...]:
    """Return the entries of earlier owners in the order of the log, or none if a later owner has deleted the entry of ``token``."""
    tokens = list(state.owners)
    return tuple(state.owners[each] for each in tokens[: tokens.index(token)]) if token in tokens else ()
