"""Every optimizer of pytorch_optimizer that trains by hand resumes bitwise, or is refused in its first step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from zae import CheckpointError, Every, Trainer
from zae.addons import StateManagerAddon

pytestmark = [
    pytest.mark.fits,
    pytest.mark.filterwarnings("ignore"),
]
INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
TARGETS = (INPUTS.sum(1) > 0).long()
STEPS, KILLED_AT = 15, 7
# They keep objects of their own classes in their state, which torch.save would pickle.
REFUSED = {"conda": "GaLoreProjector", "scalableshampoo": "PreConditioner"}
# A step of the loop by hand as well: they need a closure, the gradients' own graph, or take the step over.
OTHER_LOOPS = {"adahessian", "sophiah", "alig", "bsam", "lbfgs", "lomo", "adalomo", "distributedmuon"}


def in_groups(kind: type[Optimizer], params: Any) -> Optimizer:
    """Muon and its kin take the matrices in one group and the rest in another one."""
    held = list(params)
    groups = [
        {"params": [each for each in held if each.ndim == 2], "use_muon": True},
        {"params": [each for each in held if each.ndim != 2], "use_muon": False},
    ]
    return kind(groups)


def makers() -> dict[str, Callable[[Any], Optimizer]]:
    """Return what makes each optimizer of the parameters of a model, by name."""
    import pytorch_optimizer as library

    def of(name: str) -> Callable[[Any], Optimizer]:
        kind: Any = library.load_optimizer(name)
        if name in ("muon", "adamuon", "adago", "normuon", "muonclip"):
            return lambda params: in_groups(kind, params)
        if name == "ranger21":
            return lambda params: kind(params, num_iterations=STEPS)
        if name == "spectralsphere":
            return lambda params: kind([each for each in params if each.ndim == 2])
        return lambda params: kind(params, lr=0.01) if name != "adafactor" else kind(params)

    found = {name: of(name) for name in library.get_supported_optimizers() if name not in OTHER_LOOPS}
    found["Lookahead"] = lambda params: library.Lookahead(Adam(params, lr=0.01), k=3)
    found["OrthoGrad"] = lambda params: library.OrthoGrad(Adam(params, lr=0.01))
    found["TRAC"] = lambda params: library.TRAC(Adam(params, lr=0.01))
    found["ScheduleFreeWrapper"] = lambda params: library.ScheduleFreeWrapper(Adam(params, lr=0.01), momentum=0.9)
    found["Lookahead of SOAP"] = lambda params: library.Lookahead(library.SOAP(params, lr=0.01), k=3)
    return found


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8, shuffle=True)


class Task(Trainer):
    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": cross_entropy(self.model(inputs), targets)}

    test_step = train_step


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def by_hand(make: Callable[[Any], Optimizer]) -> dict[str, Tensor] | None:
    """Return the weights of the loop by hand; None where that fails."""
    torch.manual_seed(0)
    model = network()
    torch.manual_seed(0)  # As the trainer does when it is set up.
    try:
        optimizer = make(model.parameters())
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        for _ in range(3):
            for inputs, targets in loader():
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    except Exception as error:
        logging.getLogger("zae").debug("%s", error)
        return None
    return weights(model)


def train(make: Callable[[Any], Optimizer], folder: Any, limits: tuple[int | None, ...]) -> Any:
    """Return the weights after runs that each begin as a script does, and the last trainer."""
    for limit in limits:
        trainer = Task.add_on(StateManagerAddon)(
            network, "cpu", optimizer=make, seed=0, save_path=folder, save_every=Every(steps=1), resume="auto",
            log_bar=False,
        )  # fmt: skip
        trainer.run(3, loader(), max_steps=limit)
    optimizer = trainer.optimizers["0"]
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return weights(trainer.unwrap())


def test_every_optimizer_resumes_bitwise_or_is_refused_in_its_first_step(tmp_path):
    tried, faults = [], []
    for name, make in makers().items():
        expected = by_hand(make)
        if expected is None:
            continue
        tried.append(name)
        if name in REFUSED:
            with pytest.raises(CheckpointError, match=REFUSED[name]):
                train(make, tmp_path / name, (1,))
            continue
        try:
            straight = train(make, tmp_path / name / "straight", (None,))
            resumed = train(make, tmp_path / name / "resumed", (KILLED_AT, None))
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for what, found in (("straight", straight), ("resumed", resumed)):
            if not all(torch.equal(found[key], expected[key]) for key in expected):
                faults.append(f"{name}: {what} differs from the loop by hand")
    assert not faults, "\n".join(faults)
    assert len(tried) >= 120
