"""The request to stop: all ranks obey at the same call, one after it was made, and in a meeting at once."""

from __future__ import annotations

import random
import time

import pytest
import torch.distributed as dist

from kit.ranks import each_rank
from zae.distributed.stop_flag import StopFlag


def gather(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def obey(asks, waits_at):
    """Return at which of 40 calls this rank obeyed, and what for; ``asks`` holds by rank at which calls it asks."""
    rank, flag, found = dist.get_rank(), StopFlag(), {}
    rng = random.Random(rank)
    for call in range(40):
        time.sleep(rng.choice([0, 0, 1e-4, 2e-3]))
        if call in asks.get(rank, ()):
            flag.reason = f"asked at {call} by {rank}"
            flag.requests.add(f"by {rank}")
        if (agreed := flag.agree(call in waits_at, gather)) != (None, []):
            found[call] = agreed
    flag.drop(is_failing=False)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_all_obey_at_the_call_after_the_request(world):
    """Without another collective between the calls, and in a meeting at once."""
    last = world - 1
    asks = {0: (5, 20), last: (5, 6, 30, 39)}
    found = each_rank(world, obey, asks, (10, 30))
    both = ["by 0", f"by {last}"]
    assert found[0] == {
        6: ("asked at 5 by 0", both),
        21: ("asked at 20 by 0", ["by 0"]),
        30: (f"asked at 30 by {last}", [f"by {last}"]),
    }
    assert found == found[:1] * world
