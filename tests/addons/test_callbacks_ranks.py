"""Callbacks on two ranks: what any rank asks for counts on all, each keeps its own state, and no step waits for it."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist
from transformers import EarlyStoppingCallback, PrinterCallback

from kit.rank_tasks import F64, Task, build, forks, loader, network
from kit.ranks import each_rank
from zae import ConfigError
from zae.addons import CallbackAddon, FSDPAddon, MultiGPUAddon, StateManagerAddon

COLLECTIVES = ("all_gather_object", "all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "broadcast",
               "broadcast_object_list", "gather_object", "reduce_scatter_tensor")  # fmt: skip


class Asks:
    """Sets a flag on one rank at one step, and notes what is logged and saved, and the collectives before each step."""

    def __init__(self, flag, step, event, rank, calls):
        self.flag, self.step, self.rank, self.calls, self.rows, self.counts = flag, step, rank, calls, [], []
        setattr(self, event, self._ask)

    def _ask(self, args, state, control, **kwargs):
        if state.global_step == self.step and dist.get_rank() == self.rank:
            setattr(control, self.flag, True)

    def on_log(self, args, state, control, logs, **kwargs):
        self.rows += [(key, state.global_step) for key in logs if key in ("loss", "eval_loss")]

    def on_save(self, args, state, control, **kwargs):
        self.rows.append(("save", state.global_step))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.counts.append(len(self.calls))


CASES = [  # flag, step, event, rank; the last step, and what is logged and saved before it
    ("should_log", 99, "on_step_end", 1, 12, []),  # Never: what the others are compared with.
    ("should_log", 2, "on_step_end", 1, 12, [("loss", 3)]),
    ("should_evaluate", 2, "on_step_end", 0, 12, [("eval_loss", 3), ("save", 3)]),
    ("should_save", 2, "on_step_end", 1, 12, [("save", 3)]),
    ("should_epoch_stop", 2, "on_step_end", 1, 11, []),
    ("should_training_stop", 1, "on_step_end", 1, 2, []),  # In the very first step.
    ("should_training_stop", 0, "on_train_begin", 1, 2, []),
    ("should_training_stop", 4, "on_epoch_end", 1, 4, []),  # Where the ranks meet in any case.
]


def ask(add_on, folder):
    """Train once for each case; return what was seen of it."""
    assert dist.get_world_size() == 2
    warnings.simplefilter("ignore")  # Torch's own of FSDP on CPUs.
    calls, found = [], []
    for name in COLLECTIVES:
        original = getattr(dist, name)
        setattr(dist, name, lambda *args, original=original, **more: (calls.append(1), original(*args, **more))[1])
    for index, (flag, step, event, rank, *_) in enumerate(CASES):
        callback = Asks(flag, step, event, rank, calls)
        trainer = build(
            Task, (CallbackAddon, add_on, StateManagerAddon), ["cpu", "cpu"], callbacks=[callback],
            save_path=folder / str(index), save_every=100, log_every=100,
        )  # fmt: skip
        metrics = trainer.run(3, loader(16, 2), loader(8, 2), valid_every=100)
        assert trainer.world_size == 2
        counts = [after - before for before, after in zip(callback.counts, callback.counts[1:])]
        found.append((metrics["step"], metrics["stop_reason"], callback.rows, counts))
    return found


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("add_on", [MultiGPUAddon, FSDPAddon])
def test_a_flag_of_one_rank_counts_on_all(add_on, tmp_path):
    """One step later, with the collectives of the stop flag only, which steps have in any case."""
    one, other = each_rank(2, ask, add_on, tmp_path)
    assert one == other
    quiet = one[0][3]
    for (flag, _, event, _, last, rows), (step, reason, seen, counts) in zip(CASES, one, strict=True):
        assert (step, seen) == (last, [*rows, ("save", last)]), (flag, event)
        stopped = f"the callback Asks set {flag} in {event}" if flag == "should_training_stop" else None
        assert reason == stopped
        assert counts[:2] == quiet[: min(2, last - 1)], (flag, event)  # Asked and agreed on in these steps.


class Seen:
    """Keeps what its own rank has seen."""

    state_attributes = ("losses",)

    def __init__(self):
        self.losses = []

    def on_step_end(self, trainer, outputs):
        self.losses.append(outputs[0].loss.item())


def stop_early(folder, devices):
    """Train until Transformers' own callback stops; the same from a checkpoint in the middle of an epoch."""
    made = []
    for options in ({"save_path": folder}, {"save_path": folder / "on", "resume": folder / "step-00000005"}):
        stop = EarlyStoppingCallback(1, 100.0)
        trainer = build(
            Task, (CallbackAddon, StateManagerAddon, *([MultiGPUAddon] if len(devices) > 1 else [])),
            devices if len(devices) > 1 else devices[0], model=network(dtype=F64), save_every=1, keep_last=99,
            monitor="loss", callbacks=[Seen, stop, PrinterCallback], **options,
        )  # fmt: skip
        metrics = trainer.run(9, loader(16, 4 // len(devices), dtype=F64), loader(8, 2, dtype=F64))
        losses = trainer.callbacks[0].losses
        made.append((metrics["step"], metrics["stop_reason"], losses, stop.early_stopping_patience_counter))
    return made


def test_early_stopping_of_transformers_stops_the_ranks_where_it_stops_one_process(tmp_path, capfd):
    (one,) = each_rank(1, stop_early, tmp_path / "one", ["cpu"])
    printed = capfd.readouterr().out.count("eval_loss")
    ranks = each_rank(2, stop_early, tmp_path / "two", ["cpu", "cpu"])
    assert capfd.readouterr().out.count("eval_loss") == printed > 0  # By the first rank only.
    assert one[0][0] == ranks[0][0][0] == 8 < 36
    assert one[0][1].startswith("the callback EarlyStoppingCallback set should_training_stop")
    for whole, resumed in ranks:
        assert (whole[:2], whole[3]) == (one[0][:2], one[0][3])
        assert resumed == whole  # Bitwise, with the losses of this rank before the checkpoint.
    assert ranks[0][0][2] != ranks[1][0][2]


class Adds:
    """Adds a callback when the run begins, in each rank."""

    def on_run_begin(self, trainer):
        if len(trainer.callbacks) < 3:
            trainer.add_callback(Asks("should_training_stop", 2, "on_step_end", 1, []))


def test_callbacks_travel_to_ranks_that_run_starts(tmp_path):
    """Those added and removed before; their state comes back into the caller's objects."""
    seen, removed = Seen(), Seen()
    trainer = build(Task, (CallbackAddon, MultiGPUAddon), ["cpu", "cpu"], callbacks=[removed], timeout=120.0)
    trainer.add_callback(seen)
    trainer.remove_callback(removed)
    trainer.add_callback(Adds)
    with forks():
        metrics = trainer.run(2, loader(16, 2))
    assert len(trainer.state_dict()["MultiGPUAddon"]["ranks"]) == 2
    assert metrics["step"] == len(seen.losses) == trainer.state.global_step == 3
    assert removed.losses == []
    assert trainer.callbacks[0] is seen
    assert "the callback Asks set should_training_stop" in metrics["stop_reason"]
    trainer.add_callback(type("Held", (Seen,), {"held": None}))
    trainer.callbacks[-1].held = lambda: None
    with pytest.raises(ConfigError, match=r"trainer, a Task.* cannot be sent to another process: .*Held"), forks():
        trainer.run(1, loader(16, 2))
