"""The child's end of the lifeline, in a real process."""

from __future__ import annotations

import subprocess
import sys

from radixserve.configs.schema import ServeConfig

CHILD = """
import threading
from radixserve.engine import lifeline
config = lifeline.read_config()
print(config.api_key[0].get_secret_value(), flush=True)
lifeline.watch(lambda seconds: print("drain", seconds, flush=True))
threading.Event().wait()
"""


def test_a_child_without_a_supervisor_says_how_it_is_meant_to_be_started() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert child.returncode != 0
    assert "started by `radixserve serve`" in child.stderr


def test_a_child_obeys_its_lifeline_and_leaves_at_its_end() -> None:
    config = ServeConfig.model_validate({"api_key": ["k-1"]})
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=f"{config.to_private_json()}\ndrain 2.5\nnonsense\ndrain 0\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0
    assert child.stdout.splitlines() == ["k-1", "drain 2.5", "drain 0.0"]
    assert "unknown command b'nonsense'" in child.stderr
