"""An engine process with the fake runner instead of a model: ``fake_engine_process.py ADDRESS HOW``."""

import faulthandler
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from radixserve.configs.schema import ServeConfig
from radixserve.engine.built import BuiltEngine
from radixserve.engine.errors import ModelError
from radixserve.engine.process import serve
from radixserve.engine.scheduler import SchedulerLimits
from radixserve.engine.step import StepPlan
from radixserve.tests.engine.fakes import EOS, FakeGrammars, Harness


def hang(plan: StepPlan) -> NoReturn:
    while True:
        time.sleep(60)


def build(config: ServeConfig, progress: Callable[[str, float], None]) -> BuiltEngine:
    """Loads for a while, then is ready or fails, as the command line says."""
    for part in range(12):
        progress("loading weights", part / 12)
        time.sleep(0.1)
    if sys.argv[2] == "no-model":
        raise ModelError("no file called model.safetensors; download the model first")
    if sys.argv[2] == "crash":
        raise RuntimeError("a bug")
    harness = Harness()
    if sys.argv[2] == "deadlock":
        harness.runner.launch = hang  # type: ignore[method-assign]
    limits = SchedulerLimits(max_model_len=512, vocab_size=50, step_tokens=64, eos_token_ids=(EOS,))
    return BuiltEngine(harness.runner, harness.cache, FakeGrammars(), limits, True, False, "a fake")


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(serve(ServeConfig(), sys.argv[1], build))
