"""Where the device's memory is too small for a batch, find_batch_size finds one that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from device.on_device.deep import WEIGHTS, WIDTH, Deep, Squares, adamw
from torch.utils.data import DataLoader, TensorDataset

import zae
from gpu.report import Report
from gpu.settings import DEVICE, IS_EMULATED, SMALL, free_memory

ROWS = 2048 if SMALL else 65536
LIMIT = 6 * WEIGHTS + (1 << 23 if SMALL else 1 << 30)
"""Bytes: the state of the training (4), what a step takes beside it, and activations of a small part of the rows."""


def run(report: Report) -> None:
    """Look for a batch size where the loader's does not fit."""
    with report.guard("find_batch_size"), limited_memory():
        trainer = Squares(Deep, DEVICE, optimizer=adamw, seed=0, log_bar=False)
        rows = torch.randn(ROWS, WIDTH)
        found = zae.find_batch_size(trainer, DataLoader(Rows(rows), batch_size=ROWS))
        report.check("find_batch_size", found.micro_batch_size < ROWS, str(found))
    free_memory()


class Rows(TensorDataset):
    """Samples that are tensors, not tuples of one."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.tensors[0][index]


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let the device have no more memory than the limit."""
    free_memory()
    if IS_EMULATED:
        from emulation import core

        core().set_limit(torch.cuda.memory_allocated() + LIMIT)
    else:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LIMIT) / total)
    try:
        yield
    finally:
        if IS_EMULATED:
            core().set_limit(0)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)
