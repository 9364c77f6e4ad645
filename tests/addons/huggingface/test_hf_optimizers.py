"""Optimizers and schedules by the names of Transformers are those that its Trainer creates."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from zae import Trainer
from zae.addons.huggingface import optimizers
from zae.errors import ConfigError

HERE = {
    *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    *(("adamw_torch_4bit", "adamw_torch_8bit") if importlib.util.find_spec("torchao") else ()),
}
KWARGS = {
    "polynomial": {"lr_end": 1e-3, "power": 2.0},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr": 0.01},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
}


class Net(nn.Module):
    """Weights, biases, and norms by class and by name."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.layer = nn.LayerNorm(4)
        self.rms_norm = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(self.frozen(self.rms_norm(self.layer(self.inner(inputs)))) * self.scale)


class Task(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Net()


def arguments(folder, **more):
    given = {"learning_rate": 0.1, "weight_decay": 0.01, "use_cpu": True, "report_to": "none", **more}
    return TrainingArguments(output_dir=str(folder), **given)


def groups(optimizer, model):
    """The groups with the names of their parameters."""
    names = {id(each): name for name, each in model.named_parameters()}
    return [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]


def step(model, optimizer, inputs):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", sorted(HERE))
def test_an_optimizer_is_that_of_transformers(name, tmp_path, model):
    """Class, groups, defaults, and the weights after five steps."""
    more = {"optim_args": "momentum=0.9,nesterov=true"} if name == "sgd" else {}
    more |= {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-7} if "adam" in name else {}
    args = arguments(tmp_path, optim=name, **more)
    theirs, ours, by_name = (copy.deepcopy(model) for _ in range(3))
    factory = optimizers.optimizer(name, learning_rate=0.1, weight_decay=0.01, **more)
    made = [
        transformers.Trainer(theirs, args).create_optimizer(),
        optimizers.OptimizerFactory(args)(ours),
        pickle.loads(pickle.dumps(factory))(by_name),
    ]
    expected = groups(made[0], theirs)
    assert [group["params"] for group in expected] == [
        ["scale", "inner.weight", "head.weight"],
        ["inner.bias", "layer.weight", "layer.bias", "rms_norm.weight", "head.bias"],
    ]
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    for net, optimizer in zip((theirs, ours, by_name), made):
        assert type(optimizer) is type(made[0])
        assert groups(optimizer, net) == expected
        if hasattr(optimizer, "train"):
            optimizer.train()
        for _ in range(5):
            step(net, optimizer, inputs)
    for net in (ours, by_name):
        assert all(map(torch.equal, net.parameters(), theirs.parameters()))
    assert not torch.equal(theirs.inner.weight, model.inner.weight)


@pytest.mark.parametrize("warmup", [0, 4, 0.3])
@pytest.mark.parametrize("name", [each.value for each in SchedulerType if each.value != "greedy"])
def test_a_schedule_is_that_of_transformers(name, warmup, tmp_path, model):
    """The rate of each group over 20 steps."""
    more = {"eval_strategy": "epoch"} if name == "reduce_lr_on_plateau" else {}
    kwargs = KWARGS.get(name)
    args = arguments(
        tmp_path, optim="sgd", lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs, **more
    )
    trainer = transformers.Trainer(copy.deepcopy(model), args, eval_dataset=[0])
    theirs = trainer.create_optimizer(), trainer.create_scheduler(20)
    optimizer = optimizers.OptimizerFactory(args)(copy.deepcopy(model))
    ours = optimizer, optimizers.schedule(name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)(optimizer, 20)
    rates = []
    for optimizer, scheduler in (theirs, ours):
        found = []
        for index in range(20):
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step(*[float(index // 3)] * (name == "reduce_lr_on_plateau"))
        rates.append(found)
    assert rates[0] == rates[1]
    assert len({tuple(each) for each in rates[0]}) > 1 or name == "constant" or (name, warmup) == (
        "constant_with_warmup", 0,
    )  # fmt: skip


def test_a_name_that_cannot_be_made_is_refused_with_a_remedy(model):
    """Each name of the installed Transformers makes an optimizer, or says what to install or to write."""
    refused = {}
    for each in OptimizerNames:
        try:
            optimizers.optimizer(each.value)(copy.deepcopy(model))
        except ConfigError as error:
            refused[each.value] = str(error)
    assert set(refused) == {each.value for each in OptimizerNames} - HERE
    for name, text in refused.items():
        assert repr(name) in text
        # What Transformers itself says of a package: to install it, or, of torch_xla and torch_npu, to import from it.
        assert re.search(r"install|failed to import \w+|; write optim=", text)
    with pytest.raises(ConfigError, match=r"unknown optim='adamw_tortch'; did you mean 'adamw_torch'\?"):
        optimizers.optimizer("adamw_tortch")
    with pytest.raises(ConfigError, match="unknown lr_scheduler_type='zig'; it is one of linear, cosine, "):
        optimizers.schedule("zig")
    with pytest.raises(ConfigError, match=r"unknown argument 'lr' for optimizers.optimizer"):
        optimizers.optimizer("sgd", lr=0.1)
    with pytest.raises(ConfigError, match="warmup_steps=-1; write a number of steps, or a share"):
        optimizers.schedule("linear", warmup_steps=-1)
    with pytest.raises(ConfigError, match="lr_scheduler_type='greedy' is not a torch scheduler"):
        optimizers.schedule("greedy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs={'cycles': 2} cannot be made: .*'cycles'"):
        optimizers.schedule("cosine", lr_scheduler_kwargs={"cycles": 2})(optimizer, 20)
    with pytest.raises(ConfigError, match=r"the loader has no length; write run\(\.\.\., max_steps=1000\)"):
        optimizers.schedule("cosine")(optimizer, None)


def test_a_trainer_takes_both(tmp_path, model):
    """In a run, in its plan, resumed to a longer run; a second run beyond the schedule is refused."""
    inputs = [torch.randn(8, 3, generator=torch.Generator().manual_seed(index)) for index in range(5)]
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    args = arguments(tmp_path, optim="sgd", lr_scheduler_type="cosine", warmup_steps=2)
    optimizer = optimizers.OptimizerFactory(args)(theirs)
    scheduler = transformers.get_scheduler("cosine", optimizer, 2, 10)
    for batch in inputs * 2:
        step(theirs, optimizer, batch)
        scheduler.step()

    def make(net):
        return Task.add_on("StateManagerAddon")(
            net, "cpu",
            optimizer=optimizers.optimizer("sgd", learning_rate=0.1, weight_decay=0.01),
            scheduler=optimizers.schedule("cosine", warmup_steps=2),
            save_path=tmp_path / "run", resume="auto", log_bar=False,
        )  # fmt: skip

    trainer = make(ours)
    planned = trainer.plan(2, inputs)
    assert "lr/1" in str(planned)
    assert all(map(torch.equal, ours.parameters(), model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run(2, inputs)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    with pytest.raises(ConfigError, match=r"scheduler 0 \(Schedule\) ends after 10 steps, but this run has 5"):
        trainer.run(1, inputs)
    longer = make(copy.deepcopy(model))
    assert longer.run(3, inputs)["step"] == 15
    assert longer.scheduler.total_iters == 15
