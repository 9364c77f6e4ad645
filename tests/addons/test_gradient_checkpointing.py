"""GradientCheckpointingAddon: less is kept for the backward, and the weights are bitwise those without it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kit import engines, hand
from kit.engines import ENGINES
from kit.ranks import each_rank
from kit.table import Task
from zae import ConfigError
from zae.addons import (
    AMPAddon,
    CompileAddon,
    EMAAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    MultiGPUAddon,
    StateManagerAddon,
)
from zae.addons.gradient_checkpointing.recompute import Recomputed
from zae.errors import StepError


class Block(nn.Module):
    """A layer with all that computing it again could change: dropout, and statistics of BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.dropout(torch.relu(self.norm(self.layer(x))))


def network(blocks: int = 3, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 2))


def build(*add_ons: Any, model: Any = None, **options: Any) -> Any:
    made = network() if model is None else model
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    return Task.add_on(*add_ons)(made, "cpu", optimizer=optimizer, log_bar=False, seed=3, **options)


def trained(*add_ons: Any, **options: Any) -> Any:
    trainer = build(*add_ons, **options)
    trainer.run(2, hand.loader(24), hand.loader(8))
    return trainer


CHECKPOINT = GradientCheckpointingAddon


@pytest.mark.sample(count=3)
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint_modules": Block}, {"checkpoint_modules": ["1", "2"]}, {"checkpoint_keep": "matmuls"},
     {"checkpoint_modules": lambda name, module: isinstance(module, (Block, nn.Dropout))},
     {"checkpoint_keep": ["aten.addmm.default", torch.ops.aten.mm.default]}],
    ids=["repeated", "class", "names", "matmuls", "function", "operations"],
)  # fmt: skip
def test_weights_and_statistics_are_bitwise_the_same(options: Any) -> None:
    """With dropout and BatchNorm: the numbers are drawn again, and the statistics move once."""
    plain, trainer = trained(), trained(CHECKPOINT, **options)
    assert hand.digest(trainer.model) == hand.digest(plain.model)
    assert trainer.test_metrics == plain.test_metrics
    assert trainer.model[1].calls > plain.model[1].calls
    assert "forward" not in vars(trainer.model[1]), "the forward is restored"


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ((AMPAddon,), {"precision": "bf16"}),
        ((GradientAccumulationAddon, EMAAddon), {"gradient_accumulation_steps": 2, "decay": 0.5}),
    ],
    ids=["amp", "windows"],
)
def test_it_composes(others: Any, options: Any) -> None:
    plain, trainer = trained(*others, **options), trained(CHECKPOINT, *others, **options)
    assert hand.digest(trainer.model) == hand.digest(plain.model)


def test_a_compiled_step_is_left_to_the_compiler() -> None:
    """Bitwise the compiled step without it; a batch that is not compiled is checkpointed."""
    ends = []
    for add_ons in ((CompileAddon,), (CHECKPOINT, CompileAddon)):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))
        trainer = trained(*add_ons, model=model, compile_target="step", compile_backend="eager")
        assert trainer.compile_report["graphs"] > 0
        ends.append(hand.digest(model))
    assert ends[0] == ends[1]


def kept_bytes(trainer: Any) -> int:
    """Return the bytes that autograd keeps of a forward, beside weights."""
    own = {each.untyped_storage().data_ptr() for each in trainer.model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with trainer.ready(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.train_step((torch.ones(64, 4), torch.zeros(64, dtype=torch.long)))
    return sum(storage.nbytes() for at, storage in kept.items() if at not in own)


def test_less_is_kept_for_the_backward() -> None:
    """Of eight blocks, the inputs alone; with the results of matrix products, more than that."""
    sizes = [
        kept_bytes(build(*add_ons, model=network(8, 32), **options))
        for add_ons, options in (((), {}), ((CHECKPOINT,), {}))
    ]
    assert sizes[1] < sizes[0] / 3


def test_a_resume_is_bitwise(tmp_path: Any) -> None:
    options = {"save_path": tmp_path / "run", "save_every": 1, "resume": "auto"}
    build(CHECKPOINT, StateManagerAddon, **options).run(2, hand.loader(24), hand.loader(8), max_steps=4)
    resumed = trained(CHECKPOINT, StateManagerAddon, **options)
    assert hand.digest(resumed.model) == hand.digest(trained().model)


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fsdp", "hsdp", "tensor", "2-D"))]
)
def test_engines_train_to_the_same_weights(name: str) -> None:
    """Beside the same engine without it, with dropout where the engine has it."""

    def compare() -> None:
        engine, ends = ENGINES[name], []
        for add_ons in ((), (CHECKPOINT,)):
            model = engines.net(dropout=0.5 if name in ("ddp", "fsdp", "hsdp") else 0.0)
            trainer = engines.build(engine, *add_ons, model=model)
            trainer.run(1, engines.data(24, 4), engines.data(5, 2, False))
            assert trainer.world_size == engine.world
            ends.append(engines.weights(trainer))
        assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())

    each_rank(ENGINES[name].world, compare)


def test_what_is_checkpointed_is_shown_and_the_outermost_counts() -> None:
    trainer = build(CHECKPOINT, checkpoint_modules=[Block, nn.Linear], checkpoint_keep="matmuls")
    assert sorted(trainer.checkpointed()) == ["0", "1", "2", "3", "4"]
    note = next(note for note in trainer.plan(1, hand.loader()).notes if note.startswith("computed again"))
    assert note.startswith("computed again in the backward: 3 of Block (1 to 3), 2 of Linear (0 to 4), but for 8 op")
    with trainer.ready():
        assert isinstance(trainer.model[1].forward, Recomputed)
        assert "forward" not in vars(trainer.model[1].layer)
    trainer.evaluate(hand.loader(8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"checkpoint_modules": ["blocks.*"]}, r"checkpoint_modules: no module of Sequential is 'blocks.\*'"),
        ({"checkpoint_modules": 3}, "checkpoint_modules=3; give classes, names, or a function"),
        ({"checkpoint_keep": "everything"}, "'everything' is not an operation of torch; write 'matmuls'"),
        ({"checkpoint_keep": ["aten.mn.default"]}, "'aten.mn.default' is not an operation of torch"),
        ({"model": nn.Linear(4, 2)}, "no module of Linear is repeated, so none is checkpointed"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(CHECKPOINT, **options).run(1, hand.loader())


def test_it_is_refused_beside_others_that_do_the_same() -> None:
    model = network()
    model.is_gradient_checkpointing = True
    with pytest.raises(ConfigError, match="Sequential checkpoints itself already"):
        build(CHECKPOINT, model=model).run(1, hand.loader())
    assert issubclass(Task.add_on(CHECKPOINT, MultiGPUAddon), Task)


class Centred(nn.Module):
    """A layer that subtracts a moving mean, which its forward updates, in place or by another tensor."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        self.layer, self.is_in_place, self.calls = nn.Linear(8, 8), is_in_place, 0
        self.register_buffer("mean", torch.zeros(8))
        self.late = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.layer(x)
        if self.training and self.calls > self.late:
            moved = torch.lerp(self.mean, hidden.detach().mean(0), 0.1)
            self.mean = self.mean.copy_(moved) if self.is_in_place else moved
        return x + torch.tanh(hidden - self.mean)


def spectral(width: int, is_old: bool) -> nn.Module:
    norm: Any = nn.utils.spectral_norm if is_old else nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(width, width)), nn.Tanh())


MOVING = {
    "in place": lambda: Centred(True),
    "replaced": lambda: Centred(False),
    "spectral": lambda: spectral(8, False),
    "spectral, by hooks": lambda: spectral(8, True),
    "without momentum": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
}


@pytest.mark.parametrize("name", MOVING)
def test_buffers_that_a_forward_changes_move_once(name: str) -> None:
    """The forward in the backward begins with their values of before: gradients and buffers are bitwise the same."""
    ends = []
    for add_ons in ((), (CHECKPOINT,)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), MOVING[name](), MOVING[name](), nn.Linear(8, 2))
        options = {"checkpoint_modules": ["1", "2"]} if add_ons else {}
        ends.append(hand.digest(trained(*add_ons, model=model, **options).model))
    assert ends[0] == ends[1]


def test_a_buffer_that_a_later_forward_changes_is_refused() -> None:
    """Of the first forward all buffers are copied, of later ones those that it has changed."""
    model = nn.Sequential(nn.Linear(4, 8), Centred(True), nn.Linear(8, 2))
    model[1].late = 5
    with pytest.raises(StepError, match=r"Centred has changed its buffer 'mean' .* Leave this module out"):
        trained(CHECKPOINT, model=model, checkpoint_modules="1")


class TwoLosses(Task):
    """Two losses of one forward: its graph is differentiated twice."""

    def train_step(self, batch: Any) -> Any:
        logits = self.model(batch[0])
        return {"loss": {"body": nn.functional.cross_entropy(logits, batch[1]), "head": logits.square().mean()}}


def test_a_graph_may_be_differentiated_twice() -> None:
    """Its forward is then computed again twice, with BatchNorm and buffers of its own."""
    ends = []
    for add_ons in ((), (CHECKPOINT,)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Block(8), Centred(True), nn.Linear(8, 2))
        optimizer = {
            "body": torch.optim.SGD([p for each in model[:3] for p in each.parameters()], lr=0.1),
            "head": torch.optim.SGD(model[3].parameters(), lr=0.1),
        }
        options = {"checkpoint_modules": ["1", "2"]} if add_ons else {}
        trainer = TwoLosses.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, seed=3, **options)
        trainer.run(2, hand.loader(24))
        ends.append(hand.digest(model))
    assert ends[0] == ends[1]


class Drawing(nn.Module):
    """It draws from the streams of Python and NumPy, and has arguments with the names of those of checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, debug: bool, context_fn: float, scale: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + float(np.random.rand())
        return x + drawn * scale * torch.tanh(self.layer(drawn * x)) * context_fn * debug


class Overwriting(nn.Module):
    """It changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(self.layer(x.mul_(0.5).add_(0.1)), (8,))


class Various(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.drawing = Drawing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.drawing(x, debug=True, context_fn=0.5, scale=x.detach()))


@pytest.mark.parametrize("keep", [(), "matmuls"])
def test_random_numbers_and_arguments_are_those_of_the_first_forward(keep: Any) -> None:
    """The streams of Python and NumPy, and any names of arguments."""
    ends = []
    for add_ons in ((), (CHECKPOINT,)):
        torch.manual_seed(0)
        options = {"checkpoint_modules": Drawing, "checkpoint_keep": keep} if add_ons else {}
        trainer = trained(*add_ons, model=Various(), **options)
        ends.append((hand.digest(trainer.model), random.random(), np.random.rand()))
    assert ends[0] == ends[1]


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    """torch refuses it in the backward, and says that a variable of it was modified."""
    model = nn.Sequential(nn.Linear(4, 8), Overwriting(), nn.Linear(8, 2))
    with pytest.raises(StepError, match=r"Overwriting has changed an input in place, .* write x = x \+ 1 instead"):
        trained(CHECKPOINT, model=model, checkpoint_modules=Overwriting)
