"""How large the pools are: what a block costs, what fits, and the arithmetic in plain lines."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from gpu_executor.step import Geometry

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class PoolTooLarge(Exception):
    """The pools do not fit, or too little fits; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes to spend, or a share of what is free once the model is loaded."""

    bytes: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """ "8GiB", "512MiB", "1000000", "60%". Raises ValueError."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", text)
        if match is None or (match[2] != "%" and match[2] not in _UNITS):
            raise ValueError(f"{text!r} is no amount of memory: write it like 8GiB, 512MiB or 60%")
        number = float(match[1])
        if match[2] == "%":
            if not 0 < number <= 100:
                raise ValueError(f"{text!r} must lie in (0%, 100%]")
            return cls(percent=number)
        return cls(bytes=int(number * _UNITS[match[2]]))

    def of(self, free: int) -> int:
        return int(free * self.percent / 100) if self.percent is not None else (self.bytes or 0)

    def __str__(self) -> str:
        return f"{self.percent:g}% of free memory" if self.percent is not None else readable(self.bytes or 0)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    geometry: Geometry
    lines: list[str]  # the arithmetic, to be printed


def block_bytes(geometry: Geometry) -> int:
    """Bytes of one block over all layers, K and V."""
    heads = geometry.num_kv_heads * (geometry.key_head_dim + geometry.value_head_dim)
    return geometry.num_layers * geometry.block_size * heads * ITEMSIZE[geometry.dtype]


def layout_hash(geometry: Geometry) -> bytes:
    """SHA-256 of everything that decides where a number lies in the pool."""
    g = geometry
    block = f"{g.block_size} positions, {g.num_kv_heads} heads"
    if g.key_head_dim == g.value_head_dim:
        parts = f"kv [{g.num_layers} layers, {g.num_blocks} blocks, 2, {block}, {g.key_head_dim}]\n"
    else:
        parts = (
            f"k [{g.num_layers} layers, {g.num_blocks} blocks, {block}, {g.key_head_dim}]\n"
            f"v [{g.num_layers} layers, {g.num_blocks} blocks, {block}, {g.value_head_dim}]\n"
        )
    text = f"pagedkv pool layout 1\n{parts}host {g.num_host_blocks} blocks, alike\n{g.dtype} little-endian\n"
    return hashlib.sha256(text.encode()).digest()


def plan_pool(
    one_block: Geometry,
    *,
    blocks: int | None,
    memory: Budget,
    host_blocks: int | None,
    host_memory: Budget | None,
    device_free: int,
    host_free: int,
    device_is_host: bool,
) -> PoolPlan:
    """Sizes both pools. Counts win over budgets; no budget for the host means no host pool.

    one_block:   the geometry but for its two pool sizes.
    *_free:      bytes that are free now, with the model loaded.
    device_is_host: both pools come out of `host_free`.
    Raises PoolTooLarge, with the numbers, when a pool does not fit or would have no block beside the null block.
    """
    each = block_bytes(one_block)
    g = one_block
    heads = f"{g.num_kv_heads} KV heads × ({g.key_head_dim} + {g.value_head_dim})"
    lines = [
        f"one block: {g.num_layers} layers × {g.block_size} tokens × {heads} × {ITEMSIZE[g.dtype]} bytes ({g.dtype}) "
        f"= {each:,} bytes ({readable(each)})"
    ]
    if blocks is None:
        blocks = memory.of(device_free) // each
        lines.append(
            f"device pool: {memory} of {readable(device_free)} free = {readable(blocks * each)}, {blocks:,} blocks"
        )
    else:
        lines.append(f"device pool: {blocks:,} blocks, as asked for")
    if blocks < 2:
        raise PoolTooLarge(
            f"the device pool would have {blocks} blocks, it needs 2 at least (block 0 is never handed out): one block "
            f"takes {readable(each)}, {readable(device_free)} are free; ask for more memory or for smaller blocks"
        )
    if blocks * each > device_free:
        raise PoolTooLarge(
            f"the device pool does not fit: {blocks:,} blocks × {each:,} bytes = {readable(blocks * each)}, "
            f"{readable(device_free)} are free: at most {device_free // each:,} blocks"
        )
    usable = (blocks - 1) * g.block_size
    lines.append(
        f"  = {readable(blocks * each)}, of {readable(device_free)} free; "
        f"{blocks - 1:,} usable blocks × {g.block_size} = {usable:,} tokens"
    )
    host_left = host_free - (blocks * each if device_is_host else 0)
    if host_blocks is None:
        host_blocks = host_memory.of(host_left) // each if host_memory else 0
    if host_blocks * each > host_left:
        raise PoolTooLarge(
            f"the host pool does not fit: {host_blocks:,} blocks × {each:,} bytes = {readable(host_blocks * each)}, "
            f"{readable(host_left)} are free: at most {host_left // each:,} blocks"
        )
    lines.append(f"host pool: {host_blocks:,} blocks = {readable(host_blocks * each)}, of {readable(host_left)} free")
    return PoolPlan(replace(g, num_blocks=blocks, num_host_blocks=host_blocks), lines)


def host_free() -> int:
    """Bytes that this process may still take: what the machine has free, and what its control group leaves."""
    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return free


def readable(count: int) -> str:
    """1536 → '1.5 KiB'."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
