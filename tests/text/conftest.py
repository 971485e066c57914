from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_files(smollm2_gguf: Path, model_cache: Path) -> dict[str, bytes]:
    """What SmolLM2's executor sends with its hello."""
    from gpu_executor.model.gguf import converted_folder
    from gpu_executor.model.loader import _files

    return _files(converted_folder(smollm2_gguf, model_cache))
