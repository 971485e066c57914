"""Generates pagedkv.v1 from protos/, or says whether what is committed is what would be generated.

    python .ci/stubs.py write
    python .ci/stubs.py check

The generator's version is in its output; pyproject.toml pins it exactly for that reason.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUT = ROOT / "clients" / "python"
PACKAGE = Path("pagedkv") / "v1"


def generate(out: Path) -> None:
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *sorted(str(path) for path in (PROTOS / PACKAGE).glob("*.proto")),
        ]
    )
    if status != 0:
        sys.exit(f"stubs: protoc failed with status {status}")


def stubs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / PACKAGE).glob("*_pb2*.py*")}


def main() -> None:
    if sys.argv[1:] not in (["write"], ["check"]):
        sys.exit(__doc__)
    if sys.argv[1] == "write":
        generate(OUT)
        return
    with tempfile.TemporaryDirectory() as temporary:
        generate(Path(temporary))
        fresh, committed = stubs(Path(temporary)), stubs(OUT)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if stale:
        sys.exit(f"stubs: out of date, run `make protos`: {', '.join(stale)}")
    print(f"stubs: {len(fresh)} generated files are up to date")


if __name__ == "__main__":
    main()
