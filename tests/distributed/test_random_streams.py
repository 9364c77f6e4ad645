"""The random numbers of ranks: rank 0 draws those of the script, and others their own, in both ways to start."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from kit.rank_tasks import Drawing, Noisy, forks
from kit.ranks import each_rank
from zae import Every
from zae.addons import EMAAddon, FSDPAddon, MultiGPUAddon, StateManagerAddon


def seed_script(seed):
    """Seed as a script does at its top, on every rank alike."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def make(place, *add_ons, engine=MultiGPUAddon, devices="cpu", **options):
    seed_script(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Drawing.add_on(engine, *add_ons)(model, devices, optimizer=optimizer, log_bar=False, **options)
    trainer.place = str(place)
    return trainer


def loader(workers=0):
    return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)


def numbers(place, rank):
    """Return what a rank has drawn in each of its steps."""
    return [json.loads(line) for line in place.with_name(f"{place.name}-{rank}").read_text().splitlines()]


def all_numbers(place, world=2):
    return [numbers(place, rank) for rank in range(world)]


def assert_nothing_in_common(ranks):
    """Assert that no random number of a step or of a sample is one of another rank."""
    seen = [{number for step in rank for number in step["own"]} for rank in ranks]
    assert all(seen)
    assert sum(map(len, seen)) == len(set().union(*seen))


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["", "seed"])
def test_ranks_draw_other_numbers_and_both_ways_to_start_draw_the_same(options, workers, tmp_path):
    """With the streams of the script or with a seed, in steps, in samples, and in the workers that read them."""

    def launched(epochs):
        place = tmp_path / f"launched-{len(epochs)}"
        trainer, data = make(place, **options), loader(workers)
        for count in epochs:
            trainer.run(count, data)

    spawned = tmp_path / "spawned"
    with forks():
        make(spawned, devices=["cpu", "cpu"], **options).run(2, loader(workers))
    each_rank(2, launched, [2])
    each_rank(2, launched, [1, 1])
    found = all_numbers(spawned)
    assert_nothing_in_common(found)
    assert all_numbers(tmp_path / "launched-1") == found
    assert all_numbers(tmp_path / "launched-2") == found


def test_rank_0_draws_what_one_process_draws(tmp_path):
    """In the steps; the samples are others."""
    make(tmp_path / "alone").run(1, loader())
    each_rank(2, lambda: make(tmp_path / "ranks").run(1, loader()) and None)
    alone = [step["in_step"] for step in numbers(tmp_path / "alone", 0)]
    assert alone[0] == numbers(tmp_path / "ranks", 0)[0]["in_step"]


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["", "seed"])
def test_the_script_draws_alike_on_all_ranks_between_two_runs(options, tmp_path):
    """A random_split after a first run divides the data alike; the next run begins from what was drawn."""

    def script():
        trainer = make(tmp_path / "script", **options)
        trainer.run(1, loader())
        between = (torch.rand(3).tolist(), np.random.rand(), random.random())
        trainer.run(1, loader())
        return between

    first, second = each_rank(2, script)
    assert first == second
    assert_nothing_in_common(all_numbers(tmp_path / "script"))


def test_a_seed_of_the_script_between_two_runs_counts(tmp_path):
    def script(seed):
        trainer = make(tmp_path / f"seed-{seed}")
        trainer.run(1, loader())
        seed_script(seed)
        trainer.run(1, loader())

    each_rank(2, script, 1)
    each_rank(2, script, 2)
    one, two = all_numbers(tmp_path / "seed-1"), all_numbers(tmp_path / "seed-2")
    assert [rank[:2] for rank in one] == [rank[:2] for rank in two]  # The epoch before it.
    assert_nothing_in_common([one[0][2:], one[1][2:], two[0][2:], two[1][2:]])


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("engine", [MultiGPUAddon, FSDPAddon])
@pytest.mark.parametrize("moment", ["after an epoch", "within an epoch", "by hand between two runs"])
def test_a_resume_continues_the_streams_of_every_rank(moment, engine, tmp_path):
    """Also from a state that the script saves between two runs, when it draws as rank 0 on all ranks."""

    def straight():
        trainer, data = make(tmp_path / "straight", EMAAddon, engine=engine), loader()
        trainer.run(1, data)
        trainer.run(2, data)

    def first():
        steps = {"save_every": Every(steps=1)} if moment == "within an epoch" else {}
        trainer = make(tmp_path / "cut", EMAAddon, StateManagerAddon, engine=engine, save_path=tmp_path / "s", **steps)
        data = loader()
        trainer.run(1, data)
        if moment == "by hand between two runs":
            trainer.save_state(tmp_path / "s" / "step-00000002")
        else:
            trainer.run(2, data, max_steps=1 if moment == "within an epoch" else 2)

    def second():
        trainer = make(
            tmp_path / "cut", EMAAddon, StateManagerAddon, engine=engine, save_path=tmp_path / "s", resume="auto"
        )
        data = loader()
        trainer.run(1, data)
        torch.rand(1)  # Does not count: the run continues.
        trainer.run(2, data)

    for each in (straight, first, second):
        each_rank(2, lambda each=each: each())
    assert all_numbers(tmp_path / "cut") == all_numbers(tmp_path / "straight")
