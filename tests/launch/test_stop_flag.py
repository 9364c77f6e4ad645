"""The request to stop: all ranks obey at the same call, one after it was made, whichever way it is exchanged."""

from __future__ import annotations

import random
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from kit.ranks import each_rank, on_ranks
from zae import DistributedError
from zae.launch.stop_flag import StopFlag


def gather(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def obey(folder, asks, waits_at):
    """Return at which of 40 calls this rank obeyed, and what for; ``asks`` holds by rank at which calls it asks."""
    tempfile.tempdir = str(folder)
    rank, flag, found = dist.get_rank(), StopFlag(), {}
    rng = random.Random(rank)
    for call in range(40):
        time.sleep(rng.choice([0, 0, 1e-4, 2e-3]))
        if call in asks.get(rank, ()):
            flag.reason = f"asked at {call} by {rank}"
            flag.requests.add(f"by {rank}")
        if (agreed := flag.agree(call in waits_at, gather, 20.0)) != (None, []):
            found[call] = agreed
    flag.drop(is_failing=False)
    return found


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_all_obey_at_the_call_after_the_request(world, shares_memory, tmp_path):
    """Without another collective between the calls, and in a meeting at once; no file is left."""
    folder, last = tmp_path if shares_memory else tmp_path / "absent", world - 1
    asks = {0: (5, 20), last: (5, 6, 30, 39)}
    found = each_rank(world, obey, folder, asks, (10, 30))
    both = ["by 0", f"by {last}"]
    assert found[0] == {
        6: ("asked at 5 by 0", both),
        21: ("asked at 20 by 0", ["by 0"]),
        30: (f"asked at 30 by {last}", [f"by {last}"]),
    }
    assert found == found[:1] * world
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named(world):
    flag = StopFlag()
    assert flag.agree(False, gather, 0.2) == (None, [])  # The time limit of all calls.
    dist.barrier()
    if dist.get_rank() == 0:
        assert flag.agree(False, gather, 0.2) == (None, [])
        with pytest.raises(DistributedError, match=r"rank 1 has not ended its step within timeout=0.2 s"):
            flag.agree(False, gather, 0.2)
    dist.all_reduce(torch.zeros(1))
