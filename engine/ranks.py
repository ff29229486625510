"""``Collectives`` among processes, from where they meet to where rank 0 leaves the others."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from radixserve.engine.errors import ConfigError
from radixserve.engine.peers import PeerLink, connect_peers
from radixserve.engine.sharding import Shard
from radixserve.kernels.interface import Norm

_TAKE_DOWN_S = 3.0

_log = logging.getLogger(__name__)


class Background:
    """A thread that runs one job after another, for those that may never return: nobody has to wait for it, also not
    the end of the process (whose handlers could start no thread any more)."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="background", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> threading.Event:
        """Run ``job`` after those before it; set once it has ended."""
        ended = threading.Event()

        def run() -> None:
            try:
                job()
            except Exception:
                _log.exception("taking down what ties the ranks failed")
            ended.set()

        self._jobs.put(run)
        return ended

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class TorchRanks:
    """``Collectives`` of torch.distributed: NCCL between GPUs, gloo between processes on a CPU. Owns the process's
    default group from ``meet`` to ``leave``.

    To destroy NCCL's communicator would wait for the other ranks to do the same, who leave their process instead. So it
    is aborted, in the background. It lives until all graphs that contain its operations are destroyed, which there are
    only where it makes all sums: whoever owns graphs releases them before ``leave``. Nor may they hold buffers that
    other ranks have opened: it would ask these, when they are gone, to close them.
    """

    def __init__(self, shard: Shard, device: torch.device, decode_bytes: int = 0, *, only_nccl: bool = False):
        """``decode_bytes``: of a sum that a graph of decodes needs. ``only_nccl``: kernels of ours shall make none."""
        self._decode_bytes = decode_bytes
        self._only_nccl = only_nccl
        self._shard = shard
        self._device = device
        self._background = Background()
        self._met = False
        self._peers: PeerLink | None = None

    def meet(self, meeting: Path) -> None:
        """Blocks until all ranks are there, who find each other by files in ``meeting``."""
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")  # all ranks are on this host
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # see above
        # Torch would end the process when it sees that another rank is gone; that is ``Team``'s to see. Nor shall it
        # ask the others each second what they see: once ``meeting`` is gone it would wait for its file for minutes,
        # and whoever takes the group down for it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        dist.init_process_group(
            "nccl" if self._on_gpu else "gloo",
            init_method=f"file://{meeting}/store",
            rank=self._shard.rank,
            world_size=self._shard.size,
            device_id=self._device if self._on_gpu else None,
        )
        self._met = True
        self.least(0)  # NCCL connects with the first collective, which must not be one that is captured in a graph
        if self._on_gpu and not self._only_nccl:
            self._peers = connect_peers(self._shard, self._device, self._decode_bytes, self.all_gather)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._peers is not None and self._peers.sums.fits(tensor):
            return self._peers.sums.all_reduce(tensor)
        dist.all_reduce(tensor)
        return tensor

    def fits(self, part: Tensor) -> bool:
        """See ``RankSums``, which this implements."""
        return self._peers is not None and self._peers.sums.fits(part)

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        assert self._peers is not None
        return self._peers.sums.add_rms_norm(part, residual, norm)

    def all_gather(self, tensor: Tensor) -> Tensor:
        size = self._shard.size
        gathered = tensor.new_empty(size * len(tensor), *tensor.shape[1:])
        # Renamed in torch 2.13, where the old name warns.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, tensor)
        return gathered.view(size, *tensor.shape)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def abort(self) -> None:
        """Let those fail that wait for a rank that is gone. By any thread; returns at once."""
        group = dist.group.WORLD if self._met else None
        if group is None or not self._on_gpu:  # gloo's fail by themselves
            return
        if self._peers is not None:
            self._background.submit(self._peers.let_go)
        self._background.submit(group.abort)

    def leave(self) -> None:
        """Undo ``meet``, once no collective will follow. Waits for no other rank, and not for ever."""
        if not self._met:
            return
        self.abort()
        self._met = False
        ended = self._background.submit(
            dist.distributed_c10d._abort_process_group if self._on_gpu else dist.destroy_process_group
        )
        if self._peers is not None:
            ended = self._background.submit(self._peers.close)
            self._peers = None
        if not ended.wait(_TAKE_DOWN_S):
            _log.warning("NCCL has not let go of its memory after %.0f s; it does when this process ends", _TAKE_DOWN_S)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"


def check_no_group() -> None:
    """Raises ``ConfigError`` where the process has a default group already."""
    if dist.is_initialized():
        raise ConfigError(
            "tensor_parallel_size above 1 needs torch's default process group, which this process has set up before; "
            "close the other LLM, or use a process of its own"
        )
