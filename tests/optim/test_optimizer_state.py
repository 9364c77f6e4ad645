"""The state of an optimizer comes back with the types and bits that were saved: every step of a resume agrees."""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from kit import optimizers
from kit.matrix import first_difference
from zae import CheckpointError
from zae.addons import StateManagerAddon
from zae.checkpoint import encoding
from zae.optim.copies import copy_optimizer
from zae.optim.optimizer_state import load_optimizer_state, move_to_device, places_on_device
from zae.values.walk import map_tensors

STEPS = 4
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Base(Optimizer):
    """An optimizer whose state is kept by `update`, one parameter at a time."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class MasterWeights(Base):
    """float32 weights beside bfloat16 ones."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("master", parameter.float().clone()).sub_(parameter.grad.float(), alpha=lr / 10)
        parameter.copy_(state["master"])


class Quantized(Base):
    """Moments in bytes, each with a scale in float64, nested."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        moment = state.setdefault("moment", {"bytes": torch.zeros_like(parameter, dtype=torch.uint8), "scale": []})
        moment["scale"].append(torch.full((1,), 1 / 3, dtype=torch.float64))
        moment["bytes"] += 1
        parameter.sub_(parameter.grad * float(moment["scale"][-1]) * moment["bytes"], alpha=lr)


class Words(Base):
    """Text, None, truth, numbers, tuples, arrays and bytes."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state["phase"] = "cool" if state.get("phase") == "warm" else "warm"
        state["seen"], state["nothing"], state["is_warm"] = (*state.get("seen", ()), "step"), None, True
        state["history"] = np.append(state.get("history", np.zeros(0)), 1.0)
        state["tag"], state["size"], state["rate"] = b"\x00\xff", parameter.shape, np.float64(lr)
        assert isinstance(state["seen"], tuple)
        parameter.sub_(parameter.grad, alpha=lr * (1 if state["phase"] == "warm" else 0.1) * len(state["history"]))


class Tied(Base):
    """One tensor in two entries, which has to stay one."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("count", torch.zeros(1, dtype=torch.float64))
        state.setdefault("same", [state["count"]])
        state["count"] += 1
        parameter.sub_(parameter.grad / float(state["same"][0]), alpha=lr)


class OwnCount(Adam):
    """A subclass of Adam whose step is a number: Adam would make a float32 tensor of it as it loads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(parameter.grad * (1 - 0.999 ** state["step"]))


class Wrapping(Base):
    """Another optimizer keeps the state, and loads it."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.inner = MasterWeights(self.param_groups, lr)

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Overriding(MasterWeights):
    """It takes an entry of its own out of the state before torch loads it."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": "mine"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["note"] == "mine"
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "note"})


class UnderNames(Base):
    """Entries that belong to no parameter, as MADGRAD and SPAM keep: a tensor, a number, a dict and a list."""

    def step(self, closure: Any = None) -> None:
        self.state.setdefault("k", torch.zeros(1, dtype=torch.int64)).add_(1)
        self.state["total"] = int(self.state.get("total", 0)) + 1
        self.state.setdefault("rates", {"all": []})["all"].append(torch.tensor(0.5, dtype=torch.float64))
        self.state["list"] = [float("inf"), None, self.state["k"]]
        super().step()

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        count = self.state["k"].item() + self.state["total"] + len(self.state["rates"]["all"])
        parameter.sub_(parameter.grad, alpha=lr / count)


class Recent(Base):
    """The last gradients in a deque, and in tuples of tensors."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("recent", deque(maxlen=2)).append(parameter.grad.clone())
        state["pair"] = (state["recent"][-1], torch.tensor(1.0))
        parameter.sub_(sum(state["recent"]) * state["pair"][1], alpha=lr)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


class Norm(enum.Enum):
    SIGN = "sign"
    NONE = "none"


class Level(enum.IntEnum):
    LOW = 1


class Chosen(MasterWeights):
    """Members of enumerations among the settings of a group."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.param_groups[0] |= {"norm": Norm.SIGN, "level": Level.LOW, "several": [Norm.SIGN, 2]}

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        (group,) = self.param_groups
        assert group["norm"] is Norm.SIGN
        assert group["level"] is Level.LOW
        assert group["several"][0] is Norm.SIGN
        super().update(parameter, state, lr)


class Lookahead(Optimizer):
    """A wrapper that calls no constructor of torch, with a state that only it can read."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        self.optimizer = MasterWeights(parameters, lr)
        self.count = 0
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, fast in zip(self.slow, self.param_groups[0]["params"]):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow, self.count = [each.clone() for each in state_dict["slow"]], state_dict["count"]
        self.optimizer.load_state_dict(state_dict["base"])


class WrappedTwice(Lookahead):
    """A wrapper of a wrapper, which holds it in a list."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        self.several = [Lookahead(parameters, lr)]

    optimizer = property(lambda self: self.several[0])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"several": [each.state_dict() for each in self.several]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self.several, state_dict["several"]):
            each.load_state_dict(state)


class Basis(Base):
    """A step in a basis of eigenvectors, whose memory has another order, with views and broadcasts of all kinds."""

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        size = len(parameter)
        if not state:
            noise = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
            state["basis"] = torch.linalg.eigh(noise + noise.T).eigenvectors
            state["every_second"] = torch.rand(size, 8, generator=torch.Generator().manual_seed(1))[:, ::2]
            state["one"] = torch.ones(1).expand(size, size)
            state["image"] = torch.ones(2, 1, 2, 2).to(memory_format=torch.channels_last)
        assert state["basis"].stride() == (1, size)
        assert state["every_second"].stride() == (8, 2)
        assert state["one"].stride() == (0, 0)
        assert state["image"].stride() == (4, 1, 2, 1)
        basis = state["basis"] * state["one"]
        grad = parameter.grad.float()
        parameter.sub_((basis @ ((basis.T @ grad).sign() * grad.norm())).to(parameter.dtype), alpha=lr)


OTHERS = [
    MasterWeights,
    Quantized,
    Words,
    Tied,
    OwnCount,
    Wrapping,
    Overriding,
    UnderNames,
    Recent,
    Chosen,
    Lookahead,
    WrappedTwice,
    Basis,
]


def saved_and_read(state: Any) -> Any:
    """What a file returns of a state."""
    return encoding.decode(*encoding.encode(copy.deepcopy(state)))


class Saving(optimizers.Task):
    """Keeps its state after every step, as a checkpoint has it."""

    def checkpoint(self) -> None:
        super().checkpoint()
        if self.progress_checker.epoch_batch:
            vars(self).setdefault("saved", []).append(saved_and_read(self.state_dict()))


def outcome(trainer: Any) -> Any:
    return trainer.unwrap().state_dict(), trainer.optimizer.state_dict()


def assert_resumes_at_every_step(make_optimizer: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    whole = optimizers.make(make_optimizer, dtype=dtype, cls=Saving)
    whole.run(1, optimizers.batches(STEPS))
    assert len(whole.saved) == STEPS
    for step, state in enumerate(whole.saved, start=1):
        resumed = optimizers.make(make_optimizer, dtype=dtype)
        resumed.load_state_dict(state)
        loaded = saved_and_read(resumed.optimizer.state_dict())
        assert first_difference(state["optimizer"]["0"], loaded) is None, f"after step {step}"
        resumed.run(1, optimizers.batches(STEPS))
        assert first_difference(outcome(whole), outcome(resumed)) is None, f"from step {step}"


def trains(make_optimizer: Callable[..., Optimizer], dtype: torch.dtype) -> bool:
    """Whether torch itself can train so."""
    try:
        optimizers.make(make_optimizer, dtype=dtype).run(1, optimizers.batches(1))
    except RuntimeError:
        return False
    return True


@pytest.mark.sample(count=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_optimizer_of_torch_resumes_bitwise_at_every_step(dtype: torch.dtype) -> None:
    """NAdam's product and ASGD's counts are not of the weights' type, which torch would make of them."""
    tried = [name for name, make_optimizer in optimizers.OPTIMIZERS.items() if trains(make_optimizer, dtype)]
    assert set(optimizers.OPTIMIZERS) - set(tried) <= ({"SparseAdam", "LBFGS"} if dtype == torch.bfloat16 else set())
    for name in tried:
        assert_resumes_at_every_step(optimizers.OPTIMIZERS[name], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OTHERS)
def test_states_of_any_kind_resume_bitwise_at_every_step(kind: Any, dtype: torch.dtype) -> None:
    """Master weights, bytes, text, arrays, tensors that are one, and classes that load in their own way."""
    assert_resumes_at_every_step(kind, dtype)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": True, "amsgrad": True}], ids=str)
def test_kernels_of_torch_resume_bitwise(options: dict[str, Any]) -> None:
    for dtype in DTYPES[:2]:
        assert_resumes_at_every_step(lambda p, **o: torch.optim.AdamW(p, **options, **o), dtype)


WRONG_WITH_A_TENSOR = {
    # In plain PyTorch too: its rates are 0.025, 0.025, 0.025 where those of a float are 0.025, 0.025, 0.05.
    ("2.6", "SequentialLR"): "lr and initial_lr are one tensor, so that each step moves where the schedule begins",
    ("2.6", "ReduceLROnPlateau"): "it replaces the tensor by a float",
}
"""Schedulers of a version of torch that do not keep a rate that is a tensor, and why."""


@pytest.mark.parametrize("name", optimizers.SCHEDULERS)
def test_a_rate_that_is_a_tensor_resumes_bitwise(name: str) -> None:
    """As a tensor, in its type, with every scheduler of torch; as a float where torch has no other."""
    make_scheduler, on_batch = optimizers.SCHEDULERS[name], name == "OneCycleLR"
    is_float = (".".join(torch.__version__.split(".")[:2]), name) in WRONG_WITH_A_TENSOR

    def make(cls: Any = optimizers.Task) -> Any:
        rate = 0.05 if is_float else torch.tensor(0.05, dtype=torch.float64)
        return optimizers.make(Adam, make_scheduler, lr=rate, cls=cls, scheduler_step_on_batch=on_batch)

    whole, batches = make(Saving), optimizers.batches(2)
    whole.run(3, batches, batches)
    for state, left in ((whole.saved[0], 3), (whole.saved[2], 2)):
        resumed = make()
        resumed.load_state_dict(state)
        resumed.run(left, batches, batches)
        assert first_difference(outcome(whole), outcome(resumed)) is None
        assert first_difference(whole.scheduler.state_dict(), resumed.scheduler.state_dict()) is None
        rate = resumed.optimizer.param_groups[0]["lr"]
        assert is_float or rate.dtype == torch.float64


def test_hooks_see_the_whole_state_and_what_they_make_of_it_is_loaded() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = SGD([weight], momentum=0.9)
    seen: list[Any] = []

    def doubled(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {0: {"momentum_buffer": state["state"][0]["momentum_buffer"] * 2}}}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[weight]["momentum_buffer"].tolist()))
    state = {**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.full((2,), 0.3)}}}
    load_optimizer_state(optimizer, state)
    assert seen == [torch.full((2,), 0.6).tolist()]
    assert (len(optimizer._optimizer_load_state_dict_pre_hooks), len(optimizer._optimizer_load_state_dict_post_hooks)) \
        == (1, 1)  # fmt: skip


def test_a_state_that_goes_after_its_weights_to_a_device_keeps_its_types() -> None:
    """As torch places it: beside its weights, but for the count of steps, which a plain kernel reads on the host."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16, device="meta"))
    shared = torch.ones(2)
    for capturable, place in ((False, "cpu"), (True, "meta")):
        optimizer = Adam([weight], capturable=capturable)
        values = {"step": torch.tensor(3.0), "exp_avg": shared, "again": (shared, "text"), "more": {"x": [shared]}}
        load_optimizer_state(optimizer, {**optimizer.state_dict(), "state": {0: values}})
        found = optimizer.state[weight]
        assert (found["step"].device.type, found["step"].dtype) == (place, torch.float32)
        assert (found["exp_avg"].device.type, found["exp_avg"].dtype) == ("meta", torch.float32)
        assert found["exp_avg"] is found["again"][0]
        assert found["exp_avg"] is found["more"]["x"][0]
        assert found["again"][1] == "text"


def test_tensors_that_belong_to_no_parameter_go_back_to_their_device() -> None:
    """A wrapper's own copies of weights, and an entry under a name: a checkpoint has them on the host."""
    away = torch.ones(2, device="meta")
    state = {
        "state": {0: {"moment": away}, "k": away[:1], "host": torch.ones(1)},
        "param_groups": [{"params": [0], "lr": 0.1}],
        "slow": [away, torch.zeros(2)],
    }
    places = places_on_device(state)
    assert places == ["optimizer['slow'][0]", "optimizer['state']['k']"]
    host = map_tensors(lambda each: torch.zeros(each.shape), state)
    moved = move_to_device(host, places, torch.device("meta"))
    assert [each.device.type for each in moved["slow"]] == ["meta", "cpu"]
    assert (moved["state"]["k"].is_meta, moved["state"]["host"].is_meta) == (True, False)
    assert not moved["state"][0]["moment"].is_meta, "torch moves it to its parameter"
    assert places_on_device({"base": {"state": {}}, "slow": [torch.ones(1)]}) == []


class Odd(Tensor):
    """A tensor of its own class."""


class OddState(Base):
    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state.setdefault("odd", torch.zeros(2).as_subclass(Odd))


class Rounding(MasterWeights):
    """Loads its state in half the precision."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["master"] = state["master"].bfloat16()


class Refusing(MasterWeights):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("moments")


class HoldsFunction(Base):
    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        state["rule"] = torch.relu


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OddState, r"optimizer\['0'\]\['state'\]\[0\]\['odd'\] is a Odd, and a checkpoint contains plain tensors"),
        (Rounding, r"does not load its own state: .*\['master'\] was a tensor of torch.float32, .* and is .*bfloat16"),
        (Refusing, r"would not load \(Refusing\): its load raises KeyError"),
        (HoldsFunction, r"\['rule'\] is a builtin_function_or_method; a checkpoint holds only"),
    ],
)
def test_a_state_that_would_be_another_one_is_refused_at_the_first_save(kind: Any, said: str) -> None:
    """Not at the resume, hours later."""
    trainer = optimizers.make(kind, cls=optimizers.Task.add_on(StateManagerAddon), save_path="save", save_every=1)
    with pytest.raises(CheckpointError, match=said):
        trainer.run(1, optimizers.batches())
    assert trainer.progress_checker.step == 1


def test_an_optimizer_is_copied_with_all_that_it_holds() -> None:
    """Its attributes and inner optimizers, but not who waits for its steps."""
    trainer = optimizers.make(Wrapping)
    optimizer = trainer.optimizer
    optimizer.register_step_post_hook(lambda *_: trainer.stop("one step is enough"))
    trainer.run(1, optimizers.batches(1))
    twin = copy_optimizer(optimizer)
    assert first_difference(optimizer.state_dict(), twin.state_dict()) is None
    assert twin.inner is not optimizer.inner
    assert not {id(p) for g in twin.inner.param_groups for p in g["params"]} & {id(p) for p in trainer.parameters}
    assert twin.param_groups[0]["params"][0] is twin.inner.param_groups[0]["params"][0]
    assert not twin._optimizer_step_post_hooks
