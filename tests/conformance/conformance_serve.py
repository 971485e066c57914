"""Brings up the pool that a scenario of clients/conformance asks for, for runners in any language.

Reads lines of JSON, {"pool": {…}} each, and writes {"address": "host:port"} when that pool is there: a real service,
and an executor that applies every step at once and computes nothing. Ends, and all of it, at the end of its input.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.processes import Process, free_port

from pagedkv.v1 import executor_link_pb2 as pb
from pagedkv.v1 import executor_link_pb2_grpc

EXECUTOR_TOKEN = "the-executor-of-the-scenarios"
_LIVE = "pagedkv.v1.ExecutorLinkService"


class Executor:
    """One boot: says hello with the pool's geometry, and answers each step."""

    def __init__(self, address: str, pool: dict[str, Any]) -> None:
        self._boot = uuid.uuid4().hex
        self._messages: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._named = ("", 0)
        self._accepted = 0
        self._welcomed = threading.Event()
        self._channel = grpc.insecure_channel(address)
        metadata = (("authorization", f"Bearer {EXECUTOR_TOKEN}"),)
        self._say(hello=_hello(pool))
        stub = executor_link_pb2_grpc.ExecutorLinkServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.Attach(self._outgoing(), metadata=metadata)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_attached(self) -> None:
        if not self._welcomed.wait(30):
            raise TimeoutError("the service did not welcome the executor within 30 s")

    def close(self) -> None:
        self._messages.put(None)
        self._call.cancel()
        self._thread.join(10)
        self._channel.close()

    def _say(self, **message: Any) -> None:
        service_id, epoch = self._named
        self._messages.put(pb.AttachRequest(service_id=service_id, epoch=epoch, boot_id=self._boot, **message))

    def _outgoing(self) -> Iterator[pb.AttachRequest]:
        while True:
            try:
                message = self._messages.get(timeout=0.5)
            except queue.Empty:
                if not self._welcomed.is_set():
                    continue
                service_id, epoch = self._named
                beat = pb.Heartbeat(accepted=self._accepted, completed=self._accepted)
                message = pb.AttachRequest(service_id=service_id, epoch=epoch, boot_id=self._boot, heartbeat=beat)
            if message is None:
                return
            yield message

    def _serve(self) -> None:
        try:
            for message in self._call:
                self._named = message.service_id, message.epoch
                kind = message.WhichOneof("message")
                if kind == "welcome":
                    self._welcomed.set()
                elif kind == "step":
                    self._accepted = message.step.step_id
                    self._say(result=pb.StepResult(step_id=message.step.step_id))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                sys.stderr.write(f"the executor's stream ended: {error}\n")


def _hello(pool: dict[str, Any]) -> pb.Hello:
    return pb.Hello(
        rank=0,
        world_size=1,
        geometry=pb.Geometry(
            num_blocks=pool["blocks"],
            num_host_blocks=pool.get("host_slots", 0),
            block_size=pool["block_size"],
            num_layers=1,
            num_kv_heads=1,
            key_head_dim=1,
            value_head_dim=1,
            dtype="float32",
            block_bytes=8 * pool["block_size"],
            layout_hash=bytes(32),
        ),
        max_rows=16,
        max_batch_tokens=256,
        max_blocks_per_row=pool["blocks"] - 1,
        model=pb.ModelDescription(
            id="none", vocab_size=1000, max_context=1000, eos_token_ids=[1], fingerprint=bytes(32)
        ),
    )


class Pools:
    """A service process for each kind of settings; an executor of its own for each pool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: dict[str, tuple[Process, str]] = {}
        self._executor: Executor | None = None

    def bring_up(self, pool: dict[str, Any]) -> str:
        if self._executor is not None:
            self._executor.close()
        address = self._service(pool)
        self._executor = Executor(address, pool)
        self._executor.wait_attached()
        return address

    def _service(self, pool: dict[str, Any]) -> str:
        """Quotas outlive a pool, so who has callers has a service to itself."""
        settings = {name: pool.get(name) for name in ("eviction", "watermark", "callers", "shares")}
        key = json.dumps(settings) if not pool.get("callers") else uuid.uuid4().hex
        if key not in self._services:
            address = f"127.0.0.1:{free_port()}"
            arguments = ["--listen", address, "--eviction", pool.get("eviction", "lru"), "--executor-grace", "1"]
            arguments += ["--watermark", str(pool.get("watermark", 0))]
            if callers := pool.get("callers"):
                arguments += ["--tokens-file", str(self._tokens(callers, pool.get("shares", {})))]
            own = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDKV_")}
            process = Process("block_manager_svc", arguments, self._folder / f"service-{len(self._services)}.log", own)
            self._services[key] = process, address
            process.wait_until_serving(address, _LIVE)
        return self._services[key][1]

    def _tokens(self, callers: dict[str, str], shares: dict[str, list[str]]) -> Path:
        stand_for = callers | {EXECUTOR_TOKEN: "executors executor"}
        lines = [f"token {hashlib.sha256(token.encode()).hexdigest()} {who}" for token, who in stand_for.items()]
        lines += [f"share {group} {' '.join(tenants)}" for group, tenants in shares.items()]
        path = self._folder / f"tokens-{len(self._services)}"
        path.write_text("\n".join(lines))
        path.chmod(0o600)
        return path

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        for process, _ in self._services.values():
            process.kill()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        pools = Pools(Path(folder))
        try:
            for line in sys.stdin:
                address = pools.bring_up(json.loads(line)["pool"])
                sys.stdout.write(json.dumps({"address": address}) + "\n")
                sys.stdout.flush()
        finally:
            pools.close()


if __name__ == "__main__":
    main()
