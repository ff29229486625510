"""The runner's page table: on the device for the kernels, with a mirror on the host for planners."""

from __future__ import annotations

import numpy as np
import torch

from radixserve.engine.step import Int32s
from radixserve.engine.transfer import to_device


class PageTable:
    """``host`` and ``tensor``: int32 [max_rows, max_pages], the same memory on the CPU."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device):
        self.host: Int32s = np.zeros((max_rows, max_pages), np.int32)
        self.tensor = torch.from_numpy(self.host).to(device)
        self._device = device

    def write(self, rows: Int32s, cols: Int32s, page_ids: Int32s) -> None:
        """Set ``table[row, col] = page``, on the device in the order of the current stream: one copy, one scatter."""
        self.host[rows, cols] = page_ids
        count = len(rows)
        if self._device.type == "cpu" or not count:
            return
        packed = np.empty(3 * count, np.int32)
        packed[: 2 * count].view(np.int64)[:] = rows.astype(np.int64) * self.host.shape[1] + cols
        # A cell written twice has its last value both times, so that the order of writes on the device does not matter.
        packed[2 * count :] = self.host[rows, cols]
        on_device = to_device(packed, self._device)
        self.tensor.view(-1).index_copy_(0, on_device[: 2 * count].view(torch.int64), on_device[2 * count :])
