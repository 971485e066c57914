"""An engine of its own through real processes: its sequences beside calls, its copies as the pool really has them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.processes import Stack

from pagedkv import Batch, Client, InvalidArgument, NotFound, SequenceState
from pagedkv.v1 import executor_pb2, executor_pb2_grpc

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def running(module_stack: Callable[..., Stack], tiny_llama_dir: Path) -> Stack:
    flags = ("--host-blocks", "8")
    return module_stack(model=tiny_llama_dir, blocks=64, block_size=BLOCK_SIZE, dtype="float64", executor_flags=flags)


@pytest.fixture
def client(running: Stack) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client
        assert client.audit().violations == ()
        assert len(client.sequences()) == 0


def read_k(running: Stack, client: Client, after_step: int, *blocks: int) -> np.ndarray:
    """K of layer 0 of whole blocks, once the executor has completed that step."""
    header = client.pool().header
    slots = [block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)]
    request = executor_pb2.ReadKvRequest(
        service_id=header.service_id, epoch=header.epoch, after_step=after_step, layer=0, slots=slots
    )
    with grpc.insecure_channel(running.executor_address) as channel:
        pieces = list(executor_pb2_grpc.ExecutorServiceStub(channel).ReadKv(request, timeout=30))
    return np.frombuffer(b"".join(piece.k for piece in pieces), "<f8").reshape(len(blocks), BLOCK_SIZE, -1)


def leave_numbers_in_the_pool(client: Client, tokens: int) -> None:
    """A call computes K/V into the lowest blocks; then these are free, with what was written."""
    client.complete(token_ids=range(10, 10 + tokens), max_tokens=1)
    client.reset_cache()


def test_a_written_block_that_is_shared_is_copied_and_the_copy_is_true(running: Stack, client: Client) -> None:
    leave_numbers_in_the_pool(client, 6)
    batch = Batch()
    [parent] = made = batch.create([[1, 2, 3, 4, 5, 6]])
    batch.commit(made, [6])
    children = batch.fork(parent, 2)
    grown = batch.append([children[1], parent, children[0]], [7, 8, 9])
    reply = client.step_batch(batch)
    reply.raise_errors()

    # Three holders of the partly filled block 2, all of which append: two copies, and the last writes in place.
    copies = reply[grown]
    assert copies.copy_src.tolist() == [2, 2]
    assert copies.copy_dst.tolist() == [3, 4]
    assert copies.slots.tolist() == [3 * 4 + 2, 4 * 4 + 2, 2 * 4 + 2]
    assert reply.step_id > 0
    source, first, second = read_k(running, client, reply.step_id, 2, 3, 4)
    assert np.isfinite(source[:2]).all()
    assert np.array_equal(source, first, equal_nan=True)
    assert np.array_equal(source, second, equal_nan=True)

    ids = [*reply[made].sequences, *reply[children].sequences]
    tables = client.tables(ids)
    assert [table.blocks for table in tables] == [(1, 4), (1, 2), (1, 3)]
    assert [table.revision for table in tables] == [
        dict(zip(reply.table_sequence, reply.table_revision, strict=True))[sequence] for sequence in ids
    ]
    assert {sequence.state for sequence in client.sequences()} == {SequenceState.ENGINE}
    free(client, ids)


def free(client: Client, ids: list[int]) -> None:
    batch = Batch()
    batch.free(ids)
    client.step_batch(batch).raise_errors()


def test_tokens_are_appended_truncated_and_found_by_the_next(client: Client) -> None:
    prompt = list(range(20, 31))
    batch = Batch()
    made = batch.create([prompt], lookahead=3, adapter="v1")
    batch.commit(made, [11])
    drafts = batch.append(made, [1, 2, 3], counts=[3])
    batch.truncate(made, [12])
    batch.commit(made, [12])
    reply = client.step_batch(batch)
    reply.raise_errors()
    assert reply.step_id == 0  # nothing was shared, nothing to copy
    assert len(reply[made].slots) == 14
    assert reply[drafts].slots == reply[made].slots[11:]  # where the lookahead had them
    [sequence] = client.sequences()
    assert (sequence.tokens, sequence.computed, sequence.blocks) == (12, 12, 3)
    free(client, [sequence.sequence])

    again = Batch()
    found = again.create([[*prompt, 1, 99]], adapter="v1")
    other = again.create([[*prompt, 1, 99]], adapter="v2")
    reply = client.step_batch(again)
    assert (reply[found].cached.tolist(), reply[other].cached.tolist()) == ([12], [0])
    free(client, [*reply[found].sequences, *reply[other].sequences])


def test_what_was_swapped_out_comes_back_as_it_was(running: Stack, client: Client) -> None:
    leave_numbers_in_the_pool(client, 8)
    batch = Batch()
    made = batch.create([[1] * 8])
    batch.commit(made, [8])
    reply = client.step_batch(batch)
    [sequence] = reply[made].sequences
    before = read_k(running, client, reply.step_id, *client.tables([sequence])[0].blocks)

    batch = Batch()
    out = batch.swap(out=sequence)
    other = batch.create([[2] * 12])  # where it was
    batch.commit(other, [12])
    child = batch.fork(other)
    batch.append(child, [3])
    back = batch.swap(back=sequence)
    reply = client.step_batch(batch)
    reply.raise_errors()
    assert (reply[out].swapped_blocks, reply[back].swapped_blocks) == (2, 2)
    table = client.tables([sequence])[0]
    assert table.blocks == (5, 6)
    assert np.array_equal(read_k(running, client, reply.step_id, *table.blocks), before, equal_nan=True)
    assert np.isfinite(before).any()
    free(client, [sequence, *reply[other].sequences, *reply[child].sequences])
    client.reset_cache()


def test_a_batch_that_is_sent_again_is_executed_once(client: Client) -> None:
    batch = Batch()
    made = batch.create([[1, 2, 3]])
    name = uuid.uuid4().hex
    first, again = (client.step_batch(batch, request_id=name) for _ in range(2))
    assert (first.replayed, again.replayed) == (False, True)
    assert first[made].sequences == again[made].sequences
    assert len(client.sequences()) == 1
    free(client, first[made].sequences.tolist())
    end = Batch()
    ended = end.free(first[made].sequences)
    with pytest.raises(NotFound) as caught:
        _ = client.step_batch(end)[ended]
    assert caught.value.reason == "SEQUENCE_NOT_FOUND"


def test_an_atomic_batch_that_fails_leaves_no_trace(client: Client) -> None:
    before = client.pool().device
    batch = Batch()
    made = batch.create([[1] * 9], lookahead=20)
    batch.commit(made, [9])
    batch.append(batch.fork(made), [2])
    batch.truncate(made, [10])
    with pytest.raises(InvalidArgument) as caught:
        client.step_batch(batch, atomic=True)
    assert (caught.value.reason, caught.value.numbers["failed_item"]) == ("LENGTH_OUT_OF_RANGE", 4)
    assert client.pool().device == before


def test_copies_go_on_while_calls_compute(running: Stack, client: Client) -> None:
    """The steps of both are one stream: the executor applies them in order, and each call gets its tokens."""
    prompt = list(range(40, 60))
    alone = client.complete(token_ids=prompt, max_tokens=24, ignore_eos=True).token_ids
    with client.generate(token_ids=prompt, max_tokens=24, ignore_eos=True) as stream:
        steps = 0
        tokens = []
        for piece in stream:
            tokens.append(piece.token_id)
            batch = Batch()
            parent = batch.create([[1, 2]])
            batch.commit(parent, [2])
            child = batch.fork(parent)
            batch.append(child, [3])
            batch.free([*parent, *child])
            reply = client.step_batch(batch)
            reply.raise_errors()
            steps += reply.step_id > 0
    assert tuple(tokens) == alone
    assert steps == 24
    client.reset_cache()


def test_calls_go_on_while_their_blocks_move(client: Client) -> None:
    prompt = list(range(60, 82))
    alone = client.complete(token_ids=prompt, max_tokens=24, ignore_eos=True).token_ids
    client.reset_cache()
    hold = Batch()
    held = hold.create([[1] * 12, [2] * 12, [3] * 12])
    reply = client.step_batch(hold)
    ids = reply[held].sequences.tolist()
    moved = 0
    tokens = []
    with client.generate(token_ids=prompt, max_tokens=24, ignore_eos=True, n=1) as stream:
        for piece in stream:
            tokens.append(piece.token_id)
            if len(tokens) % 3 == 0 and ids:  # three more blocks below are free
                free(client, [ids.pop(0)])
            moved += client.compact(2).moved_blocks
    assert tuple(tokens) == alone
    assert moved >= 6
    assert client.pool().activity.swapped_out_blocks == client.pool().activity.swapped_in_blocks
    client.reset_cache()
