"""scripts/setup on machines that lack something. (That it works, every run of the tests has shown.)"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Debian's Python without the package python3-venv leaves a folder without pip behind.
PYTHON_WITHOUT_VENV = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin && touch .venv/bin/python && chmod +x .venv/bin/python
exit 1
"""


def test_without_venv_it_says_what_to_install_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy2(ROOT / "scripts" / "setup", tmp_path / "scripts")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON_WITHOUT_VENV)
    python.chmod(0o755)
    for _ in range(2):
        done = subprocess.run(
            [tmp_path / "scripts" / "setup"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHON": str(python)},
        )
        assert done.returncode == 1 and "apt install python3-venv" in done.stderr
        assert not (tmp_path / ".venv").exists()
