"""What calls return: plain values, frozen, with nothing of protobuf in them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypedDict, TypeVar, overload

T = TypeVar("T")


class SamplingOptions(TypedDict, total=False):
    """How to generate; everything may be left out.

    max_tokens:     tokens to generate at most, at least 1. Default: to the end of the context or of the pool.
    temperature:    0 (the default) is greedy; at most 100.
    top_p:          in (0, 1]; 1 (the default) keeps all tokens.
    top_k:          0 (the default) keeps all tokens.
    seed:           a sample is a function of (seed, sample number, position). Default: drawn by the service.
    stop:           a string, or at most 16 of them; the text ends before the first that appears.
    stop_token_ids: at most 64; the token is sent, its text is not.
    ignore_eos:     go on past the model's end-of-sequence tokens.
    logprobs:       0: the log-probability of each token; k (at most 20): also the k most likely tokens.
    n:              parallel samples, 1 (the default) to 64; they share the prompt's blocks.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    n: int | None


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # end-of-sequence token, stop string or stop token
    LENGTH = "length"  # max_tokens, or the end of the context
    UNKNOWN = "unknown"  # a reason that only a newer SDK has a name for


class SequenceState(enum.StrEnum):
    """Where a sequence stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    ENGINE = "engine"  # not the scheduler's: of an engine that schedules itself, by step_batch
    UNKNOWN = "unknown"  # a state that only a newer SDK has a name for


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One of the most likely tokens of a position, with the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Piece:
    """One sampled token.

    text may be empty or hold earlier tokens' text too: what could still become part of a stop string, or is half of a
    character, comes with a later token. The texts of a sample, joined, are its whole text.
    """

    sample: int
    token_id: int
    text: str
    finish_reason: FinishReason | None  # set on a sample's last piece
    logprob: float | None  # when `logprobs` was asked for
    top_logprobs: tuple[TokenLogprob, ...]  # when `logprobs` = k > 0: k of them, best first


@dataclass(frozen=True, slots=True)
class Usage:
    """What one call took, over all its samples, in tokens."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt's, found in the prefix cache at first admission
    completion_tokens: int
    preemptions: int  # how often a sample lost its blocks and was recomputed
    seed: int  # with it the call can be repeated


@dataclass(frozen=True, slots=True)
class Sample:
    """One whole completion of the prompt."""

    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]  # one a token, when asked for; else empty
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]  # one entry a token, when asked for; else empty


@dataclass(frozen=True, slots=True)
class Completion:
    """All samples of one call, in their order, and its usage. `text`, `token_ids`, `finish_reason`: of the first."""

    samples: tuple[Sample, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the service can generate with. max_context: prompt and completion together, in tokens."""

    id: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    accepts_text: bool  # False: token_ids prompts only
    accepts_chat: bool


@dataclass(frozen=True, slots=True)
class Header:
    """Where a reply stands: replies with equal headers describe one state of the page table.

    epoch rises with every reset of the pool; revision counts the commands that were executed in this epoch.
    """

    service_id: str
    epoch: int
    revision: int


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Blocks of a pool by state; block 0 is the null block, never handed out."""

    null: int
    free: int
    reserved: int
    active: int  # referenced, not full or not yet computed
    sealed: int  # referenced, full and computed
    cached: int  # not referenced, findable, evictable
    quarantined: int

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return self.null + self.free + self.reserved + self.active + self.sealed + self.cached + self.quarantined

    @property
    def in_use(self) -> int:
        """Blocks that block tables reference."""
        return self.active + self.sealed


@dataclass(frozen=True, slots=True)
class Sharing:
    """How often blocks are shared; each peak is the highest value since the pool was reset."""

    table_entries: int  # over all block tables
    referenced_blocks: int  # distinct blocks that these name
    shared_blocks: int  # blocks named by two tables or more
    peak_table_entries: int
    peak_referenced_blocks: int
    peak_shared_blocks: int


@dataclass(frozen=True, slots=True)
class Activity:
    """Counters since the service started; `running`, `waiting` and `steps_in_flight` are of this moment."""

    steps: int
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache instead of computed
    computed_tokens: int
    sampled_tokens: int
    copies_on_write: int
    evicted_blocks: int
    preemptions: int
    step_us: int  # from the start of a step's decision to the end of its result's handling, over all steps
    executor_us: int  # of step_us, what the executor spent on ops, model and sampling
    running: int
    waiting: int
    steps_in_flight: int  # sent, no result yet
    swapped_out_blocks: int
    swapped_in_blocks: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the device's free blocks lie."""

    free_runs: int  # of neighbours
    largest_free_run: int  # blocks
    highest_used_block: int  # 0: none is in use or cached


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant is charged for; a block that tenants of a share group share is charged to each of them."""

    tenant: str
    charged: int  # blocks of the device ...
    cached: int  # ... of which so many can be evicted
    reserved: int
    host: int  # slots of the host
    floor: int  # guaranteed; quota: the most, None: no bound
    quota: int | None
    host_floor: int
    host_quota: int | None


@dataclass(frozen=True, slots=True)
class Pool:
    """Capacity and use of the pool; all numbers are of one moment between two steps."""

    header: Header
    block_size: int  # tokens
    block_bytes: int  # K and V of all layers
    device: BlockStates
    host: BlockStates
    sharing: Sharing
    activity: Activity
    limit: int  # blocks of the device that may be in use, cached or reserved at once
    watermark: int  # of these, blocks that admissions leave to the sequences that are here already
    layout: Layout
    tenants: tuple[TenantUsage, ...]  # for operators all, for others their own

    @property
    def fragmentation(self) -> float:
        """The part of the device's free blocks that lies outside their longest run; 0 with none free."""
        free = self.device.free + self.device.reserved
        return 1 - self.layout.largest_free_run / free if free else 0.0


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One sequence that is alive."""

    sequence: int
    tokens: int  # known: prompt and sampled
    computed: int  # whose K/V are in the pool
    blocks: int
    shared_blocks: int  # of these, also in another table
    state: SequenceState


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one sequence, in logical order; the last holds `last_page_len` tokens (0 for an empty table)."""

    sequence: int
    block_size: int  # tokens
    blocks: tuple[int, ...]
    refcounts: tuple[int, ...]  # references to blocks[i], over all tables
    last_page_len: int
    revision: int  # of the page table, at which `blocks` last changed

    @property
    def tokens(self) -> int:
        """Tokens that the table holds."""
        return (len(self.blocks) - 1) * self.block_size + self.last_page_len if self.blocks else 0

    @property
    def shared(self) -> tuple[bool, ...]:
        """Whether blocks[i] is named more than once."""
        return tuple(refcount > 1 for refcount in self.refcounts)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the check of every invariant found: one sentence each violation, with the numbers."""

    header: Header
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every invariant holds."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class CacheReset:
    """The prefix cache was emptied: nothing that was cached at `header` is found again."""

    header: Header
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """A tenant has another quota; `usage` is after what it had to evict for it."""

    header: Header
    usage: TenantUsage


@dataclass(frozen=True, slots=True)
class Resized:
    """The pool has another limit, and this many cached blocks were evicted for it."""

    header: Header
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class Compacted:
    """Blocks moved to the low end of the pool."""

    header: Header
    moved_blocks: int  # 0: all that may move lies as low as it can
    changed_tables: int
    step_id: int  # the step that carries the copies; 0: there are none


@dataclass(frozen=True, slots=True)
class Listing(Sequence[T], Generic[T]):
    """Items of one reply, a read-only sequence, and the state that the reply describes."""

    header: Header
    items: tuple[T, ...]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.items[index]


class Admission(enum.StrEnum):
    """Whether new sequences would get their blocks."""

    OK = "ok"
    LATER = "later"  # when others have given blocks back
    NEVER = "never"  # the pool, or the tenant's quota, is too small
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is cached, and whether it would be let in.

    cached_tokens: in whole blocks, below the prompt's last token.
    shortfall:     blocks that are missing: now for LATER, ever for NEVER.
    """

    cached_tokens: int
    admission: Admission
    shortfall: int


@dataclass(frozen=True, slots=True)
class SequenceDetails:
    """One sequence, in full.

    tokens, computed, writable: how many it has, how many K and V are there for, how many positions have slots.
    shared_blocks, host_blocks: of its blocks, those that are in another table too, and those that lie on the host.
    token_ids:                  of the positions that were asked for.
    """

    header: Header
    sequence: int
    state: SequenceState
    tenant: str
    tokens: int
    computed: int
    writable: int
    blocks: int
    shared_blocks: int
    host_blocks: int
    swapped_out: bool
    table_revision: int
    priority: int | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slots:
    """Of ranges of positions: that of sequence i is slots[indptr[i] : indptr[i + 1]], block * block_size + offset."""

    header: Header
    indptr: tuple[int, ...]
    slots: tuple[int, ...]
    table_revisions: tuple[int, ...]
