"""Reasons are part of the interface: what the code raises, what docs/errors.md says and what the protos say are one."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pagedkv._errors
from block_manager_svc.core import errors
from block_manager_svc.rpc.errors import code_of

ROOT = Path(__file__).resolve().parent.parent
NO_CODE = "-"  # a reason that travels in another way than as a call's status

# Sections of docs/errors.md, by who raises what they list.
BLOCK_MANAGER = (  # one section for all of them
    "GetPool",
    "ListSequences",
    "GetSequence",
    "Match",
    "GetBlockTables",
    "WatchEvents",
    "Audit",
    "ResetCache",
    "Resize",
    "SetQuota",
    "Compact",
)
SERVICE = ("Every call of the service", "Generate", ", ".join(BLOCK_MANAGER), "StepBatch", "Attach", "Core")
SECTIONS = {
    "block_manager_svc": SERVICE,
    "gpu_executor/rpc": ("ReadKv",),
    "gpu_executor/steps": ("Steps and messages that the executor refuses",),
    "gpu_executor/models": ("Models that the executor refuses",),
    "pagedkv": ("The SDK's own",),
}
# An rpc's own table, or that of all rpcs of a service, by the section that repeats it.
TABLES = {
    "GenerationService": "Every call of the service",
    "BlockManagerService": "Every call of the service",
    "Generate": "Generate",
    "StepBatch": "StepBatch",
    "Attach": "Attach",
    "ReadKv": "ReadKv",
}
# Where what a module raises can end: in one of these tables.
SERVED_BY = {
    "block_manager_svc/rpc/boundary.py": {"GenerationService", "BlockManagerService", "Attach"},
    "block_manager_svc/identity.py": {"GenerationService", "BlockManagerService", "Attach"},
    "block_manager_svc/rpc/authentication.py": {"GenerationService", "BlockManagerService", "Attach"},
    "block_manager_svc/rpc/errors.py": {"GenerationService", "BlockManagerService", "Attach"},
    "block_manager_svc/rpc/generation.py": {"Generate"},
    "block_manager_svc/rpc/reply.py": {"Generate", "WatchEvents"},
    "block_manager_svc/rpc/sampling.py": {"Generate"},
    "block_manager_svc/text/chat.py": {"Generate"},
    "block_manager_svc/text/model.py": {"Generate", "Attach"},
    "block_manager_svc/scheduling/loop.py": {"Generate"},
    "block_manager_svc/manager.py": {"Generate", "StepBatch", "Attach"},
    "block_manager_svc/engine_steps.py": {"StepBatch"},
    "block_manager_svc/replies.py": {"StepBatch"},
    "block_manager_svc/rpc/block_manager.py": {"SetQuota", "Compact"},
    "block_manager_svc/rpc/reads.py": {"GetBlockTables", "GetSequence", "Match"},
    "block_manager_svc/watchers.py": {"WatchEvents"},
    "block_manager_svc/rpc/columns.py": {"Match", "StepBatch"},
    "block_manager_svc/rpc/step_batch.py": {"StepBatch"},
    "block_manager_svc/rpc/link.py": {"Attach"},
    "gpu_executor/link/server.py": {"ReadKv"},
}


# --- what the code raises -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Raised:
    group: str  # a key of SECTIONS
    path: str
    reason: str
    code: str
    numbers: frozenset[str]
    more_numbers: bool  # passed on from elsewhere


@dataclass(frozen=True, slots=True)
class Raiser:
    """Something that, called, raises or makes a refusal: which argument is the reason, and what it is raised as."""

    group: str
    position: int
    name: str  # of the parameter
    code: str


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*(subclasses(below) for below in kind.__subclasses__()))


REFUSALS = {kind: code_of(kind.__new__(kind)).name for kind in subclasses(errors.Refused) - {errors.Refused}}


def known_raisers(package: str) -> dict[str, Raiser]:
    if package == "pagedkv":
        return {
            kind.__name__: Raiser("pagedkv", 0, "reason", kind.default_code)
            for kind in subclasses(pagedkv._errors.PagedKvError)
        }
    if package == "gpu_executor":
        return {
            "StepInvalid": Raiser("gpu_executor/steps", 0, "reason", NO_CODE),
            "ModelUnsupported": Raiser("gpu_executor/models", 0, "reason", NO_CODE),
            "_abort": Raiser("gpu_executor/rpc", 2, "reason", ""),  # the code is its second argument
        }
    return {
        kind.__name__: Raiser("block_manager_svc", 0, "reason", code)
        for kind, code in REFUSALS.items()
        if "__init__" not in vars(kind)  # which knows its reason itself
    } | {"ErrorInfo": Raiser("block_manager_svc", -1, "reason", "INTERNAL")}


def functions_of(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Every function, with the class that it is a method of, or ""."""
    owner = {child: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, owner.get(node, "")  # type: ignore[misc]


def reason_argument(call: ast.Call, raiser: Raiser) -> ast.expr | None:
    if 0 <= raiser.position < len(call.args):
        return call.args[raiser.position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == raiser.name), None)


def name_of(call: ast.Call) -> str:
    """`f(…)`, `errors.f(…)` and `self.f(…)` are calls of f."""
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def passed_on(tree: ast.Module, raisers: dict[str, Raiser]) -> dict[str, Raiser]:
    """The module's functions that raise with a reason which they are given."""
    found = dict(raisers)
    for function, owner in functions_of(tree):
        parameters = [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
        offset = 1 if parameters[:1] == ["self"] else 0
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            raiser = raisers.get(name_of(call))
            argument = reason_argument(call, raiser) if raiser else None
            if raiser and isinstance(argument, ast.Name) and argument.id in parameters and owner != name_of(call):
                position = parameters.index(argument.id) - offset
                found.setdefault(function.name, Raiser(raiser.group, position, argument.id, raiser.code))
    return found if found == raisers else passed_on(tree, found)


def raised_in(package: str, path: Path) -> Iterator[Raised]:
    tree = ast.parse(path.read_text())
    known = known_raisers(package)
    raisers = passed_on(tree, known)
    own_reason = {kind.__name__: code for kind, code in REFUSALS.items() if "__init__" in vars(kind)}
    name = str(path.relative_to(ROOT))
    inside = {node: (function, owner) for function, owner in functions_of(tree) for node in ast.walk(function)}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, owner = inside.get(call, (None, ""))
        raiser = raisers.get(name_of(call))
        if ast.unparse(call.func) == "super().__init__" and owner in own_reason:
            raiser = Raiser("block_manager_svc", 0, "reason", own_reason[owner])
        if raiser is None or (argument := reason_argument(call, raiser)) is None:
            continue
        if isinstance(argument, ast.Constant):
            code = ast.unparse(call.args[1]).rpartition(".")[2] if raiser.code == "" else raiser.code
            numbers = [keyword.arg for keyword in call.keywords]
            yield Raised(
                raiser.group,
                name,
                argument.value,
                code,
                frozenset(
                    number for number in numbers if number not in (None, "retry_after", "numbers", "reason", "domain")
                ),  # type: ignore[arg-type]
                None in numbers or name_of(call) in raisers.keys() - known.keys(),
            )
        elif not (isinstance(argument, ast.Name) and function is not None and function.name in raisers):
            # What a status carries, as it came, is no reason of this module's own.
            assert ast.unparse(argument) in ("info.reason", "refused.reason", "code", "reason"), (
                f"{name}:{call.lineno}: this test cannot read the reason {ast.unparse(argument)}"
            )


def everything_raised() -> list[Raised]:
    roots = {
        "block_manager_svc": "block_manager_svc",
        "gpu_executor": "gpu_executor",
        "pagedkv": "clients/python/pagedkv",
    }
    return [
        raised
        for package, folder in roots.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "v1" not in path.parts
        for raised in raised_in(package, path)
    ]


RAISED = everything_raised()


# --- what is written ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    reason: str
    code: str
    numbers: frozenset[str]


def documented() -> dict[str, list[Entry]]:
    """The tables of docs/errors.md, by their section. Code and Numbers are absent where there are none."""
    sections: dict[str, list[Entry]] = defaultdict(list)
    title, columns = "", []
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        if line.startswith("## "):
            title, columns = line[3:].strip(), []
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not columns:
                columns = cells
            elif not set(cells[0]) <= set("-: "):
                assert len(cells) == len(columns), line
                row = dict(zip(columns, cells, strict=True))
                assert all(row.values()), f"an empty cell: {line}"
                numbers = frozenset(re.findall(r"`(\w+)`", row.get("Numbers", "")))
                sections[title].append(Entry(row["Reason"], row.get("Code", NO_CODE), numbers))
    return sections


def proto_tables() -> dict[str, list[tuple[str, str]]]:
    """The table above each rpc and each service, by its name: (reason, code)."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "protos" / "pagedkv" / "v1").glob("*.proto")):
        rows: list[tuple[str, str]] = []
        for line in path.read_text().splitlines():
            if row := re.match(r"\s*// \| ([A-Z][A-Z0-9_]+) +\| ([A-Z_]+) +\| \S", line):
                rows.append((row[1], row[2]))
            elif named := re.match(r"\s*(?:rpc|service) (\w+)", line):
                tables[named[1]], rows = rows, []
    return tables


DOCUMENTED = documented()
PROTOS = proto_tables()


@pytest.mark.parametrize("group", SECTIONS)
def test_what_is_raised_is_documented_with_its_code_and_the_other_way_round(group: str) -> None:
    raised = {(one.reason, one.code) for one in RAISED if one.group == group}
    written = {(entry.reason, entry.code) for section in SECTIONS[group] for entry in DOCUMENTED[section]}
    assert len(raised) >= 5
    assert raised == written


def test_every_section_is_checked_and_lists_a_reason_once() -> None:
    assert set(DOCUMENTED) == {section for sections in SECTIONS.values() for section in sections}
    for section, entries in DOCUMENTED.items():
        rows = [(entry.reason, entry.code) for entry in entries]
        assert sorted(set(rows)) == sorted(rows), section


@pytest.mark.parametrize("group", ["block_manager_svc", "gpu_executor/rpc"])
def test_the_numbers_that_come_with_a_reason_are_documented(group: str) -> None:
    entries = [entry for section in SECTIONS[group] for entry in DOCUMENTED[section]]
    for reason in {entry.reason for entry in entries}:
        sites = [one for one in RAISED if (one.group, one.reason) == (group, reason)]
        given = frozenset().union(*(one.numbers for one in sites))
        written = frozenset().union(*(entry.numbers for entry in entries if entry.reason == reason))
        assert given == written or (given < written and any(one.more_numbers for one in sites)), reason


def test_the_protos_tables_are_those_of_the_document() -> None:
    for name, section in TABLES.items():
        assert sorted(PROTOS[name]) == sorted((entry.reason, entry.code) for entry in DOCUMENTED[section]), name
    rows = {row for rpc in BLOCK_MANAGER for row in PROTOS[rpc]}
    assert rows == {(entry.reason, entry.code) for entry in DOCUMENTED[", ".join(BLOCK_MANAGER)]}


@pytest.mark.parametrize("path", SERVED_BY)
def test_what_a_servicer_raises_is_in_the_table_of_its_rpc(path: str) -> None:
    raised = {(one.reason, one.code) for one in RAISED if one.path == path and one.code != NO_CODE}
    assert raised
    assert raised <= {row for name in SERVED_BY[path] for row in PROTOS[name]}


def test_every_module_of_the_service_that_raises_is_assigned_to_its_rpcs() -> None:
    paths = {one.path for one in RAISED if one.group in ("block_manager_svc", "gpu_executor/rpc")}
    assert {path for path in paths if not path.startswith("block_manager_svc/core/")} == set(SERVED_BY)
