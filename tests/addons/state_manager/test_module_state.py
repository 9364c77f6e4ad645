"""What a model is beside its values comes back with a checkpoint, or is named: order in memory, flags, extra state."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from zae import CheckpointError, Every, Trainer
from zae.addons import AMPAddon, EMAAddon, StateManagerAddon

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(2))
TARGETS = (INPUTS.sum(1) > 0).long()
STEPS = 9  # Three epochs of three.


class Classifier(Trainer):
    """A classifier of two classes."""

    def train_step(self, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs).float(), targets)}

    test_step = train_step


def digest(model: nn.Module) -> Any:
    """Return the values of a model, bit by bit."""
    tensors = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    return {
        name: each.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()
    }


def loader(inputs: Tensor = INPUTS) -> Any:
    return DataLoader(TensorDataset(inputs, TARGETS), batch_size=8, shuffle=True)


def adamw(parameters: Any) -> Any:
    return AdamW(parameters, lr=0.05)


def build(
    folder: Path, model: Callable[[], nn.Module], cls: type = Classifier, optimizer: Any = adamw, **options: Any
) -> Any:
    """Return a trainer as a script builds it each time it is started."""
    task: Any = cls if "StateManagerAddon" in [each.__name__ for each in cls.__mro__] else cls.add_on(StateManagerAddon)
    options = {"save_every": Every(steps=1), "resume": "auto", "log_bar": False, "seed": 0, **options}
    return task(model, "cpu", optimizer=optimizer, save_path=folder, **options)


def assert_resumes(
    tmp_path: Path,
    make: Callable[[Path], Any],
    look: Callable[[Any], Any] = lambda trainer: None,
    at: tuple[int, ...] = (2, 4),
    inputs: Tensor = INPUTS,
) -> None:
    """Compare the end of a run with that of one that ends and is started again; ``look`` returns what must agree."""

    def end(name: str, limits: tuple[int | None, ...]) -> Any:
        for limit in limits:
            trainer = make(tmp_path / name)
            trainer.run(3, loader(inputs), loader(inputs), max_steps=limit)
        assert trainer.progress_checker.step == STEPS
        return digest(trainer.unwrap()), look(trainer)

    straight = end("straight", (None,))
    for step in at:
        assert end(f"from {step}", (step, None)) == straight, f"resumed at step {step}"


# -------------------------------------------------------------------------------------------------- order in memory


class Whitening(nn.Module):
    """Replaces its buffers in the first step: by eigenvectors, by every second column, and by a broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 32), nn.Linear(32, 2)
        self.register_buffer("basis", torch.eye(32))
        self.register_buffer("columns", torch.ones(32, 16))
        self.register_buffer("scale", torch.ones(32, 32))
        self.register_buffer("spectrum", torch.ones(4, 6, dtype=torch.complex64))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.ready:
            noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(5))
            self.basis, self.ready = torch.linalg.eigh(noise + noise.T).eigenvectors, torch.tensor(True)
            self.columns = torch.cat([noise, noise], 1)[:, ::4]
            self.scale = torch.full((1, 32), 1.5).expand(32, 32)
            self.spectrum = torch.fft.fft(noise[:6, :4]).t()
        hidden = (self.basis * self.scale @ torch.tanh(self.first(inputs)).T).T
        return self.last(hidden + (hidden @ self.columns).mean(1, keepdim=True) + self.spectrum.real.mean())


class Turns(Classifier):
    """Gives its first weight another order in memory in the second epoch."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        weight = next(self.unwrap().parameters())
        if self.progress_checker.epoch == 1:
            weight.data = weight.data.t().contiguous().t()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(),
        nn.Linear(128, 2),
    )  # fmt: skip


def channels_last() -> nn.Module:
    return convolutions().to(memory_format=torch.channels_last)


class Late(Classifier):
    """Changes the order of memory of the whole model in the second epoch."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1:
            self.unwrap().to(memory_format=torch.channels_last)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 2))


def half() -> nn.Module:
    return channels_last().bfloat16()


def strides(trainer: Any) -> Any:
    """Return the order in memory of all that a resume continues with."""
    found = {name: each.stride() for name, each in trainer.unwrap().state_dict().items()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": each.stride() for name, each in state.items() if isinstance(each, Tensor)}
    return found | {f"average.{name}": each.stride() for name, each in getattr(trainer, "average", {}).items()}


@pytest.mark.sample(count=2)
@pytest.mark.parametrize(
    ("cls", "model", "inputs", "options"),
    [
        (Classifier, Whitening, INPUTS, {}),
        (Classifier.add_on(EMAAddon, StateManagerAddon), Whitening, INPUTS, {"decay": 0.5, "save_async": True}),
        (Turns, wide, INPUTS, {}),
        (Classifier, channels_last, IMAGES, {"save_format": "ckpt"}),
        (Classifier.add_on(EMAAddon, StateManagerAddon), channels_last, IMAGES, {"decay": 0.5, "save_async": True}),
        (Classifier, channels_last, IMAGES, {"optimizer": lambda p: AdamW(p, lr=0.05, fused=True)}),
        (Late, convolutions, IMAGES, {"optimizer": lambda p: SGD(p, lr=0.05, momentum=0.9)}),
        (Classifier.add_on(AMPAddon, StateManagerAddon), channels_last, IMAGES, {"precision": "bf16"}),
        (Classifier, half, IMAGES.bfloat16(), {}),
    ],
    ids=["buffers", "buffers, average", "weight", "channels last", "average", "fused", "late", "amp", "bfloat16"],
)
def test_tensors_keep_their_order_in_memory(
    cls: Any, model: Any, inputs: Tensor, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_resumes(tmp_path, lambda folder: build(folder, model, cls, **options), strides, inputs=inputs)


class Anchors(nn.Module):
    """A buffer that is a broadcast, one that two modules share, and a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.scale = nn.Linear(4, 2), nn.Linear(4, 2), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("anchors", torch.randn(1, 4).expand(8, 4))
        self.other.register_buffer("again", self.anchors)
        self.linear.register_buffer("seen", torch.zeros(1).expand(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.linear.seen = self.linear.seen + 1
        inputs = inputs + self.anchors[: len(inputs)] * self.scale + self.other.again[: len(inputs)]
        return self.linear(inputs) + self.other(inputs) / self.linear.seen.sum()


def test_a_buffer_that_is_a_broadcast_is_loaded(tmp_path: Path) -> None:
    cls = Classifier.add_on(EMAAddon, StateManagerAddon)
    assert_resumes(tmp_path, lambda folder: build(folder, Anchors, cls, decay=0.5), strides)
    trainer = build(tmp_path / "straight", Anchors, cls, decay=0.5)
    trainer.restore_best()
    assert trainer.unwrap().anchors.stride() == (0, 1)
    assert trainer.unwrap().other.again is trainer.unwrap().anchors
    values = {key: each + 1 for key, each in trainer.unwrap().state_dict().items()}
    values["anchors"] = values["other.again"] = torch.arange(32.0).view(8, 4)
    trainer.apply_weights(values)
    assert torch.equal(trainer.unwrap().anchors, values["anchors"])


# ------------------------------------------------------------------------------------------------------------- flags


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.act, self.drop, self.head = nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.drop(self.act(self.body(inputs))))


def frozen_net() -> nn.Module:
    net = Net()
    net.body.requires_grad_(False)
    return net


class Changing(Classifier):
    """Changes its model once, in the second epoch, as a callback for finetuning does."""

    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        if self.progress_checker.epoch == 1:
            self.change(self.unwrap())

    def change(self, model: Any) -> None:
        raise NotImplementedError


class Thaws(Changing):
    def change(self, model: Any) -> None:
        model.body.requires_grad_(True)


class Freezes(Changing):
    def change(self, model: Any) -> None:
        model.body[0].weight.requires_grad_(False)


class Evaluates(Changing):
    def change(self, model: Any) -> None:
        model.body.eval()
        model.drop.eval()


class EvaluatesAll(Changing):
    def change(self, model: Any) -> None:
        model.eval()


class AddsGroup(Changing):
    def change(self, model: Any) -> None:
        model.body.requires_grad_(True)
        if len(self.optimizer.param_groups) == 1:  # A resume within the epoch calls it again.
            self.optimizer.add_param_group({"params": [*model.body.parameters()], "lr": 0.01, "weight_decay": 0.3})


def head_alone(parameters: Any) -> Any:
    return AdamW([each for each in parameters if each.requires_grad], lr=0.05)


def flags(trainer: Any) -> Any:
    model = trainer.unwrap()
    groups = [{**group, "params": len(group["params"])} for group in trainer.optimizer.param_groups]
    return [each.requires_grad for each in model.parameters()], [each.training for each in model.modules()], groups


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("add_ons", [(), (EMAAddon,)], ids=["plain", "average"])
@pytest.mark.parametrize(
    ("cls", "model", "optimizer"),
    [
        (Thaws, frozen_net, adamw),
        (Freezes, Net, adamw),
        (Evaluates, Net, adamw),
        (EvaluatesAll, Net, adamw),
        (AddsGroup, frozen_net, head_alone),
    ],
)
def test_what_is_frozen_or_evaluating_stays_so(
    cls: Any, model: Any, optimizer: Any, add_ons: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At each place of the run, with a validation after each epoch; nothing of it is warned of."""
    options = {"decay": 0.5} if add_ons else {}
    task = cls.add_on(*add_ons, StateManagerAddon)
    assert_resumes(tmp_path, lambda folder: build(folder, model, task, optimizer, **options), flags, at=(3, 4))
    assert not [each for each in caplog.records if each.levelname == "WARNING" and "resumes from" in each.message]


def test_what_a_script_thaws_between_two_calls_of_run(tmp_path: Path) -> None:
    """A script that is started again freezes first; the checkpoint of each call knows what it trained."""

    def script(name: str, limit: int | None) -> Any:
        trainer = build(tmp_path / name, Net, optimizer=adamw, save_every=Every(steps=1))
        trainer.unwrap().body.requires_grad_(False)
        trainer.run(1, loader(), max_steps=limit)
        if limit is not None and limit <= 3:
            return None
        trainer.unwrap().body.requires_grad_(True)
        trainer.run(2, loader(), max_steps=None if limit is None else limit - 3)
        return digest(trainer.unwrap()), flags(trainer)

    straight = script("straight", None)
    for step in (2, 3, 4, 6):
        script(f"from {step}", step)
        assert script(f"from {step}", None) == straight, f"resumed at step {step}"


# ---------------------------------------------------------------------------------------------------------- modules


class Swaps(Changing):
    def change(self, model: Any) -> None:
        model.act = nn.GELU()


class Removes(Changing):
    def change(self, model: Any) -> None:
        model.act = nn.Sequential()


class Adds(Changing):
    def change(self, model: Any) -> None:
        model.head = nn.Sequential(nn.Tanh(), model.head.requires_grad_(False))


class Grows(Changing):
    def change(self, model: Any) -> None:
        model.act = nn.Sequential(nn.ReLU(), nn.Sigmoid())


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Swaps, r"model.act was GELU and is ReLU\. This run differs"),
        (Removes, r"model.act was Sequential and is ReLU"),
        (Grows, r"model.act was Sequential and is ReLU; model.act.0 was ReLU and is absent; model.act.1 was Sigmoid"),
    ],
)
def test_a_module_that_training_has_replaced_is_named_before_it_trains(
    cls: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path, Net, cls).run(2, loader())
    assert not caplog.records
    resumed = build(tmp_path, Net, cls)
    resumed.on_step_begin = lambda batch: pytest.fail("it trains")
    with pytest.raises(pytest.fail.Exception):
        resumed.run(3, loader())
    assert [each for each in caplog.records if re.search(said, each.getMessage())]
    caplog.clear()

    def rebuilt() -> nn.Module:
        model = Net()
        cls.change(None, model)
        return model

    build(tmp_path, rebuilt, cls).run(3, loader())
    assert "had replaced" not in caplog.text


class Dropping(Net):
    """Has a layer with settings that the one in its place lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Dropout(0.1)


class Ceases(Changing):
    def change(self, model: Any) -> None:
        model.act = nn.Identity()


def test_a_dropout_that_training_has_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path, Dropping, Ceases).run(2, loader())
    build(tmp_path, Dropping, Ceases).run(3, loader())
    assert "model.act was Identity and is Dropout. This run differs" in caplog.text


def test_a_layer_that_came_with_weights_is_refused_by_name(tmp_path: Path) -> None:
    build(tmp_path, Net, Adds).run(2, loader())
    with pytest.raises(Exception, match=r"head\.1\.weight"):
        build(tmp_path, Net, Adds).run(3, loader())


# ------------------------------------------------------------------------------------------------------ extra state


class Counting(nn.Module):
    """Counts its calls outside of its tensors, and saves that as `kind`."""

    kind: Any = dict

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 2), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.linear(inputs) * (1 + 0.1 * self.calls)

    def get_extra_state(self) -> Any:
        made = {
            dict: {"calls": self.calls, "tensor": torch.ones(2).expand(3, 2), 1: None},
            list: [self.calls, float("inf")],
            int: self.calls,
            str: str(self.calls),
            bytes: b"%d" % self.calls,
            Tensor: torch.tensor(self.calls),
        }
        return made[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if self.kind is dict:
            state = state["calls"]
        self.calls = int(state[0] if self.kind is list else state)


def two_counting() -> nn.Module:
    return nn.Sequential(Counting(), nn.Linear(2, 4), Counting())


@pytest.mark.sample(count=2)
@pytest.mark.parametrize("save_format", ["safetensors", "ckpt"])
@pytest.mark.parametrize("kind", [dict, list, int, str, bytes, Tensor])
def test_extra_state_of_modules_comes_back(
    kind: Any, save_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "kind", kind)

    def calls(trainer: Any) -> Any:
        return [each.calls for each in trainer.unwrap() if isinstance(each, Counting)]

    assert_resumes(tmp_path, lambda folder: build(folder, two_counting, save_format=save_format), calls, at=(2, 6))
    ended = build(tmp_path / "straight", two_counting, keep_last=None, save_format=save_format)
    path = ended.restore_best()
    step = int(path.name.removeprefix("step-"))
    assert calls(ended) == [step, step]
    started = build(tmp_path / "new", two_counting, resume=False, start_from=path, save_format=save_format)
    started.run(1, loader(), max_steps=1)
    assert calls(started) == [step + 1, step + 1]


class Stream(Counting):
    """Transformer Engine returned one of these until 1.13."""

    def get_extra_state(self) -> Any:
        return io.BytesIO(b"1")


class HasObject(Counting):
    def get_extra_state(self) -> Any:
        return {"linear": self.linear}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Stream, r"extra_state\['_extra_state'\] is a _io.BytesIO; .* store its getvalue\(\)"),
        (HasObject, r"\['linear'\] is a .*Linear; .* return its state_dict\(\) instead"),
    ],
)
def test_extra_state_that_no_checkpoint_holds_is_refused_after_the_first_step(
    model: Any, said: str, tmp_path: Path
) -> None:
    trainer = build(tmp_path, model, save_every=Every(epochs=1))
    with pytest.raises(CheckpointError, match=said):
        trainer.run(1, loader())
    assert trainer.progress_checker.step == 1
