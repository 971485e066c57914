"""Decode work shared out among threads that each compute alone.

One operator spread over all cores waits for its slowest core once per operator; gather and attention of different
sequences need no such meeting. So as many Python threads as torch has, each with torch's own threading set to one and
its own scratch: torch and numpy let go of the GIL while they work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Below this many bytes of K and V a call, waking the threads costs more than they save.
MIN_BYTES = 1 << 20


class _Workers:
    def __init__(self, count: int) -> None:
        self.count = count
        self.pool = ThreadPoolExecutor(count, "attention", torch.set_num_threads, (1,))
        ready = threading.Barrier(count + 1)
        for _ in range(count):
            self.pool.submit(ready.wait)
        ready.wait()
        torch.set_num_threads(count)  # the setting is a thread's own, but new threads take over the last one


_workers: _Workers | None = None
_lock = threading.Lock()


def run_shared(work: Callable[[list[int]], None], costs: list[int]) -> None:
    """Calls work(items) for shares of range(len(costs)), costs in bytes, in threads; returns when all are done."""
    global _workers
    threads = torch.get_num_threads()
    if threads == 1 or len(costs) == 1 or sum(costs) < MIN_BYTES:
        work(list(range(len(costs))))
        return
    with _lock:
        if _workers is None or _workers.count != threads:
            _workers = _Workers(threads)
        workers = _workers
    shares: list[list[int]] = [[] for _ in range(threads)]
    loads = [0] * threads
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += costs[item]
    for done in [workers.pool.submit(_in_inference_mode, work, share) for share in shares if share]:
        done.result()


def _in_inference_mode(work: Callable[[list[int]], None], share: list[int]) -> None:
    with torch.inference_mode():  # a thread's own setting
        work(share)
