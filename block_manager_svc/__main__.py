"""`block-manager`: the service's command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from block_manager_svc import command
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "block_manager_svc":
            raise
        sys.exit(f"block-manager needs {error.name}, which is not installed: pip install 'pagedkv[service]'")
    command.app()


if __name__ == "__main__":
    main()
