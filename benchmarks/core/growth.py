"""What does not grow: the cost of a command, with the size of the pool and with the sequences that no command names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.core.clock import best_median, us
from benchmarks.core.ours import Decode, allocate_free, filled, pool_of, tokens
from benchmarks.core.work import BLOCK, TOUCHED
from block_manager_svc.core import PageTable

POOLS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
IDLE = (0, 1_000, 10_000, 100_000)
IDLE_POOL = 1 << 18  # room for a block of each idle sequence

Curves = dict[str, dict[str, list[float]]]


def measure() -> Curves:
    """µs by work, over `blocks` of the pool and over `idle sequences`."""
    by_pool: dict[str, list[float]] = {"blocks in the pool": list(map(float, POOLS))}
    by_pool["decode step of 256 sequences"] = [_decode(blocks, 0) for blocks in POOLS]
    by_pool["allocate and free 512 blocks"] = [allocate_free(blocks) for blocks in POOLS]
    by_pool["the same, all others taken"] = [_allocate_last(blocks) for blocks in POOLS]
    by_idle: dict[str, list[float]] = {"idle sequences": list(map(float, IDLE))}
    by_idle["decode step of 256 sequences"] = [_decode(IDLE_POOL, idle) for idle in IDLE]
    by_idle["create, extend and free a sequence of 32 blocks"] = [_come_and_go(idle) for idle in IDLE]
    return {"pool": by_pool, "idle": by_idle}


def _decode(blocks: int, idle: int) -> float:
    decode = Decode(256, context=2 * BLOCK, staggered=True, prefix_cache=True, num_blocks=blocks, idle=idle)
    return decode.mean(decode.extend)


def _allocate_last(blocks: int) -> float:
    pool, who = pool_of(blocks), np.zeros(TOUCHED, np.int64)
    pool.take(np.zeros(blocks - 1 - TOUCHED, np.int64))
    return best_median(lambda: us(lambda: pool.release(pool.take(who)[0], who)), 200)


def _come_and_go(idle: int) -> float:
    table = PageTable(IDLE_POOL, BLOCK)
    filled(table, [BLOCK] * idle)
    prompt = tokens(32 * BLOCK)

    def once() -> None:
        sequence = np.array([table.create(prompt)], np.int64)
        table.extend(sequence, [prompt.size])
        table.free(sequence)

    return best_median(lambda: us(once), 200)


def growth(curves: Curves) -> dict[str, float]:
    """By work: its cost at the largest size, as a multiple of that at the smallest."""
    return {
        f"{what}, by {axis}": round(values[-1] / values[0], 2)
        for (axis, _), *lines in (curve.items() for curve in curves.values())
        for what, values in lines
    }


def plot(curves: Curves, title: str, file: Path) -> None:
    """µs from 0 over the logarithm of size: what does not grow is a level line."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file, with text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "core", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(10, 3.6), layout="constrained")
    for panel, curve in zip(panels, curves.values(), strict=True):
        (axis, sizes), *lines = curve.items()
        for (what, values), marker in zip(lines, "osx", strict=False):
            panel.plot(sizes, values, marker=marker, label=what)
        if sizes[0]:
            panel.set_xscale("log", base=2)
        else:
            panel.set_xscale("symlog", linthresh=100)
        panel.set_ylim(0, 1.4 * max(max(values) for _, values in lines))
        panel.set_xlabel(axis)
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(fontsize="small", frameon=False)
        panel.set_ylabel("µs")
    figure.suptitle(title, fontsize="medium")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
