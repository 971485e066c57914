"""Service loop and executor engine joined in one process: real steps, encoded, validated and executed, no sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from block_manager_svc.core import PageTable
from block_manager_svc.core.step import StepOutputs
from block_manager_svc.rpc.convert import step_body
from block_manager_svc.scheduling.loop import Capacity, StepLoop
from block_manager_svc.scheduling.request import Sampling
from gpu_executor.engine import Engine
from gpu_executor.link.convert import step_from_body
from gpu_executor.model import LoadedModel, PagedModel
from gpu_executor.step import Geometry
from gpu_executor.validate import Admission, Limits

CPU = torch.device("cpu")


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocab], one for each token


class Inline:
    """Drives StepLoop and Engine until every call has finished, keeping the logits that each token was chosen from."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        dtype: str,
        blocks: int,
        block_size: int,
        token_budget: int,
        max_rows: int = 64,
        keep_logits: bool = False,
        device: torch.device = CPU,
    ) -> None:
        geometry = Geometry(
            num_blocks=blocks,
            num_host_blocks=0,
            block_size=block_size,
            num_layers=loaded.num_layers,
            num_kv_heads=loaded.num_kv_heads,
            key_head_dim=loaded.key_head_dim,
            value_head_dim=loaded.value_head_dim,
            dtype=dtype,
        )
        limits = Limits(
            max_rows=max_rows,
            max_batch_tokens=token_budget,
            max_blocks_per_row=-(-loaded.max_context // block_size),
            vocab_size=loaded.vocab_size,
            max_context=loaded.max_context,
        )
        self.table = PageTable(blocks, block_size)
        self.loop = StepLoop(self.table, Capacity(loaded.max_context, max_rows, token_budget, 1000, loaded.vocab_size))
        self.engine = Engine(loaded, geometry, limits, device)
        self._admission = Admission(geometry, limits)
        self.most_rows = 0  # in one step's batch
        self._steps = 0
        self._logits: torch.Tensor | None = None
        if keep_logits:
            self.engine._model = _Listening(self.engine._model, self._hear)  # type: ignore[assignment]

    def _hear(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
        """One greedy sample each, all submitted before the first step."""
        calls = [self.loop.submit(np.array(prompt, np.int32), Sampling(max_tokens=max_tokens)) for prompt in prompts]
        out = {call: Generated() for call in calls}
        while (plan := self.loop.plan()) is not None:
            self._steps += 1
            self.most_rows = max(self.most_rows, len(plan.batch.row))
            step = step_from_body(self._steps, step_body(plan, self._steps))
            self._admission.admit(step)
            result, _ = self.engine.execute(step)
            news = self.loop.complete(
                StepOutputs(result.token_ids, result.logprob, result.top_token_ids, result.top_logprobs)
            )
            # One greedy sample a row: rows of `news` come in the order of the samples.
            for at, (call, rows) in enumerate(news.rows.items()):
                (row,) = rows
                out[call].token_ids.append(row.token_id)
                if self._logits is not None:
                    out[call].logits.append(self._logits[at].clone())
        assert self.table.check() == []
        return [out[call] for call in calls]


class _Listening:
    def __init__(self, model: PagedModel, hear: Callable[[torch.Tensor], None]) -> None:
        self._model = model
        self._hear = hear

    def forward(self, *arguments: object) -> torch.Tensor:
        logits = self._model.forward(*arguments)  # type: ignore[arg-type]
        self._hear(logits)
        return logits
