"""Extra keys: what decides a token's K/V besides the tokens up to it, such as the image behind placeholder tokens.

    tokens      | 7  8  IMG IMG | IMG IMG  9  3 | 5  6 ···
    extra key          └ sha of the picture
    identity    | tokens + key  | tokens        | tokens        each behind the block before it

A key belongs to one position, and with it to the identity of the block that holds this position; what comes behind is
chained behind that block, so one key where an image begins keeps all its tokens apart. Keys are compared exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from block_manager_svc.core.arguments import check_length
from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.step import I64

MAX_KEY_BYTES: Final = 256

# (position, key) of one sequence, positions ascending.
Keyed = tuple[tuple[int, bytes], ...]

_ENTRY = Struct("<HH")  # offset in the block, bytes of the key


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """Columns: keys[i] for position positions[i] of the sequence at place of[i] of a command."""

    of: I64
    positions: I64
    keys: Sequence[bytes]


def by_place(extra: ExtraKeys | None, first: I64, upto: I64) -> dict[int, Keyed]:
    """The keys of each place that has some; those at place i lie at positions [first[i], upto[i]), which are new.

    InvalidArgument EXTRA_KEY_POSITION: they do not, or do not ascend. EXTRA_KEY_LENGTH: a key of 0 or of more than
    MAX_KEY_BYTES bytes.
    """
    found: dict[int, Keyed] = {}
    if extra is None:
        return found
    check_length(extra.positions, "positions of extra keys", extra.of.size)
    if len(extra.keys) != extra.of.size:
        raise InvalidArgument(
            "UNEQUAL_COLUMNS",
            f"{len(extra.keys)} extra keys for {extra.of.size} positions",
            values=len(extra.keys),
            expected=extra.of.size,
        )
    for place, position, key in zip(extra.of.tolist(), extra.positions.tolist(), extra.keys, strict=True):
        before = found.get(place, ())
        least = before[-1][0] + 1 if before else int(first[place]) if 0 <= place < first.size else 0
        most = int(upto[place]) - 1 if 0 <= place < upto.size else -1
        if not least <= position <= most:
            raise InvalidArgument(
                "EXTRA_KEY_POSITION",
                f"an extra key for position {position} at place {place}: its new tokens that may still get one are "
                f"{least} to {most}",
                position=position,
                place=place,
                first=least,
                last=most,
            )
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise InvalidArgument(
                "EXTRA_KEY_LENGTH",
                f"an extra key of {len(key)} bytes: at least 1, at most {MAX_KEY_BYTES}",
                bytes=len(key),
                limit=MAX_KEY_BYTES,
            )
        found[place] = (*before, (position, key))
    return found


def by_block(keyed: Keyed, size: int) -> Mapping[int, bytes]:
    """What the keys add to the identity of logical blocks of `size` tokens; equal exactly if the keys are."""
    blocks: dict[int, bytes] = {}
    for position, key in keyed:
        block, offset = divmod(position, size)
        blocks[block] = blocks.get(block, b"") + _ENTRY.pack(offset, len(key)) + key
    return blocks
