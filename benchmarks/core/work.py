"""The work that is compared, the same for everybody: sizes, and the rows of the table with their targets."""

from __future__ import annotations

from dataclasses import dataclass

NUM_BLOCKS, BLOCK = 65_536, 16
CONTEXT = 512  # tokens a sequence begins its decoding with, plus 0 to 15 where lengths are staggered
TOUCHED = 512  # blocks that are allocated and freed
FOUND = 128  # blocks of a prompt that are found
FORKED = 128  # blocks of the sequence that is forked, ...
CHILDREN = 32  # ... into so many children where it is a batch
SWAPPED = 64


@dataclass(frozen=True)
class Work:
    name: str
    title: str
    target: float | None  # µs
    # What others took on 2 cores of another machine, by name and version; peers that run here replace it.
    elsewhere: dict[str, str]


ROWS = (
    Work(
        "decode_off",
        "decode step, 256 sequences, prefix cache off",
        45,
        {"vllm": "1,225", "lmdeploy": "832", "nano-vllm": "119", "sglang": "45 (tracks no tokens)"},
    ),
    Work(
        "decode_on",
        "the same, prefix cache on",
        90,
        {"vllm": "1,390 (whole scheduler 2,772)", "lmdeploy": "1,206", "nano-vllm": "176"},
    ),
    Work("seal_all", "the same, the step in which all 256 fill a block", 400, {}),
    Work("decode_off_4096", "decode step, 4,096 sequences, prefix cache off", 400, {}),
    Work(
        "allocate_free",
        "allocate and free 512 blocks",
        20,
        {"vllm": "114", "lmdeploy": "32", "nano-vllm": "183", "sglang": "43"},
    ),
    Work(
        "match",
        "128 blocks found for a prompt given as an array",
        60,
        {
            "vllm": "315",
            "lmdeploy": "581",
            "nano-vllm": "205",
            "sglang": "47 as one tree node, 777 as 128 (its Rust core 75)",
        },
    ),
    Work("fork", "fork of 128 blocks", 10, {"vllm": "176 (0.8)"}),
    Work("fork_batch", "fork of 128 blocks, each of 32 in a batch", 5, {}),
    Work("swap", "swap 64 blocks out and in, books only", 40, {"vllm": "61,463 (0.8)", "lmdeploy": "131"}),
)
