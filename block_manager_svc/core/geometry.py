"""What a pool can be made of."""

from __future__ import annotations

from block_manager_svc.core.errors import InvalidArgument
from block_manager_svc.core.eviction import POLICIES


def check_pool(num_blocks: int, num_host: int, block_size: int, watermark: int, eviction: str) -> None:
    """Refuses what no page table can be made of."""
    if not 2 <= num_blocks < 1 << 31:
        raise InvalidArgument(
            "POOL_SIZE_OUT_OF_RANGE",
            f"a pool of {num_blocks} blocks: at least 2, below 2**31",
            num_blocks=num_blocks,
        )
    if not 0 <= num_host < (1 << 31) - num_blocks:
        raise InvalidArgument(
            "POOL_SIZE_OUT_OF_RANGE",
            f"{num_host} host slots beside {num_blocks} blocks: at least 0, and below 2**31 together",
            num_host=num_host,
            num_blocks=num_blocks,
        )
    if not 1 <= block_size < 1 << 16:
        raise InvalidArgument(
            "BLOCK_SIZE_OUT_OF_RANGE",
            f"{block_size} tokens a block: at least 1, below 65536",
            block_size=block_size,
        )
    if not 0 <= watermark < num_blocks:
        raise InvalidArgument(
            "WATERMARK_OUT_OF_RANGE",
            f"a watermark of {watermark} blocks: at least 0, below the {num_blocks} of the pool",
            watermark=watermark,
            num_blocks=num_blocks,
        )
    if eviction not in POLICIES:
        known = ", ".join(POLICIES)
        raise InvalidArgument("EVICTION_UNKNOWN", f"no eviction policy {eviction!r}: known are {known}", known=known)
