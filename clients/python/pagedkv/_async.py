"""The asyncio client: the calls of `Client`, awaited."""

# ruff: noqa: ASYNC109 - a timeout here is the deadline of the rpc, which the service sees too

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv import _convert, _events
from pagedkv._access import Tls, access
from pagedkv._batch import Batch, BatchReply, Keys
from pagedkv._channel import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, OPTIONS, check_address
from pagedkv._errors import Cancelled, DeadlineExceeded, FailedPrecondition, Internal, Unavailable, from_rpc_error
from pagedkv._events import WatchUpdate
from pagedkv._types import (
    Audit,
    BlockTable,
    CacheReset,
    Compacted,
    Completion,
    Listing,
    Match,
    Model,
    Piece,
    Pool,
    QuotaSet,
    Resized,
    SamplingOptions,
    SequenceDetails,
    SequenceInfo,
    Slots,
    Usage,
)
from pagedkv.v1 import block_manager_pb2, block_manager_pb2_grpc, generation_pb2, generation_pb2_grpc

R = TypeVar("R")
T = TypeVar("T")


class _Reading(AsyncIterator[T]):
    """What one call streams: an async iterator, and an async context manager that ends the call.

    Whatever ends the reading early (leaving the `async with` block or the loop, an exception, the task's cancellation,
    dropping it) cancels the call. After `cancel()` the iteration ends.
    """

    def __init__(self, call: Any, address: str, timeout: float | None) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._timeout = timeout
        self._ready: deque[T] = deque()
        self._cancelled = False
        self._ended = False

    def cancel(self) -> None:
        """Ends the call; may come twice, does nothing after the end."""
        if not self._ended:
            self._cancelled = True
            self._call.cancel()

    async def __anext__(self) -> T:
        while not self._cancelled and not self._ended:
            if self._ready:
                return self._ready.popleft()
            await self._receive()
        raise StopAsyncIteration

    async def _receive(self) -> None:
        """Waits for the next message, or for the end."""
        try:
            response = await self._call.read()
            if response is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._ready.extend(self._take(response))
                return
            self._check_end()
        except grpc.RpcError as error:
            if not self._cancelled:
                self._ended = True
                raise from_rpc_error(error, self._address, self._timeout) from error
        except asyncio.CancelledError as error:
            # grpc.aio says this also when it was the call that was cancelled, not the task that reads it.
            if _task_is_cancelled():
                self.cancel()
                raise
            if not self._cancelled:
                self._ended = True
                raise _closed_meanwhile(self._address) from error
        except BaseException:  # a message that breaks the contract
            self.cancel()
            raise
        else:
            self._ended = True

    def _take(self, response: Any) -> Iterable[T]:
        """What a message holds."""
        raise NotImplementedError

    def _check_end(self) -> None:
        """Raises Internal if the stream may not end here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # With its loop gone the call is gone too, and can no longer be cancelled.
        if not self._loop.is_closed():
            self.cancel()


class AsyncStream(_Reading[Piece]):
    """The tokens of one call, as they are sampled: an async iterator, and an async context manager that ends the call.

    The call runs from the moment that `AsyncClient.generate` returns. Whatever ends the reading early (leaving the
    `async with` block or the loop, an exception, the task's cancellation, dropping the stream) cancels the call, and
    the service takes its blocks back. After `cancel()` the iteration ends, with `usage` None.
    """

    _usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        """What the call took; None before the stream has come to its end."""
        return self._usage if self._ended else None

    def _take(self, response: Any) -> Iterable[Piece]:
        self._usage = _convert.usage(response) or self._usage
        return _convert.pieces(response)

    def _check_end(self) -> None:
        if self._usage is None:
            raise Internal("STREAM_INCOMPLETE", "the stream ended without usage")


class AsyncWatch(_Reading[WatchUpdate]):
    """What `AsyncClient.watch` tells; without end, until it is left, cancelled, or refused."""

    def _take(self, response: Any) -> Iterable[WatchUpdate]:
        return (_events.update(response),)


class AsyncClient:
    """A connection to one pagedkv service, for asyncio; see `Client` for the arguments and errors.

    Belongs to the event loop of its first call; may be made outside of one.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        trust_network: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.address = check_address(address)
        self.timeout = timeout
        self._metadata, self._credentials = access(token, tls, address, trust_network=trust_network)
        self._closed = False
        self._channel: grpc.aio.Channel | None = None
        self._generation: Any = None
        self._block_manager: Any = None
        self._health: Any = None

    def generate(
        self,
        prompt: str | None = None,
        *,
        chat: Sequence[Mapping[str, str]] | None = None,
        token_ids: Iterable[int] | None = None,
        model: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Starts generating, and returns the stream of tokens, for `async for`; not awaited itself.

        See `Client.generate` for the arguments.
        """
        request = _convert.generate_request(prompt, chat, token_ids, model, sampling)
        self._connect()
        return AsyncStream(
            self._generation.Generate(request, timeout=timeout, metadata=self._metadata), self.address, timeout
        )

    async def complete(
        self,
        prompt: str | None = None,
        *,
        chat: Sequence[Mapping[str, str]] | None = None,
        token_ids: Iterable[int] | None = None,
        model: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Generates to the end, and returns all samples whole. Takes what `generate` takes."""
        async with self.generate(
            prompt, chat=chat, token_ids=token_ids, model=model, timeout=timeout, **sampling
        ) as stream:
            pieces = [piece async for piece in stream]
        assert stream.usage is not None, "a stream that ends without an error has usage"
        return _convert.completion(pieces, stream.usage, sampling.get("n") or 1)

    async def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the service can generate with; empty while no executor is attached."""
        self._connect()
        return _convert.models(
            await self._unary(self._generation.ListModels, generation_pb2.ListModelsRequest(), timeout)
        )

    async def pool(self, *, timeout: float | None = None) -> Pool:
        """Capacity and use of the pool, how much is shared, what the scheduler has done."""
        self._connect()
        return _convert.pool(
            await self._unary(self._block_manager.GetPool, block_manager_pb2.GetPoolRequest(), timeout)
        )

    async def sequences(self, *, timeout: float | None = None) -> Listing[SequenceInfo]:
        """The sequences that are alive, oldest first."""
        self._connect()
        return _convert.sequences(
            await self._unary(self._block_manager.ListSequences, block_manager_pb2.ListSequencesRequest(), timeout)
        )

    async def tables(self, sequences: Iterable[int] = (), *, timeout: float | None = None) -> Listing[BlockTable]:
        """The block tables of these sequences (at most 4,096); of none named: of all that are alive.

        Raises NotFound SEQUENCE_NOT_FOUND when one of them is not alive.
        """
        self._connect()
        return _convert.tables(
            await self._unary(self._block_manager.GetBlockTables, _convert.tables_request(sequences), timeout)
        )

    async def sequence(
        self, sequence: int, *, first: int = 0, upto: int = 0, timeout: float | None = None
    ) -> SequenceDetails:
        """One sequence in full; with the tokens at positions [first, upto), at most 262,144.

        Raises NotFound SEQUENCE_NOT_FOUND, InvalidArgument POSITION_OUT_OF_RANGE, PagedKvError TOKENS_PRIVATE.
        """
        self._connect()
        request = _convert.sequence_request(sequence, first, upto)
        return _convert.sequence_details(sequence, await self._unary(self._block_manager.GetSequence, request, timeout))

    async def match(
        self,
        prompts: Iterable[Iterable[int]],
        *,
        lookahead: int | Iterable[int] = 0,
        adapter: str = "",
        extra_keys: Mapping[int, Keys] | None = None,
        window: int = 0,
        sinks: int = 0,
        generate: bool = False,
        timeout: float | None = None,
    ) -> Listing[Match]:
        """What of each prompt is cached now, and whether it would be let in. Takes and promises nothing.

        Takes what `Batch.create` takes; at most 1,024 prompts. generate: of what calls of `generate` have cached,
        which is apart from what engines have.
        """
        self._connect()
        request = _convert.match_request(prompts, lookahead, adapter, extra_keys, window, sinks, generate)
        return _convert.matches(await self._unary(self._block_manager.Match, request, timeout))

    async def slots(
        self,
        sequences: Iterable[int],
        first: Iterable[int],
        upto: Iterable[int],
        *,
        table_revisions: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> Slots:
        """The slots of positions [first[i], upto[i]) of each sequence; at most 1,048,576 in all.

        table_revisions: raises FailedPrecondition TABLE_REVISION_STALE unless the tables are still of these.
        Raises InvalidArgument POSITION_NOT_WRITABLE, FailedPrecondition SEQUENCE_SWAPPED_OUT.
        """
        self._connect()
        request = _convert.slots_request(sequences, first, upto, table_revisions)
        return _convert.slots(await self._unary(self._block_manager.GetBlockTables, request, timeout))

    def watch(
        self, *, blocks: bool = True, sequences: bool = True, tokens: bool = False, timeout: float | None = None
    ) -> AsyncWatch:
        """A snapshot of what is cached and which sequences there are, then every change: an iterator of updates.

        tokens: the tokens of stored blocks too. timeout: seconds for the whole; None: until it is left.
        The iteration raises Aborted RESYNC_NEEDED when it was read too slowly, POOL_RESET when the pool is another:
        forget what was told, and watch again.
        """
        request = block_manager_pb2.WatchEventsRequest(blocks=blocks, sequences=sequences, tokens=tokens)
        self._connect()
        call = self._block_manager.WatchEvents(request, timeout=timeout, metadata=self._metadata)
        return AsyncWatch(call, self.address, timeout)

    async def audit(self, *, timeout: float | None = None) -> Audit:
        """Checks every invariant of the page table; takes time proportional to the pool, and stalls steps meanwhile."""
        self._connect()
        return _convert.audit(await self._unary(self._block_manager.Audit, block_manager_pb2.AuditRequest(), timeout))

    async def reset_cache(self, *, timeout: float | None = None) -> CacheReset:
        """Empties the prefix cache: what is cached now is not found again. Running calls go on undisturbed."""
        self._connect()
        request = block_manager_pb2.ResetCacheRequest()
        return _convert.cache_reset(await self._unary(self._block_manager.ResetCache, request, timeout))

    async def resize(self, limit: int, *, timeout: float | None = None) -> Resized:
        """At most `limit` blocks are in use, cached or reserved from now on; cached ones are evicted down to it.

        Raises FailedPrecondition RESIZE_BELOW_USE, InvalidArgument LIMIT_OUT_OF_RANGE.
        """
        request = _convert.resize_request(limit)
        self._connect()
        return _convert.resized(await self._unary(self._block_manager.Resize, request, timeout))

    async def set_quota(
        self,
        tenant: str,
        *,
        floor: int = 0,
        quota: int | None = None,
        host_floor: int = 0,
        host_quota: int | None = None,
        timeout: float | None = None,
    ) -> QuotaSet:
        """What a tenant is guaranteed (floor), and the most that it may be charged for (quota; None: no bound).

        In blocks of the device, and slots of the host. Cached blocks above the quota are evicted at once.
        Raises NotFound TENANT_UNKNOWN, InvalidArgument QUOTA_OUT_OF_RANGE, FailedPrecondition FLOORS_EXCEED_POOL.
        """
        request = _convert.quota_request(tenant, floor, quota, host_floor, host_quota)
        self._connect()
        return _convert.quota_set(await self._unary(self._block_manager.SetQuota, request, timeout))

    async def compact(self, max_moves: int | None = None, *, timeout: float | None = None) -> Compacted:
        """Moves at most `max_moves` blocks (default 256, limit 4,096) of running calls to the low end of the pool.

        One step of copies; the calls go on. Again until `moved_blocks` is 0.
        Raises ResourceExhausted WINDOW_FULL: the executor is behind, try again soon.
        """
        request = _convert.compact_request(max_moves)
        self._connect()
        return _convert.compacted(await self._unary(self._block_manager.Compact, request, timeout))

    async def step_batch(
        self,
        batch: Batch,
        *,
        request_id: str = "",
        atomic: bool = False,
        wait: bool = True,
        timeout: float | None = None,
    ) -> BatchReply:
        """Executes the items of a batch in order; see `Client.step_batch`."""
        self._connect()
        request = _convert.step_batch_request(batch, request_id, atomic, wait)
        return _convert.batch_reply(await self._unary(self._block_manager.StepBatch, request, timeout))

    async def healthy(self, *, timeout: float | None = None) -> bool:
        """Whether the service answers, within the timeout, that it is SERVING: an executor is attached."""
        self._connect()
        try:
            response = await self._unary(self._health.Check, health_pb2.HealthCheckRequest(), timeout)
        except (Unavailable, DeadlineExceeded):
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Closes the connection; streams that are still open end with Cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _connect(self) -> None:
        """Makes the channel on first use: grpc.aio ties it to the running loop. Without one: RuntimeError."""
        asyncio.get_running_loop()
        if self._closed:
            raise FailedPrecondition("CLIENT_CLOSED", f"this client of {self.address} was closed: make a new one")
        if self._channel is None:
            self._channel = (
                grpc.aio.insecure_channel(self.address, options=OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(self.address, self._credentials, options=OPTIONS)
            )
            self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
            self._block_manager = block_manager_pb2_grpc.BlockManagerServiceStub(self._channel)  # type: ignore[no-untyped-call]
            self._health = health_pb2_grpc.HealthStub(self._channel)

    async def _unary(self, method: Callable[..., Awaitable[R]], request: object, timeout: float | None) -> R:
        timeout = self.timeout if timeout is None else timeout
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address, timeout) from error
        except asyncio.CancelledError as error:
            if _task_is_cancelled():
                raise
            raise _closed_meanwhile(self.address) from error


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _closed_meanwhile(address: str) -> Cancelled:
    return Cancelled("CLIENT_CLOSED", f"the client of {address} was closed during the call")
