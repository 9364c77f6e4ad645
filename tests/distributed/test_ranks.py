"""The tool that runs tests on several ranks: it reports each rank that fails, is killed or hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from kit.ranks import MOST_PATIENCE, each_rank, on_ranks, patience


@on_ranks(2, 4)
def test_all_ranks_run_the_test(world, tmp_path):
    assert os.environ["RANK"] == str(dist.get_rank())
    (tmp_path / os.environ["RANK"]).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world == dist.get_world_size()


def test_the_result_of_each_rank_is_returned():
    assert each_rank(3, lambda number: number + dist.get_rank(), 5) == [5, 6, 7]


def misbehave(how):
    if dist.get_rank() == 1:
        assert how != "fail", "as told"
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("fail", r"^rank 1 of 2: Traceback(.|\n)*AssertionError: as told"),
        ("die", r"^rank 1 of 2: ended with -9"),
        ("hang", r"^rank 0 of 2: Traceback(.|\n)*all_reduce(.|\n)*[Tt]imed out"),
    ],
    ids=["fail", "die", "hang"],
)
def test_a_rank_that_fails_fails_the_test(how, reported):
    with pytest.raises(AssertionError, match=reported):
        each_rank(2, misbehave, how, timeout=8.0)


def test_ranks_that_all_hang_tell_where(monkeypatch):
    reported = r"rank 0 of 2 did not end within 8 s:\n(.|\n)*in <lambda>\n(.|\n)*rank 1 of 2"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    with pytest.raises(AssertionError, match=reported):
        each_rank(2, lambda: time.sleep(600), timeout=4.0)


def test_ranks_may_take_longer_on_a_machine_that_is_loaded(monkeypatch):
    for load, expected in ((0.1, 1.0), (4.0, 4.0), (100.0, MOST_PATIENCE)):
        monkeypatch.setattr(os, "getloadavg", lambda now=load: (now * len(os.sched_getaffinity(0)), 0.0, 0.0))
        assert patience() == expected
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0 * len(os.sched_getaffinity(0)), 0.0, 0.0))
    with pytest.raises(AssertionError, match="did not end within 8 s"):
        each_rank(2, lambda: time.sleep(600), timeout=1.0)
