"""Engines of two tenants, a service in its process, an executor's real link, steps and pools: after random traffic each
sequence finds exactly the bytes that were written for it, whoever else forks, swaps, frees, generates or compacts."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.processes import Process, free_port
from support.stamped_pool import Slots

from gpu_executor.config import load_settings
from gpu_executor.link.follower import Call
from gpu_executor.process import Executor
from pagedkv import Batch, BatchReply, Client, Item, ResourceExhausted

SIZE, BLOCKS, HOST = 4, 48, 16
CALLERS = {f"{tenant}-engine": f"{tenant} engine" for tenant in ("blue", "red")} | {
    "call": "green gateway",
    "audit": "green operator",
    "executor": "infra executor",
}


@dataclass
class Running:
    address: str
    executor: Executor


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[Running]:
    folder, address = tmp_path_factory.mktemp("bytes"), f"127.0.0.1:{free_port()}"
    lines = [f"token {hashlib.sha256(token.encode()).hexdigest()} {who}" for token, who in CALLERS.items()]
    (folder / "tokens").write_text("\n".join(lines))
    (folder / "tokens").chmod(0o600)
    (folder / "executor-token").write_text("executor")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDKV_")}
    arguments = ["--listen", address, "--tokens-file", str(folder / "tokens"), "--watermark", "0"]
    service = Process("block_manager_svc", arguments, folder / "service.log", own)
    try:
        service.wait_until_serving(address, "pagedkv.v1.ExecutorLinkService")
        here = f"127.0.0.1:{free_port()}"
        settings: dict[str, object] = {"model": str(tiny_llama_dir), "service": address, "listen": here}
        settings |= {"token_file": str(folder / "executor-token"), "model_cache": str(folder / "cache")}
        settings |= {"device": "cpu", "dtype": "float64", "block_size": SIZE, "blocks": BLOCKS, "host_blocks": HOST}
        executor = Executor(load_settings(settings))
        stopping = threading.Event()
        executor.start()
        compute = threading.Thread(target=executor.compute, args=(stopping.is_set,), daemon=True)
        compute.start()
        service.wait_until_serving(here, "")
        # The pools are cleared when the executor attaches; what is written before that is gone.
        cleared: Future[None] = Future()
        executor.follower.jobs.put(Call(lambda: None, cleared))
        cleared.result(30)
        yield Running(address, executor)
        stopping.set()
        executor.follower.jobs.put(None)
        compute.join(30)
        executor.close()
    finally:
        service.kill()


@dataclass
class Held:
    tokens: list[int]
    computed: int = 0
    away: bool = False


@dataclass
class Engine:
    """One tenant's, that writes K and V itself, into the pool that it shares with the executor."""

    name: str
    client: Client
    slots: Slots
    draw: random.Random
    held: dict[int, Held] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def stamps(self, tokens: list[int]) -> list[int]:
        """For each position a number that says whose it is and what comes before."""
        stamps, before = [], self.name.encode()
        for token in tokens:
            before = hashlib.sha256(before + token.to_bytes(4, "little")).digest()
            stamps.append(int.from_bytes(before[:7], "little"))
        return stamps

    def step(self) -> None:
        here = [i for i, held in self.held.items() if not held.away]
        ways = [self.create] if not here or len(self.held) < 4 else [self.append, self.append, self.append, self.fork]
        if len(self.held) > 2:
            ways += [self.truncate, self.free, self.swap, self.create]
        way = self.draw.choice(ways)
        try:
            way(here)
            self.done.add(way.__name__)
        except ResourceExhausted:
            self.free(list(self.held)[:1])

    def run(self, batch: Batch) -> BatchReply:
        reply = self.client.step_batch(batch)
        reply.raise_errors()
        return reply

    def write(self, reply: BatchReply, item: Item, sequences: list[int], lookahead: int) -> None:
        """Stamps what is new, and commits it."""
        columns, commit = reply[item], Batch()
        for i, sequence in enumerate(sequences):
            held = self.held[sequence]
            slots = columns.slots[columns.slot_indptr[i] : columns.slot_indptr[i + 1]].tolist()
            known = slots[: len(slots) - lookahead]
            stamps = self.stamps(held.tokens)
            for slot, stamp in zip(known, stamps[len(stamps) - len(known) :], strict=True):
                self.slots[slot] = stamp
            held.computed = len(held.tokens)
        commit.commit(sequences, [self.held[i].computed for i in sequences])
        self.run(commit)

    def create(self, _: list[int]) -> None:
        prompts = [[self.draw.randrange(2) for _ in range(self.draw.randint(1, 24))] for _ in range(2)]
        batch = Batch()
        item = batch.create(prompts, lookahead=2)
        reply = self.run(batch)
        ids = reply[item].sequences.tolist()
        self.held |= {sequence: Held(prompt) for sequence, prompt in zip(ids, prompts, strict=True)}
        self.write(reply, item, ids, 2)

    def append(self, here: list[int]) -> None:
        some = self.draw.sample(here, min(len(here), 3))
        if not some:
            return
        new = [[self.draw.randrange(2) for _ in range(self.draw.randint(1, 5))] for _ in some]
        batch = Batch()
        flat = [token for tokens in new for token in tokens]
        item = batch.append(some, flat, counts=[len(tokens) for tokens in new], lookahead=1)
        reply = self.run(batch)
        for sequence, tokens in zip(some, new, strict=True):
            self.held[sequence].tokens += tokens
        self.write(reply, item, some, 1)

    def fork(self, here: list[int]) -> None:
        parent = self.draw.choice(here)
        batch = Batch()
        item = batch.fork(parent, 2)
        for child in self.run(batch)[item].sequences.tolist():
            self.held[child] = Held(list(self.held[parent].tokens), self.held[parent].computed)

    def truncate(self, _: list[int]) -> None:
        sequence = self.draw.choice(list(self.held))
        length = self.draw.randint(1, len(self.held[sequence].tokens))
        batch = Batch()
        batch.truncate(sequence, length)
        self.run(batch)
        held = self.held[sequence]
        del held.tokens[length:]
        held.computed = min(held.computed, length)

    def swap(self, here: list[int]) -> None:
        out = self.draw.sample(here, min(len(here), 2))
        back = [i for i, held in self.held.items() if held.away][:2]
        batch = Batch()
        batch.swap(out, back)
        self.run(batch)
        for sequence in (*out, *back):
            self.held[sequence].away = sequence in out

    def free(self, some: list[int]) -> None:
        chosen = self.draw.sample(sorted(self.held), min(len(self.held), 2)) if len(some) != 1 else some
        batch = Batch()
        batch.free(chosen)
        self.run(batch)
        for sequence in chosen:
            del self.held[sequence]

    def verify(self) -> None:
        for table in self.client.tables(list(self.held)) if self.held else ():
            held, found = self.held[table.sequence], list[int]()
            for block in table.blocks:
                found += (
                    self.slots[block * SIZE : (block + 1) * SIZE]
                    if len(found) + SIZE <= held.computed
                    else (self.slots[block * SIZE : block * SIZE + max(0, held.computed - len(found))])
                )
            assert found == self.stamps(held.tokens[: held.computed]), (self.name, table.sequence)


def test_every_sequence_finds_exactly_its_own_bytes_whatever_others_do(running: Running) -> None:
    engine = running.executor.engine
    slots, draw = Slots(engine._pool, engine._host_pool), random.Random(11)
    with (
        ThreadPoolExecutor(1) as threads,
        Client(running.address, token="blue-engine") as blue,
        Client(running.address, token="red-engine") as red,
        Client(running.address, token="call") as caller,
        Client(running.address, token="audit") as auditor,
    ):
        engines = [Engine("blue", blue, slots, draw), Engine("red", red, slots, draw)]
        for turn in range(160):
            draw.choice(engines).step()
            if turn % 24 == 12:
                # Its blocks move into what the engines free meanwhile.
                prompt = [draw.randrange(9) for _ in range(9)]
                call = threads.submit(caller.complete, token_ids=prompt, max_tokens=16, ignore_eos=True, timeout=60)
                while not call.done():  # it waits where the engines hold the pool, and goes on when they free
                    draw.choice(engines).step()
                    auditor.compact(4)
                assert len(call.result().token_ids) == 16
            if turn % 8 == 0:
                for each in engines:
                    each.verify()
        for each in engines:
            each.verify()
            each.free(sorted(each.held)[:1] if len(each.held) == 1 else [])
        assert engines[0].done | engines[1].done >= {"create", "append", "fork", "truncate", "swap"}
        activity = auditor.pool().activity
        assert min(activity.copies_on_write, activity.swapped_out_blocks, activity.swapped_in_blocks) > 0
        assert auditor.audit().violations == ()
