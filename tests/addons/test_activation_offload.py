"""ActivationOffloadAddon: what the backward needs is copied to the host and back, and the weights are bitwise the same.

There is no GPU here: tensors of the CPU are copied to other tensors of the CPU, through the hooks of a device.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from kit import engines, hand
from kit.engines import ENGINES
from kit.ranks import each_rank
from kit.table import Task
from zae import AddOnConflict, ConfigError
from zae.addons import (
    ActivationOffloadAddon,
    AMPAddon,
    CompileAddon,
    DeepSpeedAddon,
    EMAAddon,
    GradientAccumulationAddon,
    GradientCheckpointingAddon,
    StateManagerAddon,
)
from zae.addons.activation_offload import addon as module_of_the_add_on
from zae.addons.activation_offload import offload
from zae.addons.activation_offload.offload import HostStorage, Offloaded
from zae.addons.gradient_checkpointing.recompute import Recomputed

CPU = torch.device("cpu")


class OffloadAsOnADeviceAddon(ActivationOffloadAddon):
    """Copies on the CPU what it would copy of a device."""

    def _why_idle(self) -> str:
        return ""


OFFLOAD = OffloadAsOnADeviceAddon


class Block(nn.Module):
    """A layer with what copies could change: dropout, statistics, a transposed weight, a view, and a shared input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gate, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x @ self.layer.weight.t()) * torch.sigmoid(self.gate(x))
        return x + self.dropout(torch.relu(self.norm(mixed.t().contiguous().t())))


def network(blocks: int = 3, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 2))


def build(*add_ons: Any, model: Any = None, **options: Any) -> Any:
    made = network() if model is None else model
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    if OFFLOAD in add_ons:
        options = {"offload_min_bytes": 0, **options}
    return Task.add_on(*add_ons)(made, "cpu", optimizer=optimizer, log_bar=False, seed=3, **options)


def trained(*add_ons: Any, **options: Any) -> Any:
    trainer = build(*add_ons, **options)
    trainer.run(2, hand.loader(24), hand.loader(8))
    return trainer


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is copied to the host, in its order."""
    found: list[torch.Tensor] = []
    pack = HostStorage.pack

    def note(self: HostStorage, tensor: torch.Tensor, held: set[int]) -> Any:
        packed = pack(self, tensor, held)
        found.extend([tensor] if isinstance(packed, torch.Tensor) else [])
        return packed

    monkeypatch.setattr(HostStorage, "pack", note)
    return found


@pytest.mark.sample(count=3)
@pytest.mark.parametrize(
    "options",
    [{}, {"offload_modules": Block}, {"offload_modules": ["1", "2"]}, {"offload_min_bytes": 100},
     {"offload_modules": lambda name, module: isinstance(module, (Block, nn.Dropout))}, {"offload_modules": ["*"]}],
    ids=["repeated", "class", "names", "larger", "function", "all"],
)  # fmt: skip
def test_weights_and_statistics_are_bitwise_the_same(options: Any, copies: Any) -> None:
    plain, trainer = trained(), trained(OFFLOAD, **options)
    assert hand.digest(trainer.model) == hand.digest(plain.model)
    assert trainer.test_metrics == plain.test_metrics
    assert copies
    assert "forward" not in vars(trainer.model[1]), "the forward is restored"


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ((AMPAddon,), {"precision": "bf16"}),
        ((AMPAddon,), {"precision": "fp16"}),
        ((GradientAccumulationAddon, EMAAddon), {"gradient_accumulation_steps": 2, "decay": 0.5}),
        ((GradientCheckpointingAddon,), {}),
    ],
    ids=["bf16", "fp16", "windows", "checkpointing"],
)
def test_it_composes(others: Any, options: Any, copies: Any) -> None:
    plain, trainer = trained(*others, **options), trained(OFFLOAD, *others, **options)
    assert hand.digest(trainer.model) == hand.digest(plain.model)
    assert copies


def test_of_what_is_computed_again_the_inputs_alone_are_offloaded(copies: Any) -> None:
    """The copies of a step are one input for each block; without checkpointing they are many more."""
    counts = []
    for add_ons in ((OFFLOAD, GradientCheckpointingAddon), (GradientCheckpointingAddon, OFFLOAD), (OFFLOAD,)):
        trainer = build(*add_ons)
        copies.clear()
        with trainer.ready():
            trainer.train_step((torch.ones(6, 4), torch.zeros(6, dtype=torch.long)))["loss"].backward()
            assert isinstance(trainer.model[1].forward, Offloaded)
            assert isinstance(trainer.model[1].forward.forward, Recomputed) == (len(add_ons) == 2)
        counts.append(len(copies))
        assert "forward" not in vars(trainer.model[1])
    assert counts[:2] == [3, 3]
    assert counts[2] > 15


def test_what_is_compiled_is_left_to_the_compiler(copies: Any) -> None:
    ends = []
    for add_ons in ((CompileAddon,), (OFFLOAD, CompileAddon)):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))
        trainer = trained(*add_ons, model=model, compile_target="step", compile_backend="eager")
        assert trainer.compile_report["graphs"] > 0
        ends.append(hand.digest(model))
    assert ends[0] == ends[1]
    assert not copies


def test_parameters_and_buffers_and_views_of_them_stay(copies: Any) -> None:
    model = network()
    held = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    trained(OFFLOAD, model=model)
    assert len(copies) > 50
    assert not [each for each in copies if each.untyped_storage().data_ptr() in held]


def one_step(storage: HostStorage, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    undo = offload.offload({"": model}, storage)
    try:
        model(x).sum().backward()
    finally:
        undo()
    return [each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize("min_bytes", [0, 1 << 30], ids=["copied", "kept"])
def test_a_saved_tensor_that_is_changed_in_place_never_gives_a_wrong_gradient(min_bytes: int) -> None:
    """With hooks torch does not check it: what was copied is right, and what was kept is refused as without hooks."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).sigmoid()
            self.changed = y.add_(1)  # The backward of the sigmoid needs what it returned.
            return self.changed

    torch.manual_seed(0)
    model, storage = Changing(), HostStorage(CPU, min_bytes, False)
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    if min_bytes:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a torch.float32 tensor of shape"):
            one_step(storage, model, x)
    else:
        found = one_step(storage, model, x)[1]
        y = model.layer(x).sigmoid()
        assert torch.equal(found, (y * (1 - y)).sum(0).detach())


def test_gradients_of_gradients_and_a_graph_that_is_kept() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)

    def seconds() -> list[torch.Tensor]:
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        again = torch.autograd.grad(loss, x, retain_graph=True)
        return [first, *again, *torch.autograd.grad(first.square().sum(), [*model.parameters(), x])]

    plain, undo = seconds(), offload.offload({"": model}, HostStorage(CPU, 0, False))
    found = seconds()
    undo()
    assert all(map(torch.equal, plain, found))


def test_a_forward_of_the_module_itself_is_restored() -> None:
    """One that a script has set, as PEFT and accelerate do; checkpointing restores it as well."""
    for add_on in (OFFLOAD, GradientCheckpointingAddon):
        model = network()
        own = model[1].forward = lambda x, block=model[1]: Block.forward(block, x) * 1.0
        trained(add_on, model=model)
        assert model[1].forward is own


def test_on_a_cpu_nothing_is_wrapped_and_one_warning_says_so(caplog: Any) -> None:
    module_of_the_add_on._warn.cache_clear()
    trainer = build(ActivationOffloadAddon)
    with caplog.at_level(logging.WARNING), trainer.ready():
        assert "forward" not in vars(trainer.model[1])
    trained(ActivationOffloadAddon)
    text = "ActivationOffloadAddon does nothing: what cpu saves for the backward is in the memory of the host already"
    assert [record.getMessage() for record in caplog.records] == [text]


def test_a_resume_is_bitwise(tmp_path: Any) -> None:
    options = {"save_path": tmp_path / "run", "save_every": 1, "resume": "auto"}
    build(OFFLOAD, StateManagerAddon, **options).run(2, hand.loader(24), hand.loader(8), max_steps=4)
    resumed = trained(OFFLOAD, StateManagerAddon, **options)
    assert hand.digest(resumed.model) == hand.digest(trained().model)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["alone", "checkpointing"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ddp", "fsdp", "hsdp", "tensor", "2-D")]
)
def test_engines_train_to_the_same_weights(name: str, checkpointed: bool) -> None:
    """Beside the same engine without it, with dropout where the engine has it."""

    def compare() -> None:
        engine, ends = ENGINES[name], []
        more = (GradientCheckpointingAddon,) * checkpointed
        for add_ons, options in ((more, {}), ((*more, OFFLOAD), {"offload_min_bytes": 0})):
            model = engines.net(dropout=0.5 if name in ("ddp", "fsdp", "hsdp") else 0.0)
            trainer = engines.build(engine, *add_ons, model=model, **options)
            trainer.run(1, engines.data(24, 4), engines.data(5, 2, False))
            assert trainer.world_size == engine.world
            ends.append(engines.weights(trainer))
        assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())

    each_rank(ENGINES[name].world, compare)


def test_fsdp_does_not_copy_gathered_parameters() -> None:
    """In a block whose parts are gathered after its own forward has begun too."""

    def compare() -> None:
        copied: list[Any] = []
        pack = HostStorage.pack

        def note(self: Any, tensor: Any, held: Any) -> Any:
            packed = pack(self, tensor, held)
            copied.extend([tensor.shape] if isinstance(packed, torch.Tensor) else [])
            return packed

        HostStorage.pack = note  # type: ignore[method-assign]
        try:
            ends = []
            for add_ons, options in (((), {}), ((OFFLOAD,), {"offload_min_bytes": 0, "offload_modules": ["blocks.*"]})):
                blocks = ["blocks.*", "blocks.*.first", "blocks.*.second"]
                trainer = engines.build(ENGINES["fsdp"], *add_ons, fsdp_blocks=blocks, **options)
                trainer.run(1, engines.data(12, 3))
                ends.append(engines.weights(trainer))
        finally:
            HostStorage.pack = pack  # type: ignore[method-assign]
        assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
        assert copied
        assert not [shape for shape in copied if shape in [(8, 8), (16, 8), (8, 16), (8,), (16,)]]

    each_rank(ENGINES["fsdp"].world, compare)


def test_what_is_offloaded_is_shown_and_the_outermost_counts() -> None:
    trainer = build(OFFLOAD, offload_modules=[Block, nn.Linear])
    assert sorted(trainer.offloaded()) == ["0", "1", "2", "3", "4"]
    notes = trainer.plan(1, hand.loader()).notes
    assert "kept on the host until the backward: 3 of Block (1 to 3), 2 of Linear (0 to 4)" in notes
    trainer.evaluate(hand.loader(8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload_modules": ["blocks.*"]}, r"offload_modules: no module of Sequential is 'blocks.\*'"),
        ({"offload_modules": 3}, "offload_modules=3; give classes, names, or a function"),
        ({"model": nn.Linear(4, 2)}, "no module of Linear is repeated, so none is offloaded; name them"),
    ],
)
def test_what_cannot_be_meant_is_refused_on_a_cpu_too(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(ActivationOffloadAddon, **options).run(1, hand.loader())


def test_what_is_computed_again_around_it_is_refused() -> None:
    with pytest.raises(AddOnConflict, match="find the parameters of a module by its forward"):
        Task.add_on(OFFLOAD, DeepSpeedAddon)
    with pytest.raises(ConfigError, match=r"offload_modules: 1.layer is in 1, which is computed again"):
        build(OFFLOAD, GradientCheckpointingAddon, offload_modules=["1.layer"]).run(1, hand.loader())
    model = network()
    model.is_gradient_checkpointing = True
    with pytest.raises(ConfigError, match="Sequential checkpoints its layers itself"):
        build(OFFLOAD, model=model).run(1, hand.loader())
