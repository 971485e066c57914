from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from gpu_executor.memory import Budget, PoolPlan, PoolTooLarge, block_bytes, host_free, layout_hash, plan_pool, readable
from gpu_executor.pool import DevicePool
from gpu_executor.step import Geometry

ONE = Geometry(
    num_blocks=0,
    num_host_blocks=0,
    block_size=16,
    num_layers=30,
    num_kv_heads=3,
    key_head_dim=64,
    value_head_dim=64,
    dtype="float32",
)
EACH = 30 * 16 * 3 * (64 + 64) * 4
GIB = 1 << 30


def plan(**changed: object) -> PoolPlan:
    arguments = {
        "blocks": None,
        "memory": Budget(percent=50),
        "host_blocks": None,
        "host_memory": None,
        "device_free": 8 * GIB,
        "host_free": 4 * GIB,
        "device_is_host": False,
    } | changed
    return plan_pool(ONE, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "free", "expected"),
    [
        ("8GiB", 0, 8 * GIB),
        ("1.5MiB", 0, 3 << 19),
        ("1GB", 0, 10**9),
        ("4096", 0, 4096),
        ("60%", 1000, 600),
        ("12.5 %", 1000, 125),
    ],
)
def test_budgets_are_amounts_or_shares_of_what_is_free(text: str, free: int, expected: int) -> None:
    assert Budget.parse(text).of(free) == expected


@pytest.mark.parametrize("text", ["", "lots", "8 gigs", "-1GiB", "0%", "101%", "GiB", "1e9"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"amount of memory|must lie in"):
        Budget.parse(text)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value_head_dim", [64, 32])
def test_block_bytes_are_those_of_a_pool(dtype: str, value_head_dim: int) -> None:
    geometry = replace(ONE, num_blocks=3, num_layers=2, dtype=dtype, value_head_dim=value_head_dim)
    pool = DevicePool(geometry, torch.device("cpu"))
    assert block_bytes(geometry) * 3 == sum(part.nbytes for part in pool.parts)


def test_a_budget_becomes_whole_blocks() -> None:
    geometry = plan(memory=Budget(bytes=10 * EACH + EACH - 1)).geometry
    assert (geometry.num_blocks, geometry.num_host_blocks) == (10, 0)
    assert plan().geometry.num_blocks == 4 * GIB // EACH
    assert replace(geometry, num_blocks=0) == ONE


def test_a_count_wins_over_the_default_budget() -> None:
    assert plan(blocks=7, host_blocks=3).geometry == replace(ONE, num_blocks=7, num_host_blocks=3)


def test_the_arithmetic_is_in_plain_lines() -> None:
    text = "\n".join(plan(blocks=11, host_memory=Budget(percent=1)).lines)
    assert f"30 layers × 16 tokens × 3 KV heads × (64 + 64) × 4 bytes (float32) = {EACH:,} bytes" in text
    assert "11 blocks" in text
    assert "10 usable blocks × 16 = 160 tokens" in text
    assert f"host pool: {4 * GIB // 100 // EACH} blocks" in text


@pytest.mark.parametrize(
    ("changed", "numbers"),
    [
        ({"blocks": 8 * GIB // EACH + 1}, [f"{8 * GIB // EACH + 1:,} blocks", f"at most {8 * GIB // EACH:,}"]),
        ({"memory": Budget(bytes=9 * GIB)}, ["8 GiB are free"]),
        ({"memory": Budget(bytes=EACH)}, ["would have 1 blocks", readable(EACH)]),
        ({"blocks": 2, "host_blocks": 10**6}, ["host pool does not fit", "1,000,000 blocks", "4 GiB are free"]),
        (
            {"device_is_host": True, "device_free": 4 * GIB, "host_memory": Budget(bytes=3 * GIB)},
            ["host pool", "2 GiB"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(changed: dict[str, object], numbers: list[str]) -> None:
    with pytest.raises(PoolTooLarge) as error:
        plan(**changed)
    for number in numbers:
        assert number in str(error.value)


def test_the_layout_hash_tells_layouts_apart() -> None:
    geometry = replace(ONE, num_blocks=9, num_host_blocks=2)
    assert layout_hash(geometry) == layout_hash(replace(geometry))
    others = [
        replace(geometry, **{field.name: "float16" if field.name == "dtype" else getattr(geometry, field.name) + 1})
        for field in fields(geometry)
    ]
    assert len({layout_hash(g) for g in [geometry, *others]}) == len(others) + 1


def test_host_free_is_an_amount_that_the_machine_has() -> None:
    assert 0 < host_free() < 1 << 50
