"""Runs scenarios of clients/conformance; see the README there. Nothing here knows what is right: the files say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagedkv.v1 import block_manager_pb2 as pb
from pagedkv.v1 import block_manager_pb2_grpc

Json = Any

_DTYPES = {
    **dict.fromkeys(("counts", "lookahead", "upto", "lengths", "cached", "slot_indptr", "shortfall"), "<u4"),
    **dict.fromkeys(("copy_src", "copy_dst", "of", "positions", "place", "namespace"), "<u4"),
    **dict.fromkeys(("sequences", "pins", "reservations", "slots", "out", "back", "sequence"), "<u8"),
    **dict.fromkeys(("table_sequence", "table_revision"), "<u8"),
    **dict.fromkeys(("tokens", "token_ids"), "<i4"),
    "kind": "u1",
}
_REFERENCE = re.compile(r"@(\d+)(?:\.(\d+))?")
_EVENT_FIELDS = {
    "BLOCK_STORED": ("place", "tokens"),
    "BLOCK_MOVED": ("place",),
    "BLOCK_REMOVED": ("place",),
    "CACHE_RESET": (),
    "SEQUENCE_CREATED": ("sequence",),
    "SEQUENCE_ENDED": ("sequence",),
    "TABLE_CHANGED": ("sequence", "revision"),
}
_COLUMN_OF = {"revision": "table_revision"}


class Mismatch(AssertionError):
    """The message says where, what was expected and what came."""


class Scenario:
    def __init__(self, scenario: Mapping[str, Json], address: str) -> None:
        self._scenario = scenario
        self._channel = grpc.insecure_channel(address)
        self._stub = block_manager_pb2_grpc.BlockManagerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._saved: dict[str, int] = {}
        self._watches: dict[str, tuple[Any, list[dict[str, Json]]]] = {}

    def run(self) -> None:
        """Raises Mismatch."""
        try:
            for number, step in enumerate(self._scenario["steps"]):
                try:
                    self._step(step)
                except Mismatch as mismatch:
                    raise Mismatch(f"{self._scenario['title']!r}, step {number}: {mismatch}") from None
            auditor = "auditor" if self._scenario["pool"].get("callers") else None
            violations = list(self._call("Audit", {}, auditor).violations)
            if violations:
                raise Mismatch(f"{self._scenario['title']!r}: the audit found {violations}")
        finally:
            self._channel.close()

    def _step(self, step: Mapping[str, Json]) -> None:
        if "call" in step:
            self._check_call(step)
        elif "tables" in step:
            self._check_tables(step["tables"], step.get("as"))
        elif "watch" in step:
            self._watch(step)
        else:
            self._check_events(step["of"], step["events"])

    # --- calls --------------------------------------------------------------------------------------------------------

    def _check_call(self, step: Mapping[str, Json]) -> None:
        try:
            reply = self._call(step["call"], step.get("send", {}), step.get("as"))
        except grpc.RpcError as error:
            self._check_error(error, step.get("error"))
            return
        if "error" in step:
            raise Mismatch(f"{step['call']} was to be refused with {step['error']}, it answered {reply}")
        told = _from_message(reply)
        self._match(step.get("expect", {}), told, "")
        for i, result in enumerate(told.get("results", [])):
            named = step.get("expect", {}).get("results", [])
            if result.get("error") and not (i < len(named) and "error" in named[i]):
                raise Mismatch(f"results.{i} has an error: {result['error']}")
        for name, path in step.get("save", {}).items():
            self._saved[name] = _at(told, path)

    def _call(self, method: str, send: Json, token: str | None) -> Any:
        request = getattr(pb, f"{method}Request")()
        self._fill(request, send)
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        return getattr(self._stub, method)(request, timeout=30, metadata=metadata)

    def _check_error(self, error: grpc.RpcError, expected: Json) -> None:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        info = error_details_pb2.ErrorInfo()
        for detail in status.details if status else ():
            detail.Unpack(info)
        came = {"code": error.code().name, "reason": info.reason, "numbers": dict(info.metadata)}  # type: ignore[attr-defined]
        if expected is None:
            raise Mismatch(f"refused: {came}, {error.details()}")  # type: ignore[attr-defined]
        self._match(expected, came, "error")

    def _check_tables(self, tables: Mapping[str, list[int]], token: str | None) -> None:
        for name, blocks in tables.items():
            reply = self._call("GetBlockTables", {"sequence": [name]}, token)
            if list(reply.indices) != blocks:
                raise Mismatch(f"the table of {name} is {list(reply.indices)}, {blocks} are expected")

    # --- events -------------------------------------------------------------------------------------------------------

    def _watch(self, step: Mapping[str, Json]) -> None:
        request = pb.WatchEventsRequest()
        self._fill(request, step.get("send", {}))
        metadata = (("authorization", f"Bearer {step['as']}"),) if "as" in step else None
        call = self._stub.WatchEvents(request, timeout=60, metadata=metadata)
        snapshot: list[dict[str, Json]] = []
        for message in call:
            snapshot += _events(message)
            if message.phase == pb.WATCH_PHASE_SNAPSHOT_END:
                break
        self._watches[step["watch"]] = call, []
        if "expect" in step:
            self._match(step["expect"], snapshot, "snapshot")

    def _check_events(self, name: str, expected: list[Json]) -> None:
        call, waiting = self._watches[name]
        while len(waiting) < len(expected):
            try:
                waiting += _events(next(call))
            except (grpc.RpcError, StopIteration) as error:
                raise Mismatch(f"the watch ended: {error}") from None
        told, waiting[:] = waiting[: len(expected)], waiting[len(expected) :]
        self._match(expected, told, "events")

    # --- values -------------------------------------------------------------------------------------------------------

    def _fill(self, message: Message, value: Mapping[str, Json]) -> None:
        for name, given in value.items():
            field = message.DESCRIPTOR.fields_by_name[name]
            if field.message_type is not None and field.is_repeated:
                for each in given:
                    self._fill(getattr(message, name).add(), each)
            elif field.message_type is not None:
                getattr(message, name).SetInParent()
                self._fill(getattr(message, name), given)
            elif field.type == field.TYPE_BYTES and not field.is_repeated:
                column = np.array(
                    [self._number(each) for each in given], np.uint64 if _DTYPES[name] == "<u8" else np.int64
                )
                setattr(message, name, column.astype(_DTYPES[name]).tobytes())
            elif field.type == field.TYPE_BYTES:
                getattr(message, name).extend(each.encode() for each in given)
            elif field.is_repeated:
                getattr(message, name).extend(self._number(each) for each in given)
            else:
                setattr(message, name, self._number(given))

    def _number(self, value: Json) -> Json:
        if not isinstance(value, str):
            return value
        if value.startswith("$"):
            return self._saved[value[1:]]
        if found := _REFERENCE.fullmatch(value):
            return 1 << 63 | int(found[1]) << 32 | int(found[2] or 0)
        return value

    def _match(self, expected: Json, came: Json, path: str) -> None:
        if isinstance(expected, Mapping):
            for name, each in expected.items():
                self._match(
                    each, (came or {}).get(name) if isinstance(came, Mapping | None) else came, f"{path}.{name}"
                )
        elif isinstance(expected, list):
            came = came or []
            if len(came) != len(expected):
                raise Mismatch(f"{path.strip('.')} is {came}, {expected} is expected")
            for i, (each, there) in enumerate(zip(expected, came, strict=True)):
                self._match(each, there, f"{path}.{i}")
        elif _plain(self._number(expected)) != _plain(came):
            raise Mismatch(f"{path.strip('.')} is {came!r}, {expected!r} is expected")


def _plain(value: Json) -> Json:
    """Absent, zero, false and empty are one, as proto3 has it; numbers of metadata come as text."""
    if value in (None, "", 0, False, [], {}):
        return None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _from_message(message: Message) -> dict[str, Json]:
    told: dict[str, Json] = {}
    for field, value in message.ListFields():
        convert: Callable[[Any], Json] = _from_message if field.message_type is not None else lambda each: each
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            told[field.name] = dict(value)
        elif field.type == field.TYPE_BYTES and not field.is_repeated:
            dtype = _DTYPES.get(field.name)
            told[field.name] = np.frombuffer(value, dtype).tolist() if dtype else value.hex()
        elif field.type == field.TYPE_ENUM:
            names = field.enum_type.values_by_number
            told[field.name] = [names[each].name for each in value] if field.is_repeated else names[value].name
        elif field.is_repeated:
            told[field.name] = [convert(each) for each in value]
        else:
            told[field.name] = convert(value)
    return told


def _events(message: pb.WatchEventsResponse) -> list[dict[str, Json]]:
    columns = {
        name: iter(np.frombuffer(getattr(message, name), _DTYPES[name]).tolist())
        for name in _DTYPES
        if hasattr(message, name)
    }
    events = []
    for number in message.kind:
        kind = pb.EventKind.Name(number).removeprefix("EVENT_KIND_")
        event: dict[str, Json] = {"kind": kind}
        for name in _EVENT_FIELDS[kind]:
            if name == "tokens":
                event[name] = [next(columns[name]) for _ in range(message.block_size)] if message.tokens else []
            else:
                event[name] = next(columns[_COLUMN_OF.get(name, name)])
        events.append(event)
    return events


def _at(told: Json, path: str) -> int:
    for key in path.split("."):
        told = told[int(key)] if isinstance(told, list) else told[key]
    assert isinstance(told, int), f"{path} is {told!r}, no number"
    return told
