"""The blocking client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv import _convert, _events
from pagedkv._access import Tls, access
from pagedkv._batch import Batch, BatchReply, Keys
from pagedkv._channel import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, OPTIONS, check_address
from pagedkv._errors import DeadlineExceeded, FailedPrecondition, Internal, Unavailable, from_rpc_error
from pagedkv._events import WatchUpdate
from pagedkv._interrupts import Apart, run_apart
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


class _Reading(Iterator[T]):
    """What one call streams: an iterator, and a context manager that ends the call.

    Whatever ends the reading early (leaving the `with` block or the loop, an exception, Ctrl-C, dropping it) cancels
    the call. After `cancel()` the iteration ends.
    """

    def __init__(self, call: Any, apart: Apart[Any], address: str, timeout: float | None) -> None:
        self._apart = apart
        self._call = call
        self._address = address
        self._timeout = timeout
        self._ready: deque[T] = deque()
        self._cancelled = False
        self._ended = False

    def cancel(self) -> None:
        """Ends the call; may come from another thread, may come twice, does nothing after the end."""
        if not self._ended:
            self._cancelled = True
            self._call.cancel()
        self._apart.close()

    def __next__(self) -> T:
        while not self._cancelled and not self._ended:
            if self._ready:
                return self._ready.popleft()
            self._receive()
        raise StopIteration

    def _receive(self) -> None:
        """Waits for the next message, or for the end."""
        try:
            response = self._apart.run(partial(next, self._call, None))
            if response is not None:
                self._ready.extend(self._take(response))
                return
            self._check_end()
        except grpc.RpcError as error:
            if not self._cancelled:
                self._ended = True
                raise from_rpc_error(error, self._address, self._timeout) from error
        except BaseException:  # Ctrl-C while waiting, or a message that breaks the contract
            self.cancel()
            raise
        else:
            self._ended = True

    def _take(self, response: Any) -> Iterable[T]:
        """What a message holds."""
        raise NotImplementedError

    def _check_end(self) -> None:
        """Raises Internal if the stream may not end here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Stream(_Reading[Piece]):
    """The tokens of one call, as they are sampled: an iterator, and a context manager that ends the call.

    The call runs from the moment that `Client.generate` returns. Whatever ends the reading early (leaving the `with`
    block or the loop, an exception, Ctrl-C, dropping the stream) cancels the call, and the service takes its blocks
    back. After `cancel()` the iteration ends, with `usage` None.
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


class Watch(_Reading[WatchUpdate]):
    """What `Client.watch` tells; without end, until it is left, cancelled, or refused."""

    def _take(self, response: Any) -> Iterable[WatchUpdate]:
        return (_events.update(response),)


class Client:
    """A connection to one pagedkv service.

    address: host:port, or one of gRPC's schemes such as unix:/path. Nothing is dialled before the first call.
    token:   who calls, where the service asks for it; sent with every call, over TLS or to this machine only ...
    trust_network: ... unless this says that nobody listens in between.
    tls:     `Tls(ca=…)` for a service with TLS, `cert` and `key` where it asks callers for a certificate; without it
             the connection is plain HTTP/2 (the service listens on loopback unless told otherwise).
             A token or TLS that is not given comes from PAGEDKV_TOKEN, PAGEDKV_TLS_CA, PAGEDKV_CLIENT_CERT and _KEY.
    timeout: seconds that a call other than `generate` and `complete` may take, unless it is given its own.

    May be used from several threads. Every call raises errors of the PagedKvError tree only: Unavailable when nobody
    answers at the address (within seconds, never a hang), DeadlineExceeded when its timeout passes, FailedPrecondition
    CLIENT_CLOSED after `close()`.
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
        self._channel = (
            grpc.insecure_channel(self.address, options=OPTIONS)
            if self._credentials is None
            else grpc.secure_channel(self.address, self._credentials, options=OPTIONS)
        )
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._block_manager: Any = block_manager_pb2_grpc.BlockManagerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        chat: Sequence[Mapping[str, str]] | None = None,
        token_ids: Iterable[int] | None = None,
        model: str = "",
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Starts generating, and returns the stream of tokens.

        prompt, chat, token_ids: exactly one. Text is tokenized by the service; chat is a list of {"role", "content"},
                                 rendered with the model's template; token ids are taken as they are.
        model:                   an id that `models()` gives; default: the one that is served.
        timeout:                 seconds for the whole call; None: as long as it takes.
        sampling:                see SamplingOptions.

        Raises InvalidArgument at once for what cannot be sent; all else is raised by the iteration.
        """
        request = _convert.generate_request(prompt, chat, token_ids, model, sampling)
        self._check_open()
        apart: Apart[Any] = Apart()
        call = apart.run(partial(self._generation.Generate, request, timeout=timeout, metadata=self._metadata))
        return Stream(call, apart, self.address, timeout)

    def complete(
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
        with self.generate(prompt, chat=chat, token_ids=token_ids, model=model, timeout=timeout, **sampling) as stream:
            pieces = list(stream)
        assert stream.usage is not None, "a stream that ends without an error has usage"
        return _convert.completion(pieces, stream.usage, sampling.get("n") or 1)

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """The models that the service can generate with; empty while no executor is attached."""
        return _convert.models(self._unary(self._generation.ListModels, generation_pb2.ListModelsRequest(), timeout))

    def pool(self, *, timeout: float | None = None) -> Pool:
        """Capacity and use of the pool, how much is shared, what the scheduler has done."""
        return _convert.pool(self._unary(self._block_manager.GetPool, block_manager_pb2.GetPoolRequest(), timeout))

    def sequences(self, *, timeout: float | None = None) -> Listing[SequenceInfo]:
        """The sequences that are alive, oldest first."""
        return _convert.sequences(
            self._unary(self._block_manager.ListSequences, block_manager_pb2.ListSequencesRequest(), timeout)
        )

    def tables(self, sequences: Iterable[int] = (), *, timeout: float | None = None) -> Listing[BlockTable]:
        """The block tables of these sequences (at most 4,096); of none named: of all that are alive.

        Raises NotFound SEQUENCE_NOT_FOUND when one of them is not alive.
        """
        return _convert.tables(
            self._unary(self._block_manager.GetBlockTables, _convert.tables_request(sequences), timeout)
        )

    def sequence(
        self, sequence: int, *, first: int = 0, upto: int = 0, timeout: float | None = None
    ) -> SequenceDetails:
        """One sequence in full; with the tokens at positions [first, upto), at most 262,144.

        Raises NotFound SEQUENCE_NOT_FOUND, InvalidArgument POSITION_OUT_OF_RANGE, PagedKvError TOKENS_PRIVATE.
        """
        request = _convert.sequence_request(sequence, first, upto)
        return _convert.sequence_details(sequence, self._unary(self._block_manager.GetSequence, request, timeout))

    def match(
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
        request = _convert.match_request(prompts, lookahead, adapter, extra_keys, window, sinks, generate)
        return _convert.matches(self._unary(self._block_manager.Match, request, timeout))

    def slots(
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
        request = _convert.slots_request(sequences, first, upto, table_revisions)
        return _convert.slots(self._unary(self._block_manager.GetBlockTables, request, timeout))

    def watch(
        self, *, blocks: bool = True, sequences: bool = True, tokens: bool = False, timeout: float | None = None
    ) -> Watch:
        """A snapshot of what is cached and which sequences there are, then every change: an iterator of updates.

        tokens: the tokens of stored blocks too. timeout: seconds for the whole; None: until it is left.
        The iteration raises Aborted RESYNC_NEEDED when it was read too slowly, POOL_RESET when the pool is another:
        forget what was told, and watch again.
        """
        request = block_manager_pb2.WatchEventsRequest(blocks=blocks, sequences=sequences, tokens=tokens)
        self._check_open()
        apart: Apart[Any] = Apart()
        call = apart.run(partial(self._block_manager.WatchEvents, request, timeout=timeout, metadata=self._metadata))
        return Watch(call, apart, self.address, timeout)

    def audit(self, *, timeout: float | None = None) -> Audit:
        """Checks every invariant of the page table; takes time proportional to the pool, and stalls steps meanwhile."""
        return _convert.audit(self._unary(self._block_manager.Audit, block_manager_pb2.AuditRequest(), timeout))

    def reset_cache(self, *, timeout: float | None = None) -> CacheReset:
        """Empties the prefix cache: what is cached now is not found again. Running calls go on undisturbed."""
        request = block_manager_pb2.ResetCacheRequest()
        return _convert.cache_reset(self._unary(self._block_manager.ResetCache, request, timeout))

    def resize(self, limit: int, *, timeout: float | None = None) -> Resized:
        """At most `limit` blocks are in use, cached or reserved from now on; cached ones are evicted down to it.

        Raises FailedPrecondition RESIZE_BELOW_USE, InvalidArgument LIMIT_OUT_OF_RANGE.
        """
        request = _convert.resize_request(limit)
        return _convert.resized(self._unary(self._block_manager.Resize, request, timeout))

    def set_quota(
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
        return _convert.quota_set(self._unary(self._block_manager.SetQuota, request, timeout))

    def compact(self, max_moves: int | None = None, *, timeout: float | None = None) -> Compacted:
        """Moves at most `max_moves` blocks (default 256, limit 4,096) of running calls to the low end of the pool.

        One step of copies; the calls go on. Again until `moved_blocks` is 0.
        Raises ResourceExhausted WINDOW_FULL: the executor is behind, try again soon.
        """
        request = _convert.compact_request(max_moves)
        return _convert.compacted(self._unary(self._block_manager.Compact, request, timeout))

    def step_batch(
        self,
        batch: Batch,
        *,
        request_id: str = "",
        atomic: bool = False,
        wait: bool = True,
        timeout: float | None = None,
    ) -> BatchReply:
        """Executes the items of a batch in order: for engines that bring their own model.

        An item that fails has its error in the reply, and the others are executed all the same.
        request_id: makes it safe to send the same batch again when no reply came: it is not executed twice. A new one
                    for each batch; kept for ten minutes.
        atomic:     all items or none: the first error is raised, with the item's number as numbers["failed_item"].
        wait:       return only when the copies and swaps of the batch are made.

        Raises ResourceExhausted WINDOW_FULL, Unavailable EXECUTOR_UNAVAILABLE: nothing was executed, try again.
        DeadlineExceeded: the batch may have been executed; send it again, if it has a request id.
        Aborted POOL_RESET: every sequence is gone.
        """
        request = _convert.step_batch_request(batch, request_id, atomic, wait)
        return _convert.batch_reply(self._unary(self._block_manager.StepBatch, request, timeout))

    def healthy(self, *, timeout: float | None = None) -> bool:
        """Whether the service answers, within the timeout, that it is SERVING: an executor is attached."""
        try:
            response = self._unary(self._health.Check, health_pb2.HealthCheckRequest(), timeout)
        except (Unavailable, DeadlineExceeded):
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Closes the connection; streams that are still open end with Cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: Callable[..., R], request: object, timeout: float | None) -> R:
        self._check_open()
        timeout = self.timeout if timeout is None else timeout
        try:
            return run_apart(partial(method, request, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address, timeout) from error

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPrecondition("CLIENT_CLOSED", f"this client of {self.address} was closed: make a new one")
