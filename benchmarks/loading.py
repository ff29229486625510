"""Loading a model beside reading its files: `python benchmarks/loading.py CONFIG_JSON|MODEL [--device cuda]`.

A config.json stands for a checkpoint of that shape: random bf16 weights in shards, written to ``--folder`` and deleted
in the end (with ``--keep`` they stay, to be given as MODEL). Reading is done by as many threads as loading, past the
page cache where the file system can. Both are then repeated with all files in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine.build import ignore_progress
from radixserve.engine.decoder import Decoder, create_model
from radixserve.engine.design import Design
from radixserve.engine.load_model import load_model
from radixserve.engine.model_config import load_spec
from radixserve.engine.model_files import resolve_model
from radixserve.engine.sharding import Shard
from radixserve.engine.weight_packing import model_bytes
from radixserve.engine.weights import weight_places
from radixserve.kernels.native_ops import NativeOps

SHARD_BYTES = 4 << 30
BLOCK_BYTES = 16 << 20
POOL_VALUES = 1 << 25  # of which all weights are pieces
READERS = 8


def write_checkpoint(folder: Path, config: Path, num_layers: int | None) -> None:
    """Random weights of the shape of ``config``, with ``num_layers`` instead of its layers."""
    changes = {} if num_layers is None else {"num_hidden_layers": num_layers, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(json.loads(config.read_text()) | changes))
    spec = load_spec(resolve_model(str(folder), "dummy"))
    places = weight_places(create_model(spec, torch.bfloat16, torch.device("meta"), 1))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, place in places.items():
        if (room := room - 2 * place.shape.numel()) < 0 and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tuple(place.shape)
    normal = np.random.default_rng(0).standard_normal(POOL_VALUES, np.float32)
    pool = memoryview(((0.02 * normal).view(np.uint32) >> 16).astype(np.uint16)).cast("B")
    for number, shapes in enumerate(shards):
        _write_shard(folder / f"model-{number:05}.safetensors", shapes, pool)


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], pool: memoryview) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(pool)):
            file.write(pool[: end - start])
        file.flush()
        os.fsync(file.fileno())


def read(paths: Sequence[Path], flags: int) -> None:
    """All of ``paths`` by several threads, blocks in the order of the files."""
    files = [(os.open(path, os.O_RDONLY | flags), path.stat().st_size) for path in paths]
    local = threading.local()

    def read_block(file: int, start: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, BLOCK_BYTES)  # aligned, as reading past the page cache asks for
        os.preadv(file, [local.buffer], start)

    with ThreadPoolExecutor(READERS) as threads:
        blocks = [(file, start) for file, size in files for start in range(0, size, BLOCK_BYTES)]
        for result in [threads.submit(read_block, *block) for block in blocks]:
            result.result()
    for file, _ in files:
        os.close(file)


def read_uncached(paths: Sequence[Path]) -> None:
    try:
        read(paths, os.O_DIRECT)
    except OSError:  # the file system cannot
        drop(paths)
        read(paths, 0)


def drop(paths: Sequence[Path]) -> None:
    """From the page cache, as far as the kernel obeys."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(paths: Sequence[Path]) -> str:
    """Of the files, by looking at a byte of each block."""
    found: list[bool] = []
    for path in paths:
        with path.open("rb") as file:
            for start in range(0, path.stat().st_size, BLOCK_BYTES):
                try:
                    found.append(os.preadv(file.fileno(), [bytearray(1)], start, os.RWF_NOWAIT) == 1)
                except BlockingIOError:
                    found.append(False)
                except OSError:
                    return "unknown how much"
    return f"{sum(found) / len(found):.0%}"


def load(config: ServeConfig) -> Decoder:
    """As a server does."""
    design = Design.of(config, Shard(), ignore_progress)
    kernels, sizes = design.kernels, design.sizes
    packing = config.cpu_weights if isinstance(kernels.ops, NativeOps) else None
    what = (config, design.files, design.spec, kernels.dtype, sizes.device, sizes.max_model_len, packing)
    model = load_model(*what, ignore_progress, design.shard)
    if sizes.device.type == "cuda":
        torch.cuda.synchronize()
    return model


@contextmanager
def peak_of_own_bytes(interval_s: float = 0.005) -> Iterator[list[int]]:
    """Scope during which the most that ``own_bytes`` gives comes into the list."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(interval_s):
            peak[0] = max(peak[0], own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def own_bytes() -> int:
    """That the process has in memory, those of mapped files not counted."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(config: ServeConfig, rounds: int) -> None:
    files = resolve_model(config.model)
    paths = [files.gguf] if files.gguf else list(files.weights)
    total = sum(path.stat().st_size for path in paths)
    if config.device == "cuda":
        torch.zeros(1, device="cuda")
    before = own_bytes()
    print(f"{total / 1e9:.2f} GB in {len(paths)} files; GB/s", flush=True)
    for is_cached in (False, True) * rounds:
        drop(paths)
        reading = timed(partial(read_uncached, paths))
        if is_cached:
            read(paths, 0)
            reading = timed(partial(read, paths, 0))
        else:
            drop(paths)
        share = cached_share(paths)
        with peak_of_own_bytes() as peak:
            started, cpu_started = time.perf_counter(), time.process_time()
            model = load(config)
            loading, computing = time.perf_counter() - started, time.process_time() - cpu_started
        num_bytes = model_bytes(model)
        del model
        gc.collect()
        print(
            f"{share} cached: reading {total / reading / 1e9:.2f}, loading {total / loading / 1e9:.2f} "
            f"({reading / loading:.0%}, {loading:.2f} s, {computing:.2f} s of cores); weights {num_bytes / 1e9:.2f} "
            f"GB; own memory, weights on a CPU included, at most {(peak[0] - before) / 1e9:.2f} GB more",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int, help="instead of those of the config.json")
    parser.add_argument("--folder", type=Path, help="in which the checkpoint is written (default: a temporary one)")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    for option in ("device", "dtype", "quantization", "cpu_weights"):
        parser.add_argument("--" + option.replace("_", "-"), default=ServeConfig.model_fields[option].default)
    options = parser.parse_args()
    config = partial(
        ServeConfig,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        cpu_weights=options.cpu_weights,
    )
    if options.model.suffix != ".json":
        measure(config(model=str(options.model)), options.rounds)
        return
    folder = Path(tempfile.mkdtemp(prefix="loading", dir=options.folder))
    try:
        seconds = timed(partial(write_checkpoint, folder, options.model, options.layers))
        print(f"written to {folder} in {seconds:.1f} s", flush=True)
        measure(config(model=str(folder)), options.rounds)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
