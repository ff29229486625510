"""Shared prefixes (W3) and many streaming clients (W4, open loop) on a GPU host, with random weights and no network.

    python benchmarks/w3_w4_h200.py model FOLDER
    python benchmarks/w3_w4_h200.py run FOLDER OUT [--serve "--max-num-seqs 512 --api-workers 4"] [--only w3,w4]

``model``, where the default model is installed, makes the folder of a model without weights: the shape of Qwen3-0.6B
with a vocabulary of 49,152 and the tokenizer and chat template of SmolLM2, so that every id has a text. ``run`` writes
a JSON file and a log for each part into ``OUT`` as it goes, and leaves out what would not fit into ``--budget``
seconds. ``--small`` is a try-out for a CPU, with a model made by ``model --tiny``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from server_under_test import running_server

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 49152, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "torch_dtype": "float32"}  # fmt: skip
_CLI = (sys.executable, "-m", "radixserve.server.cli")
# Of the capacity found in closed loops. From about 1 on the queue grows as long as the load lasts.
_RATES = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Sizes:
    """How much work each part is. ``clients``: with the requests of each; ``open_loop_s``: at the capacity."""

    prefix: tuple[str, ...]
    clients: dict[int, int]
    tokens: tuple[str, ...]
    turns: tuple[str, ...]
    open_loop_s: float


_FULL = Sizes((), {16: 32, 256: 1024, 1024: 2048}, (), ("--prompt-words=32:128", "--max-tokens=32:256"), 10.0)
_SMALL = Sizes(
    ("--prefixes=4", "--requests=4", "--prefix-len=64", "--own-len=16", "--output-len=4", "--max-model-len=512"),
    {2: 4, 4: 8},
    ("--prompt-words=4:16", "--max-tokens=4:16"),
    ("--max-tokens=2:4",),
    0.5,
)


class Bench:
    """Runs the parts one after the other within ``budget_s`` seconds; their figures and logs lie in ``out``."""

    def __init__(self, model: Path, out: Path, budget_s: float, sizes: Sizes) -> None:
        self._model = ("--model", str(model), "--load-format", "dummy")
        self._out = out
        self._sizes = sizes
        self._deadline = time.monotonic() + budget_s
        self._began = time.monotonic()
        self._seed = 0

    def w3(self) -> None:
        """The radix cache first: it is what counts if time runs out."""
        for name, flags in (("w3_radix", ("--no-naive",)), ("w3_naive", ("--disable-radix-cache",))):
            self._run(name, "prefix", *self._model, *self._sizes.prefix, *flags)

    def w4(self, serve_flags: Sequence[str]) -> None:
        command = (*_CLI, "serve", *self._model, "--port={port}", "--max-num-queued-reqs=65536", *serve_flags)
        left_s = self._deadline - time.monotonic()
        with running_server(command, left_s, self._out / "server.log") as url:
            self._say("server ready")
            most = max(self._sizes.clients)
            self._load("w4_warm_up", url, f"--clients={most}", f"--requests={most}", "--max-tokens=8:16")
            for clients, requests in self._sizes.clients.items():
                self._load(f"w4_{clients}_clients", url, f"--clients={clients}", f"--requests={requests}")
            capacity = self._capacity()
            if capacity is None:
                return
            for name, turns, flags in (
                ("open_poisson", 1, ()),
                ("open_bursts", 1, ("--burstiness=0.25",)),
                ("open_turns", 4, self._sizes.turns),
            ):
                rates = ",".join(f"{capacity * share / turns:.3g}" for share in _RATES)
                requests = max(1, round(capacity / turns * self._sizes.open_loop_s))
                self._load(name, url, f"--rate={rates}", f"--requests={requests}", f"--turns={turns}", *flags)

    def _capacity(self) -> float | None:
        """Most requests a second of the closed loops."""
        paths = [self._out / f"w4_{clients}_clients.json" for clients in self._sizes.clients]
        loads = [load for path in paths if path.exists() for load in json.loads(path.read_text())["loads"].values()]
        return max((float(load["requests_per_s"]) for load in loads), default=None)

    def _load(self, name: str, url: str, *flags: str) -> None:
        """Each part has prompts of its own: those of another would be found in the prefix cache."""
        self._seed += 1000
        plot = (f"--plot={self._out / name}.png",) if find_spec("matplotlib") else ()
        seed = f"--seed={self._seed}"
        self._run(name, "serve", f"--url={url}", *self._sizes.tokens, seed, *flags, *plot)

    def _run(self, name: str, *arguments: str) -> None:
        left = self._deadline - time.monotonic()
        if left < 5:
            self._say(f"{name}: no time left")
            return
        command = (*_CLI, "bench", *arguments, f"--json={self._out / name}.json")
        with (self._out / f"{name}.log").open("w") as log:
            log.write(shlex.join(command[3:]) + "\n")
            log.flush()
            try:
                status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=left).returncode
            except subprocess.TimeoutExpired:
                status = None
        self._say(f"{name}: " + {0: "done", None: "out of time"}.get(status, f"exit status {status}"))
        print((self._out / f"{name}.log").read_text(), flush=True)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def write_model(folder: Path, tiny: bool) -> None:
    """Make the model folder from the installed default model's tokenizer and template."""
    from radixserve.configs.schema import DEFAULT_MODEL
    from radixserve.engine.gguf_reader import read_gguf
    from radixserve.engine.model_files import resolve_model
    from radixserve.engine.text.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens

    path = resolve_model(DEFAULT_MODEL).gguf
    assert path is not None, "the default model is a .gguf file"
    metadata = read_gguf(path).metadata
    folder.mkdir(parents=True, exist_ok=True)
    build_gguf_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    special = gguf_special_tokens(metadata)
    template = {"chat_template": metadata["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | template))
    (folder / "config.json").write_text(json.dumps(_CONFIG | (_TINY if tiny else {})))


def machine() -> dict[str, object]:
    """What the figures were measured on."""

    def said(*command: str) -> str | None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return None

    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "gpu": said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "command": shlex.join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model")
    model.add_argument("folder", type=Path)
    model.add_argument("--tiny", action="store_true", help="a shape for a CPU")
    run = commands.add_parser("run")
    run.add_argument("model", type=Path)
    run.add_argument("out", type=Path)
    run.add_argument("--serve", type=shlex.split, default=[], metavar="FLAGS", help="flags of the server")
    run.add_argument("--only", default="w3,w4", help="parts to run (default: %(default)s)")
    run.add_argument("--budget", type=float, default=530, metavar="S", help="(default: %(default)s)")
    run.add_argument("--open-loop", type=float, metavar="S", help="length of an open loop at capacity (default: 10)")
    run.add_argument("--small", action="store_true", help="little work")
    options = parser.parse_args()
    if options.command == "model":
        write_model(options.folder, options.tiny)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
    sizes = _SMALL if options.small else _FULL
    if options.open_loop:
        sizes = replace(sizes, open_loop_s=options.open_loop)
    bench = Bench(options.model, options.out, options.budget, sizes)
    if "w3" in options.only:
        bench.w3()
    if "w4" in options.only:
        bench.w4(options.serve)


if __name__ == "__main__":
    main()
