"""What is promised ahead of time: pinned prefixes, reserved blocks, the limit of the pool. `PageTable` inherits it."""

from __future__ import annotations

from block_manager_svc.core.arguments import Integers, integers, token_ids
from block_manager_svc.core.chain import find
from block_manager_svc.core.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfBlocks
from block_manager_svc.core.pins import Pins
from block_manager_svc.core.prefix_index import NO_NODE
from block_manager_svc.core.reads import Reads
from block_manager_svc.core.results import Pinned
from block_manager_svc.core.terms import Terms


class Promises(Reads):
    """Raises as PageTable's commands do. Time is what `advance` says, in ms."""

    __slots__ = ("_pins", "_reservations", "now")

    _pins: Pins
    _reservations: Terms[int]  # blocks that each still promises
    now: int

    def advance(self, now: int) -> None:
        """The clock, ms: ends the priorities of blocks, pins and reservations whose time is over.

        InvalidArgument CLOCK_BACKWARDS: it only goes forward.
        """
        if now < self.now:
            raise InvalidArgument(
                "CLOCK_BACKWARDS", f"the clock says {now} ms, it said {self.now} before", now=now, before=self.now
            )
        self.now = now
        self._pool.cached.advance(now)
        self._pins.end(self._pool, now)
        for reservation, promised in self._reservations.over(now):
            self._give_up(reservation, promised)
        self.revision += 1

    def pin(self, tokens: Integers, until: int, namespace: bytes = b"", *, owner: int = 0) -> Pinned:
        """Keeps what the index finds of `tokens` (int32; whole blocks, the last included) until the clock says `until`.

        Pinned blocks are not evicted: they stay CACHED when nothing references them, and `available` is without them.
        InvalidArgument UNTIL_PASSED: that moment is over. NotFound PREFIX_NOT_CACHED: not one whole block is found.
        """
        content = token_ids(tokens)
        self._check_until(until)
        whole = content[: content.size // self.block_size * self.block_size]
        _, blocks = find(self._pool, self._pool.index.root(namespace), whole)
        if not blocks.size:
            raise NotFound(
                "PREFIX_NOT_CACHED",
                f"no block of these {content.size} tokens is found: compute them first",
                tokens=content.size,
            )
        pin = self._pins.add(self._pool, blocks, until, owner)
        self.revision += 1
        return Pinned(pin, blocks.size * self.block_size)

    def unpin(self, pins: Integers, *, owner: int = 0) -> None:
        """Ends distinct pins before their time, or none of them.

        NotFound PIN_NOT_FOUND: one has ended, is another owner's, or never was.
        """
        self._pins.remove(self._pool, integers(pins, "pins").tolist(), owner)
        self.revision += 1

    def reserve(self, blocks: int, until: int, *, owner: int = 0) -> int:
        """Keeps `blocks` free until the clock says `until`, for who names the reservation that is returned.

        OutOfBlocks; InvalidArgument UNTIL_PASSED, COUNT_OUT_OF_RANGE: less than 1.
        """
        self._check_until(until)
        if blocks < 1:
            raise InvalidArgument("COUNT_OUT_OF_RANGE", f"{blocks} blocks to reserve: at least 1", count=blocks)
        pool = self._pool
        if blocks > pool.available():
            raise OutOfBlocks(blocks, pool.available())
        pool.keep(pool.reserved + blocks, pool.withheld)
        self.revision += 1
        return self._reservations.add(blocks, until, owner)

    def release(self, reservations: Integers, *, owner: int = 0) -> None:
        """Ends distinct reservations before their time, or none of them.

        NotFound RESERVATION_NOT_FOUND: one has ended, is used up, is another owner's, or never was.
        """
        ids = integers(reservations, "reservations").tolist()
        self._reservations.check(ids, owner)
        for reservation in ids:
            self._give_up(reservation, self._reservations.get(reservation, owner))
        self.revision += 1

    def resize(self, limit: int) -> int:
        """At most `limit` blocks are in use, cached or reserved from now on. Returns how many were evicted for it.

        InvalidArgument LIMIT_OUT_OF_RANGE: below 1, or more than there are. FailedPrecondition RESIZE_BELOW_USE: more
        are referenced, pinned or reserved.
        """
        pool = self._pool
        most = self.num_blocks - 1
        if not 1 <= limit <= most:
            raise InvalidArgument(
                "LIMIT_OUT_OF_RANGE", f"a limit of {limit} blocks: at least 1, at most {most}", limit=limit, most=most
            )
        used = most - pool.withheld - pool.available()
        if limit < used:
            raise FailedPrecondition(
                "RESIZE_BELOW_USE",
                f"a limit of {limit} blocks, {used} are referenced, pinned or reserved: free {used - limit} first",
                limit=limit,
                used=used,
            )
        evicted = pool.counters.evicted_blocks
        pool.keep(pool.reserved, most - limit)
        self.revision += 1
        return pool.counters.evicted_blocks - evicted

    def reset_cache(self) -> int:
        """Nothing that is in the index now is found again, pinned or not. Returns how many cached blocks became free.

        Blocks in use stay with their holders, and what these go on to compute is not found either: only prompts that
        are computed from their beginning after this are.
        """
        freed = self._pool.forget_all()
        s = self._sequences
        s.node[s.computed > 0] = NO_NODE
        self.revision += 1
        return freed

    def _check_until(self, until: int) -> None:
        if until <= self.now:
            raise InvalidArgument(
                "UNTIL_PASSED", f"until {until} ms, the clock says {self.now}", until=until, now=self.now
            )

    def _promised(self, reservation: int, owner: int) -> int:
        """Blocks that a reservation still promises; 0 is none."""
        return self._reservations.get(reservation, owner) if reservation else 0

    def _draw(self, reservation: int, promised: int, needed: int) -> None:
        """`needed` blocks are about to be taken, from the reservation as far as it goes."""
        if promised > needed:
            self._reservations.replace(reservation, promised - needed)
            self._pool.reserved -= needed
        elif promised:
            self._give_up(reservation, promised)

    def _give_up(self, reservation: int, promised: int) -> None:
        self._reservations.remove(reservation)
        self._pool.reserved -= promised


def reservations() -> Terms[int]:
    """None yet; by id, the blocks that each still promises."""
    return Terms(
        lambda reservation: NotFound(
            "RESERVATION_NOT_FOUND",
            f"reservation {reservation} is not held: its time is over, it is used up, or it never was",
            reservation=reservation,
        )
    )
