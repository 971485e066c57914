"""Prints what pyproject.toml, beside it, asks for: the base dependencies and those of one extra.

python requirements.py service > requirements.txt
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
