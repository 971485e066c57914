"""Between the messages of pagedkv.v1 and the SDK's own values: protobuf stops here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from pagedkv._batch import Batch, BatchReply, ItemResult, Keys, column_of
from pagedkv._errors import Internal, InvalidArgument, PagedKvError, from_item_error
from pagedkv._types import (
    Activity,
    Admission,
    Audit,
    BlockStates,
    BlockTable,
    CacheReset,
    Compacted,
    Completion,
    FinishReason,
    Header,
    Layout,
    Listing,
    Match,
    Model,
    Piece,
    Pool,
    QuotaSet,
    Resized,
    Sample,
    SamplingOptions,
    SequenceDetails,
    SequenceInfo,
    SequenceState,
    Sharing,
    Slots,
    TenantUsage,
    TokenLogprob,
    Usage,
)
from pagedkv.v1 import block_manager_pb2, generation_pb2

_FINISH_REASONS: dict[int, FinishReason | None] = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_SEQUENCE_STATES: dict[int, SequenceState] = {
    block_manager_pb2.SEQUENCE_STATE_WAITING: SequenceState.WAITING,
    block_manager_pb2.SEQUENCE_STATE_RUNNING: SequenceState.RUNNING,
    block_manager_pb2.SEQUENCE_STATE_ENGINE: SequenceState.ENGINE,
}


# --- requests ---------------------------------------------------------------------------------------------------------


def generate_request(
    prompt: str | None,
    chat: Sequence[Mapping[str, str]] | None,
    token_ids: Iterable[int] | None,
    model: str,
    sampling: SamplingOptions,
) -> generation_pb2.GenerateRequest:
    """The request for exactly one of prompt, chat and token_ids.

    Raises InvalidArgument for what cannot be put in a message at all; ranges are the service's to check.
    """
    if sum(given is not None for given in (prompt, chat, token_ids)) != 1:
        raise InvalidArgument("PROMPT_MISSING", "give exactly one of prompt, chat and token_ids")
    request = generation_pb2.GenerateRequest(sampling=_sampling_params(sampling))
    try:
        request.model = model
        if prompt is not None:
            request.text = prompt
        elif chat is not None:
            request.chat.messages.extend(_chat_message(message) for message in chat)
            request.chat.SetInParent()
    except UnicodeError as error:  # lone surrogates, as the shell's bytes become when they are no UTF-8
        raise InvalidArgument("TEXT_NOT_UNICODE", "the prompt has characters that are no Unicode text") from error
    if token_ids is not None:
        ids = list(token_ids)
        try:
            request.token_ids.ids.extend(ids)
        except ValueError as error:
            wrong = next(token for token in ids if not 0 <= token < 2**32)
            raise InvalidArgument(
                "TOKEN_OUT_OF_RANGE", f"{wrong} is no token id", numbers={"token_id": wrong}
            ) from error
        request.token_ids.SetInParent()
    return request


def _chat_message(message: Mapping[str, str]) -> generation_pb2.ChatMessage:
    if set(message) != {"role", "content"}:
        raise InvalidArgument(
            "CHAT_MESSAGE_INVALID",
            f"a chat message has role and content, this one has {', '.join(message) or 'neither'}",
        )
    return generation_pb2.ChatMessage(role=message["role"], content=message["content"])


def _sampling_params(sampling: SamplingOptions) -> generation_pb2.SamplingParams:
    if unknown := sampling.keys() - SamplingOptions.__optional_keys__:
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
    params = generation_pb2.SamplingParams()
    for name, value in sampling.items():
        if value is None:
            continue
        try:
            if name == "stop":
                params.stop.extend([value] if isinstance(value, str) else value)  # type: ignore[arg-type]
            elif name == "stop_token_ids":
                params.stop_token_ids.extend(value)  # type: ignore[arg-type]
            else:
                setattr(params, name, value)
        except ValueError as error:  # negative or too wide for the field; UnicodeError is one too
            raise InvalidArgument(
                "PARAMETER_OUT_OF_RANGE", f"{name} cannot be {value!r}", numbers={name: str(value)}
            ) from error
    return params


def tables_request(sequences: Iterable[int]) -> block_manager_pb2.GetBlockTablesRequest:
    request = block_manager_pb2.GetBlockTablesRequest()
    for sequence in sequences:
        try:
            request.sequence.append(sequence)
        except ValueError as error:
            raise InvalidArgument(
                "SEQUENCE_OUT_OF_RANGE", f"{sequence} is no sequence id", numbers={"sequence": sequence}
            ) from error
    return request


# --- generation -------------------------------------------------------------------------------------------------------


def pieces(response: generation_pb2.GenerateResponse) -> list[Piece]:
    """The rows of one message. Raises Internal when its columns do not fit together."""
    rows = len(response.token_id)
    width = len(response.top_token_id) // rows if rows else 0
    columns_fit = (
        len(response.sample) == len(response.text) == len(response.finish_reason) == rows
        and len(response.logprob) in (0, rows)
        and len(response.top_token_id) == len(response.top_logprob) == width * rows
    )
    if not columns_fit:
        raise Internal("REPLY_INVALID", f"the columns of a message of {rows} rows differ in length")
    top = [TokenLogprob(*pair) for pair in zip(response.top_token_id, response.top_logprob, strict=True)]
    return [
        Piece(
            sample=response.sample[row],
            token_id=response.token_id[row],
            text=response.text[row],
            finish_reason=_FINISH_REASONS.get(response.finish_reason[row], FinishReason.UNKNOWN),
            logprob=response.logprob[row] if response.logprob else None,
            top_logprobs=tuple(top[row * width : (row + 1) * width]),
        )
        for row in range(rows)
    ]


def usage(response: generation_pb2.GenerateResponse) -> Usage | None:
    if not response.HasField("usage"):
        return None
    message = response.usage
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
        preemptions=message.preemptions,
        seed=message.seed,
    )


def completion(stream: Iterable[Piece], usage: Usage, n: int) -> Completion:
    """The pieces of a stream that came to its end, put together by sample.

    Raises Internal when one of the `n` samples is missing or has no finish reason.
    """
    by_sample: dict[int, list[Piece]] = {}
    for piece in stream:
        by_sample.setdefault(piece.sample, []).append(piece)
    if sorted(by_sample) != list(range(n)):
        raise Internal("STREAM_INCOMPLETE", f"of {n} samples the stream had {sorted(by_sample)}")
    return Completion(samples=tuple(_sample(by_sample[sample]) for sample in range(n)), usage=usage)


def _sample(pieces: list[Piece]) -> Sample:
    finish_reason = pieces[-1].finish_reason
    if finish_reason is None:
        raise Internal("STREAM_INCOMPLETE", f"the stream ended before sample {pieces[-1].sample} had")
    return Sample(
        sample=pieces[-1].sample,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(piece.token_id for piece in pieces),
        finish_reason=finish_reason,
        logprobs=tuple(piece.logprob for piece in pieces if piece.logprob is not None),
        top_logprobs=tuple(piece.top_logprobs for piece in pieces if piece.top_logprobs),
    )


def models(response: generation_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            id=model.id,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=tuple(model.eos_token_ids),
            accepts_text=model.accepts_text,
            accepts_chat=model.accepts_chat,
        )
        for model in response.models
    )


# --- the page table ---------------------------------------------------------------------------------------------------


def _header(header: block_manager_pb2.ReplyHeader) -> Header:
    return Header(service_id=header.service_id, epoch=header.epoch, revision=header.revision)


def _block_states(states: block_manager_pb2.BlockStates) -> BlockStates:
    return BlockStates(
        null=states.null,
        free=states.free,
        reserved=states.reserved,
        active=states.active,
        sealed=states.sealed,
        cached=states.cached,
        quarantined=states.quarantined,
    )


def pool(response: block_manager_pb2.GetPoolResponse) -> Pool:
    sharing, activity = response.sharing, response.activity
    return Pool(
        header=_header(response.header),
        block_size=response.block_size,
        block_bytes=response.block_bytes,
        device=_block_states(response.device),
        host=_block_states(response.host),
        sharing=Sharing(
            table_entries=sharing.table_entries,
            referenced_blocks=sharing.referenced_blocks,
            shared_blocks=sharing.shared_blocks,
            peak_table_entries=sharing.peak_table_entries,
            peak_referenced_blocks=sharing.peak_referenced_blocks,
            peak_shared_blocks=sharing.peak_shared_blocks,
        ),
        activity=Activity(
            steps=activity.steps,
            prompt_tokens=activity.prompt_tokens,
            cached_tokens=activity.cached_tokens,
            computed_tokens=activity.computed_tokens,
            sampled_tokens=activity.sampled_tokens,
            copies_on_write=activity.copies_on_write,
            evicted_blocks=activity.evicted_blocks,
            preemptions=activity.preemptions,
            step_us=activity.step_us,
            executor_us=activity.executor_us,
            running=activity.running,
            waiting=activity.waiting,
            steps_in_flight=activity.steps_in_flight,
            swapped_out_blocks=activity.swapped_out_blocks,
            swapped_in_blocks=activity.swapped_in_blocks,
        ),
        limit=response.limit,
        watermark=response.watermark,
        layout=Layout(
            free_runs=response.layout.free_runs,
            largest_free_run=response.layout.largest_free_run,
            highest_used_block=response.layout.highest_used_block,
        ),
        tenants=tuple(map(_tenant_usage, response.tenants)),
    )


def _tenant_usage(usage: block_manager_pb2.TenantUsage) -> TenantUsage:
    return TenantUsage(
        tenant=usage.tenant,
        charged=usage.charged,
        cached=usage.cached,
        reserved=usage.reserved,
        host=usage.host,
        floor=usage.floor,
        quota=usage.quota if usage.HasField("quota") else None,
        host_floor=usage.host_floor,
        host_quota=usage.host_quota if usage.HasField("host_quota") else None,
    )


def sequences(response: block_manager_pb2.ListSequencesResponse) -> Listing[SequenceInfo]:
    columns = (response.tokens, response.computed, response.blocks, response.shared_blocks, response.state)
    if any(len(column) != len(response.sequence) for column in columns):
        raise Internal("REPLY_INVALID", f"the columns of {len(response.sequence)} sequences differ in length")
    return Listing(
        header=_header(response.header),
        items=tuple(
            SequenceInfo(
                sequence=sequence,
                tokens=response.tokens[row],
                computed=response.computed[row],
                blocks=response.blocks[row],
                shared_blocks=response.shared_blocks[row],
                state=_SEQUENCE_STATES.get(response.state[row], SequenceState.UNKNOWN),
            )
            for row, sequence in enumerate(response.sequence)
        ),
    )


def tables(response: block_manager_pb2.GetBlockTablesResponse) -> Listing[BlockTable]:
    rows, indptr = len(response.sequence), response.indptr
    tables_fit = (
        len(indptr) == rows + 1
        and len(response.last_page_len) == len(response.table_revision) == rows
        and len(response.indices) == len(response.refcount) == indptr[-1]
    )
    # A reply about no table may leave out the CSR's single 0.
    if not tables_fit and (rows or response.indices):
        raise Internal("REPLY_INVALID", f"the block tables of {rows} sequences do not fit their indptr")
    return Listing(
        header=_header(response.header),
        items=tuple(
            BlockTable(
                sequence=sequence,
                block_size=response.block_size,
                blocks=tuple(response.indices[indptr[row] : indptr[row + 1]]),
                refcounts=tuple(response.refcount[indptr[row] : indptr[row + 1]]),
                last_page_len=response.last_page_len[row],
                revision=response.table_revision[row],
            )
            for row, sequence in enumerate(response.sequence)
        ),
    )


def slots_request(
    sequences: Iterable[int], first: Iterable[int], upto: Iterable[int], table_revisions: Iterable[int] | None
) -> block_manager_pb2.GetBlockTablesRequest:
    request = tables_request(sequences)
    for name, values in (("first", first), ("upto", upto)):
        getattr(request, name).extend(_count(value, name, 0) for value in values)
    request.table_revision.extend(table_revisions or ())
    return request


def slots(response: block_manager_pb2.GetBlockTablesResponse) -> Slots:
    indptr = tuple(response.slot_indptr)
    if len(indptr) != len(response.sequence) + 1 or indptr[-1] != len(response.slots):
        raise Internal("REPLY_INVALID", f"the slots of {len(response.sequence)} sequences do not fit their indptr")
    return Slots(_header(response.header), indptr, tuple(response.slots), tuple(response.table_revision))


def sequence_request(sequence: int, first: int, upto: int) -> block_manager_pb2.GetSequenceRequest:
    if not 0 <= sequence < 1 << 64:
        why = f"no sequence has the id {sequence}"
        raise InvalidArgument("VALUE_OUT_OF_RANGE", why, numbers={"sequence": sequence})
    return block_manager_pb2.GetSequenceRequest(
        sequence=sequence, first=_count(first, "first", 0), upto=_count(upto, "upto", 0)
    )


def sequence_details(sequence: int, response: block_manager_pb2.GetSequenceResponse) -> SequenceDetails:
    return SequenceDetails(
        header=_header(response.header),
        sequence=sequence,
        state=_SEQUENCE_STATES.get(response.state, SequenceState.UNKNOWN),
        tenant=response.tenant,
        tokens=response.tokens,
        computed=response.computed,
        writable=response.writable,
        blocks=response.blocks,
        shared_blocks=response.shared_blocks,
        host_blocks=response.host_blocks,
        swapped_out=response.swapped_out,
        table_revision=response.table_revision,
        priority=response.priority if response.HasField("priority") else None,
        token_ids=tuple(_column("i", response.token_ids)),
    )


_ADMISSIONS = {
    block_manager_pb2.ADMISSION_OK: Admission.OK,
    block_manager_pb2.ADMISSION_LATER: Admission.LATER,
    block_manager_pb2.ADMISSION_NEVER: Admission.NEVER,
}


def match_request(
    prompts: Iterable[Iterable[int]],
    lookahead: int | Iterable[int],
    adapter: str,
    extra_keys: Mapping[int, Keys] | None,
    window: int,
    sinks: int,
    generate: bool,
) -> block_manager_pb2.MatchRequest:
    batch = Batch()
    batch.create(prompts, lookahead=lookahead, adapter=adapter, extra_keys=extra_keys, window=window, sinks=sinks)
    fields = dict(batch.items[0][1], generate=generate)
    del fields["reservation"]
    return block_manager_pb2.MatchRequest(**fields)  # type: ignore[arg-type]


def matches(response: block_manager_pb2.MatchResponse) -> Listing[Match]:
    cached, shortfall = _column("I", response.cached), _column("I", response.shortfall)
    if not len(cached) == len(shortfall) == len(response.admission):
        raise Internal("REPLY_INVALID", f"the columns of {len(response.admission)} prompts differ in length")
    return Listing(
        header=_header(response.header),
        items=tuple(
            Match(tokens, _ADMISSIONS.get(admission, Admission.UNKNOWN), short)
            for tokens, admission, short in zip(cached, response.admission, shortfall, strict=True)
        ),
    )


def _column(typecode: str, data: bytes) -> array[int]:
    try:
        return column_of(typecode, data)
    except ValueError as error:
        raise Internal("REPLY_INVALID", "a column of the reply is no whole number of values") from error


def cache_reset(response: block_manager_pb2.ResetCacheResponse) -> CacheReset:
    return CacheReset(header=_header(response.header), freed_blocks=response.freed_blocks)


def resize_request(limit: int) -> block_manager_pb2.ResizeRequest:
    return block_manager_pb2.ResizeRequest(limit=_count(limit, "limit"))


def resized(response: block_manager_pb2.ResizeResponse) -> Resized:
    return Resized(header=_header(response.header), evicted_blocks=response.evicted_blocks)


def quota_request(
    tenant: str, floor: int, quota: int | None, host_floor: int, host_quota: int | None
) -> block_manager_pb2.SetQuotaRequest:
    return block_manager_pb2.SetQuotaRequest(
        tenant=tenant,
        floor=_count(floor, "floor", 0),
        quota=None if quota is None else _count(quota, "quota", 0),
        host_floor=_count(host_floor, "host_floor", 0),
        host_quota=None if host_quota is None else _count(host_quota, "host_quota", 0),
    )


def quota_set(response: block_manager_pb2.SetQuotaResponse) -> QuotaSet:
    return QuotaSet(header=_header(response.header), usage=_tenant_usage(response.usage))


def compact_request(max_moves: int | None) -> block_manager_pb2.CompactRequest:
    return block_manager_pb2.CompactRequest(max_moves=0 if max_moves is None else _count(max_moves, "max_moves"))


def compacted(response: block_manager_pb2.CompactResponse) -> Compacted:
    return Compacted(
        header=_header(response.header),
        moved_blocks=response.moved_blocks,
        changed_tables=response.changed_tables,
        step_id=response.step_id,
    )


def _count(value: int, name: str, least: int = 1) -> int:
    if not least <= value < 1 << 32:
        why = f"{name} cannot be {value}: at least {least}"
        raise InvalidArgument("VALUE_OUT_OF_RANGE", why, numbers={name: value})
    return value


def audit(response: block_manager_pb2.AuditResponse) -> Audit:
    return Audit(header=_header(response.header), violations=tuple(response.violations))


# --- batches ----------------------------------------------------------------------------------------------------------

_COMMANDS: dict[str, Callable[..., object]] = {
    "create": block_manager_pb2.CreateCommand,
    "append": block_manager_pb2.AppendCommand,
    "commit": block_manager_pb2.CommitCommand,
    "fork": block_manager_pb2.ForkCommand,
    "truncate": block_manager_pb2.TruncateCommand,
    "free": block_manager_pb2.FreeCommand,
    "swap": block_manager_pb2.SwapCommand,
    "pin": block_manager_pb2.PinCommand,
    "unpin": block_manager_pb2.UnpinCommand,
    "reserve": block_manager_pb2.ReserveCommand,
    "release": block_manager_pb2.ReleaseCommand,
}


def step_batch_request(batch: Batch, request_id: str, atomic: bool, wait: bool) -> block_manager_pb2.StepBatchRequest:
    try:
        return block_manager_pb2.StepBatchRequest(
            request_id=request_id,
            atomic=atomic,
            no_wait=not wait,
            items=[
                block_manager_pb2.BatchItem(
                    table_revision=batch.revisions.get(number, b""),
                    **{command: _COMMANDS[command](**fields)},  # type: ignore[arg-type]
                )
                for number, (command, fields) in enumerate(batch.items)
            ],
        )
    except UnicodeError as error:
        raise InvalidArgument(
            "TEXT_NOT_UNICODE", "a request id or adapter has characters that are no Unicode text"
        ) from error


def batch_reply(response: block_manager_pb2.StepBatchResponse) -> BatchReply:
    """Raises Internal when its columns cannot be read."""
    try:
        return BatchReply(
            header=_header(response.header),
            results=tuple(_item_result(result) for result in response.results),
            step_id=response.step_id,
            replayed=response.replayed,
            table_sequence=column_of("Q", response.table_sequence),
            table_revision=column_of("Q", response.table_revision),
        )
    except ValueError as error:
        raise Internal("REPLY_INVALID", "a column of a batch's reply is no whole number of values") from error


def _item_result(result: block_manager_pb2.BatchResult) -> ItemResult:
    return ItemResult(
        error=_item_error(result.error) if result.HasField("error") else None,
        sequences=column_of("Q", result.sequences),
        cached=column_of("I", result.cached),
        slot_indptr=column_of("I", result.slot_indptr),
        slots=column_of("Q", result.slots),
        copy_src=column_of("I", result.copy_src),
        copy_dst=column_of("I", result.copy_dst),
        swapped_blocks=result.swapped_blocks,
        pin=result.pin,
        pinned_tokens=result.pinned_tokens,
        reservation=result.reservation,
    )


def _item_error(error: block_manager_pb2.BatchError) -> PagedKvError:
    delay = error.retry_delay.ToNanoseconds() / 1e9
    return from_item_error(error.code, error.reason, error.message, error.metadata, delay)
