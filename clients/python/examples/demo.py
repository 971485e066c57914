"""Eight prompts at once through a real service and a real executor, as they stream.

Starts both processes on free loopback ports, sends the prompts with `AsyncClient`, and ends with what the
block manager did for them. Leaves nothing running, also after Ctrl-C.

    python clients/python/examples/demo.py --model SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedkv import AsyncClient, PagedKvError, Pool

# Long on purpose: the calls that begin with it share its blocks.
SYSTEM = """You are the guide of a small museum of natural history in a harbour town. Visitors of every age ask you
questions, many of them children. You answer in two or three short and friendly sentences, in plain words, without
lists and without headings. You name one thing that the visitor can go and look at in the museum: the whale's
skeleton in the great hall, the drawers of butterflies on the second floor, the old lighthouse lamp, the aquarium with
the lobsters, or the ship's clock that is still wound by hand every morning at eight. You never invent numbers. When
you do not know an answer you say so and suggest whom to ask. You close with a question that invites the visitor to
look more closely at what is in front of them."""


# Tokens that one step computes at most. A prefix can be found only once it has been computed: with the default, all
# eight prompts fit into one step, and their order of arrival decides how many compute the system prompt anew.
TOKEN_BUDGET = 256


@dataclass(slots=True)
class Call:
    """One prompt, and the text of its samples so far."""

    title: str
    prompt: str
    system: str = ""  # with one the prompt is sent as a chat, else as plain text
    n: int = 1
    texts: list[str] = field(init=False)
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.texts = [""] * self.n


CALLS = (
    Call("a chat with the long system prompt", "Why do whales sing?", system=SYSTEM),
    Call("the same system prompt", "Where do butterflies sleep when it rains?", system=SYSTEM),
    Call("the same system prompt", "Why is the sea salty but rain is not?", system=SYSTEM),
    Call("the same system prompt", "How does a lighthouse shine so far?", system=SYSTEM),
    Call("the same system prompt", "What does a lobster do all day?", system=SYSTEM),
    Call("four samples of one prompt", "Once upon a time in a harbour town a clock", n=4),
    Call("plain text", "The three most common gases in the air are"),
    Call("plain text", "Dear Anna,\n\nthank you for your letter from the island. Here in town"),
)


class Options(argparse.Namespace):
    model: Path
    max_tokens: int
    blocks: int


class Programs:
    """block-manager and gpu-executor, logs in a folder of their own."""

    def __init__(self, options: Options, logs: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        executor_address = f"127.0.0.1:{free_port()}"
        self.executor_log = logs / "gpu-executor.log"
        self._processes: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        self._launch(
            "block_manager_svc",
            logs / "block-manager.log",
            ["--listen", self.address, "--token-budget", str(TOKEN_BUDGET)],
        )
        self._launch(
            "gpu_executor",
            self.executor_log,
            [
                *("--model", str(options.model), "--blocks", str(options.blocks), "--block-size", "16"),
                *("--service", self.address, "--listen", executor_address),
            ],
        )

    def check(self) -> None:
        """Ends the demo, with the log's last lines, when a process has ended."""
        for module, log, process in self._processes:
            if process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                sys.exit(f"{module} ended with status {process.returncode}:\n{tail}")

    def close(self) -> None:
        """Asks both to end, executor first, and sees to it."""
        for _, _, process in reversed(self._processes):
            process.terminate()
        for _, _, process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _launch(self, module: str, log: Path, arguments: list[str]) -> None:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends both in order
            )
        self._processes.append((module, log, process))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_serving(client: AsyncClient, programs: Programs, console: Console) -> None:
    """Until the executor has its model and is attached; shows its last log line meanwhile."""
    began = said = time.monotonic()
    shown = ""
    with console.status("starting") as status:
        while not await client.healthy(timeout=1.0):
            programs.check()
            now = time.monotonic()
            lines = programs.executor_log.read_text(errors="replace").splitlines()
            news = Text.from_ansi(lines[-1]).plain.strip() if lines else "loading PyTorch"
            status.update(f"{now - began:.0f} s  {news}")
            # A pipe gets a line now and then: soon for news, later as a sign of life.
            if not console.is_terminal and now - said > (2 if news != shown else 10):
                console.print(f"{now - began:4.0f} s  {news}", markup=False, highlight=False, soft_wrap=True)
                said, shown = now, news
            await asyncio.sleep(0.2)
    console.print(f"ready after {time.monotonic() - began:.1f} s")


class Sampling(TypedDict):
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    n: int


async def run(client: AsyncClient, call: Call, max_tokens: int) -> None:
    """Streams one call into its texts."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.6, top_p=0.9, seed=7, n=call.n)
    if call.system:
        chat = [{"role": "system", "content": call.system}, {"role": "user", "content": call.prompt}]
        stream = client.generate(chat=chat, **sampling)
    else:
        stream = client.generate(call.prompt, **sampling)
    async with stream:
        async for piece in stream:
            call.texts[piece.sample] += piece.text
            if piece.finish_reason is not None:
                call.finished.add(piece.sample)


@contextlib.asynccontextmanager
async def screen(console: Console) -> AsyncIterator[None]:
    """Shows the texts as they grow: a panel each on a terminal, else a line whenever there is one."""

    async def lines() -> None:
        shown = {(i, s): 0 for i, call in enumerate(CALLS) for s in range(call.n)}
        while True:
            await asyncio.sleep(0.1)
            for (i, s), start in shown.items():
                fresh = CALLS[i].texts[s][start:]
                done = s in CALLS[i].finished
                # Whole words, some at a time; all of it at the end.
                cut = len(fresh) if done else fresh.rfind(" ") + 1
                if fresh and (done or cut >= 60):
                    name = f"{i + 1}.{s + 1}" if CALLS[i].n > 1 else f"{i + 1}"
                    console.print(
                        f"[{name}] {' '.join(fresh[:cut].split())}", markup=False, highlight=False, soft_wrap=True
                    )
                    shown[i, s] = start + cut

    async def panels() -> None:
        with Live(console=console, refresh_per_second=8, vertical_overflow="crop") as live:
            try:
                while True:
                    live.update(picture(console))
                    await asyncio.sleep(0.1)
            finally:
                live.update(picture(console))

    shower = asyncio.create_task(panels() if console.is_terminal else lines())
    try:
        yield
        await asyncio.sleep(0.25)  # the last words reach the screen
    finally:
        shower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shower


def picture(console: Console) -> Columns:
    """All calls as panels, two in a row where there is room; of long texts the end."""
    across = 2 if console.width >= 100 else 1
    width = console.width // across
    rows = -(-len(CALLS) // across)
    lines = max(1, console.height // rows - 3)

    def panel(i: int, call: Call) -> Panel:
        each = max(1, lines // call.n)
        shown = Text()
        for number, text in enumerate(call.texts, 1):
            name = f"[{number}] " if call.n > 1 else ""
            kept = Text(name + " ".join(text.split())).wrap(console, width - 4)[-each:]
            shown.append_text(Text("\n").join(kept)).append("\n")
        done = len(call.finished) == call.n
        return Panel(
            shown[:-1],
            title=Text(f"{i + 1}  {' '.join(call.prompt.split())}"),
            subtitle=call.title,
            title_align="left",
            subtitle_align="left",
            border_style="green" if done else "dim",
            width=width,
            height=lines + 2,
        )

    return Columns([panel(i, call) for i, call in enumerate(CALLS)], padding=0, expand=False)


def report(pool: Pool, seconds: float, max_context: int, console: Console) -> None:
    sharing, activity = pool.sharing, pool.activity
    sequences = sum(call.n for call in CALLS)
    contiguous = sequences * max_context * pool.block_bytes // pool.block_size
    paged = sharing.peak_referenced_blocks * pool.block_bytes
    table = Table(title=f"{len(CALLS)} calls, {sequences} sequences, one pool", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in (
        ("tokens/s", f"{activity.sampled_tokens / seconds:.1f}", f"{activity.sampled_tokens} in {seconds:.1f} s"),
        ("blocks used", f"{sharing.peak_referenced_blocks}", f"at the peak, of {pool.device.total - 1}"),
        ("block table entries", f"{sharing.peak_table_entries}", "at the peak: blocks needed without sharing"),
        ("blocks shared", f"{sharing.peak_shared_blocks}", "at the peak: named by two tables or more"),
        ("copies made by COW", f"{activity.copies_on_write}", "a shared block was about to be written"),
        ("prompt tokens not recomputed", f"{activity.cached_tokens}", f"of {activity.prompt_tokens}"),
        ("KV memory", size(paged), f"at the peak, {pool.block_size} tokens a block"),
        (
            "contiguous cache",
            size(contiguous),
            f"{sequences} × {max_context} tokens: {contiguous / paged:.0f} times that",
        ),
    ):
        table.add_row(*row)
    console.print(table)


def size(number: float) -> str:
    return f"{number / (1 << 30):.2f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


async def demo(options: Options, programs: Programs, console: Console) -> None:
    async with AsyncClient(programs.address) as client:
        await wait_until_serving(client, programs, console)
        (model,) = await client.models()
        console.print(f"{model.id}: sending {len(CALLS)} prompts at once\n")
        if not console.is_terminal:  # there, each panel has its prompt as title
            for i, call in enumerate(CALLS, 1):
                prompt = " ".join(call.prompt.split())
                console.print(f"[{i}] {prompt}  ({call.title})", markup=False, highlight=False, soft_wrap=True)
            console.print()
        began = time.monotonic()
        try:
            async with screen(console), asyncio.TaskGroup() as group:
                for call in CALLS:
                    group.create_task(run(client, call, options.max_tokens))
        except* PagedKvError as failed:
            sys.exit("\n".join(f"a call failed: {error}" for error in failed.exceptions))
        seconds = time.monotonic() - began
        report(await client.pool(), seconds, model.max_context, console)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: with both processes gone."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each sample (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=512, help="blocks of the pool (default: %(default)s)")
    options = parser.parse_args(namespace=Options())
    console = Console()
    with tempfile.TemporaryDirectory(prefix="pagedkv-demo-") as logs, ended_by_sigterm():
        programs = Programs(options, Path(logs))
        try:
            asyncio.run(demo(options, programs, console))
        except KeyboardInterrupt:
            console.print("interrupted")
            sys.exit(130)
        finally:
            programs.close()


if __name__ == "__main__":
    main()
