"""docs/reference/addons/, one page for each add-on, made from its class."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from _generators import DOCS, ROOT, options
from zae import AddOnConflict, Trainer
from zae.compose.introspect import function_of, hooks_of, is_add_on, is_base, is_marked, traits_of
from zae.compose.options import options_of
from zae.loop.addon_state import declaring

FOLDER = DOCS / "reference" / "addons"
COSTS = ROOT / "benchmarks" / "addon_costs.json"

_ADAM = "optimizer=torch.optim.AdamW(model.parameters())"
_RANKS = "print(trainer.plan(20, train, test))  # trainer.run(20, train, test) starts the ranks"
_CLIENT = "print(trainer.plan(20, train, test))  # trainer.run(20, train, test) starts the client"

OPTIONS = {
    "AMPAddon": 'precision="auto"',
    "ActivationOffloadAddon": "offload_modules=torch.nn.Linear",
    "EMAAddon": "decay=0.98",
    "EarlyStoppingAddon": "patience=3",
    "GradientAccumulationAddon": "gradient_accumulation_steps=4",
    "GradientCheckpointingAddon": "checkpoint_modules=torch.nn.Linear",
    "JSONLLoggerAddon": 'jsonl_path="runs/log.jsonl"',
    "LedgerAddon": 'ledger_path="runs/ledger.jsonl"',
    "ProfilerAddon": 'profile_dir="runs/profile"',
    "ReportAddon": 'report_path="runs/report.html"',
    "SilentFaultGuardAddon": "fault_check_every=3",
    "SpikeGuardAddon": "spike_threshold=10.0",
    "AutoBatchAddon": "micro_batch_size=None",
    "StateManagerAddon": 'save_path="runs/saved", resume="auto"',
    "TensorBoardLoggerAddon": 'log_dir="runs/board"',
}
"""The options with which an add-on is shown in one run of one epoch; without an entry it is shown without options."""

USES = {
    "AccelerateAddon": """
Task = Digits.add_on(AccelerateAddon)
trainer = Task(model, {adam})
print(Task.explain())  # trainer.run(20, train, test) in a script that `accelerate launch` or torchrun starts
""",
    "CallbackAddon": """
class Announce:
    def on_epoch_end(self, trainer):
        print("epoch", trainer.progress_checker.epoch, "has ended")

trainer = Digits.add_on(CallbackAddon)(model, {adam}, callbacks=[Announce])
trainer.run(1, train, test)
""",
    "CompileAddon": """
Task = Digits.add_on(CompileAddon)
trainer = Task(model, {adam}, compile_mode="max-autotune")
print(trainer.plan(20, train, test))  # trainer.run(20, train, test) compiles at its first step
""",
    "DeepSpeedAddon": """
config = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
Task = Digits.add_on(DeepSpeedAddon)
trainer = Task(model, ["cpu", "cpu"], {adam}, deepspeed_config=config)
print(trainer.zero_stage)  # trainer.run(20, train, test) starts the ranks
""",
    "PipelineAddon": """
Task = Digits.add_on(PipelineAddon)
trainer = Task(model, ["cpu", "cpu"], {adam}, split=2, pipeline_microbatches=4)
print(trainer.pipeline_microbatches)  # trainer.run(20, train, test) starts the ranks
""",
    "FSDPAddon": """
Task = Digits.add_on(FSDPAddon)
trainer = Task(model, ["cpu", "cpu"], {adam})  # ["cuda:0", "cuda:1"] where there are GPUs
{ranks}
""",
    "HuggingFaceAddon": """
from transformers import BertConfig, BertForSequenceClassification

sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
bert = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
data = [{"input_ids": [2, 5 + i, 3], "labels": i % 2} for i in range(16)]
trainer = Trainer.add_on(HuggingFaceAddon)(bert, train_dataset=data, num_train_epochs=1, learning_rate=1e-3)
trainer.train()
""",
    "MLflowLoggerAddon": """
Task = Digits.add_on(MLflowLoggerAddon)
trainer = Task(model, {adam}, web_logger={"mlflow": {"experiment_name": "digits"}})
{client}
""",
    "MultiGPUAddon": """
Task = Digits.add_on(MultiGPUAddon)
trainer = Task(model, ["cpu", "cpu"], {adam})  # ["cuda:0", "cuda:1"] where there are GPUs
{ranks}
""",
    "NeptuneLoggerAddon": """
Task = Digits.add_on(NeptuneLoggerAddon)
trainer = Task(model, {adam}, web_logger={"neptune": {"mode": "offline"}})
{client}
""",
    "PEFTAddon": """
import peft

config = peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"])
trainer = Digits.add_on(PEFTAddon)(lambda: model, optimizer=torch.optim.AdamW, seed=0, peft_config=config)
trainer.run(1, train, test)
""",
    "TensorParallelAddon": """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
trainer = Digits.add_on(TensorParallelAddon)(model, ["cpu", "cpu"], {adam}, tensor_plan=plan)
{ranks}
""",
    "TorchMetricsAddon": """
from torchmetrics.classification import MulticlassF1Score

class WithOutput(Digits):
    def test_step(self, batch):
        images, labels = batch
        return {"loss": cross_entropy(logits := self.model(images), labels), "output": logits, "targets": labels}

Task = WithOutput.add_on(TorchMetricsAddon)
trainer = Task(model, {adam}, torch_metrics={"f1": MulticlassF1Score(num_classes=10)}, monitor="f1")
trainer.run(1, train, test)
""",
    "TrackioLoggerAddon": """
Task = Digits.add_on(TrackioLoggerAddon)
trainer = Task(model, {adam}, web_logger={"trackio": {"project": "digits"}})
{client}
""",
    "WandBLoggerAddon": """
Task = Digits.add_on(WandBLoggerAddon)
trainer = Task(model, {adam}, web_logger={"wandb": {"project": "digits", "mode": "offline"}})
{client}
""",
}
"""What an add-on needs more than options for."""

NOT_MEASURED = {
    "AccelerateAddon": "Not measured here: it needs several ranks.",
    "ActivationOffloadAddon": "On a CPU it does nothing. Not measured on a GPU, because none was at hand.",
    "AutoBatchAddon": "A step notes the random streams and the versions of the weights, so that it can be repeated: "
    "about 0.2 ms, `python -m timeit -s \"from zae.common import random_state\" \"random_state.rewind()\"`. The "
    "networks of the other pages have BatchNorm.",
    "CompileAddon": "It makes a step faster or slower: [the page on compiled steps](../../features/compile.md) says "
    "which.",
    "DeepSpeedAddon": "Not measured here: it needs several ranks.",
    "FSDPAddon": "Not measured here: it needs several ranks.",
    "HuggingFaceAddon": "Not measured here: it brings its own training step.",
    "MLflowLoggerAddon": "Not measured here: it needs its service. Records are sent by a thread, and no step waits.",
    "MultiGPUAddon": "Not measured here: it needs several ranks. `python benchmarks/distributed.py` measures it.",
    "NeptuneLoggerAddon": "Not measured here: it needs its service. Records are sent by a thread, and no step waits.",
    "PEFTAddon": "Not measured here: it changes the model that is trained.",
    "PipelineAddon": "Not measured here: it needs several ranks.",
    "TensorParallelAddon": "Not measured here: it needs several ranks.",
    "TorchMetricsAddon": "It is the time of torchmetrics: one `update` of MulticlassF1Score over 64 rows of 10 classes "
    "takes 0.15 ms of one CPU thread, of MeanMetric 0.05 ms (torchmetrics 1.9.0). Where training is not measured, its "
    "steps are those without the add-on.",
    "TrackioLoggerAddon": "Not measured here: it needs its service. Records are sent by a thread, and no step waits.",
    "WandBLoggerAddon": "Not measured here: it needs its service. Records are sent by a thread, and no step waits.",
}  # fmt: skip


def use(name: str) -> str:
    """Return the block that shows an add-on; it continues the README's first one."""
    text = USES.get(name)
    if text is None:
        options = f", {OPTIONS[name]}" if name in OPTIONS else ""
        text = (
            f"\nTask = Digits.add_on({name})\ntrainer = Task(model, {{adam}}{options})\ntrainer.run(1, train, test)\n"
        )
    text = text.replace("{adam}", _ADAM).replace("{ranks}", _RANKS).replace("{client}", _CLIENT)
    imports = f"from zae.addons import {name}\n"
    if text.startswith(("\nimport ", "\nfrom ")):
        first, _, rest = text.lstrip().partition("\n")
        return f"```python\n{first}\n{imports}{rest}```"
    return f"```python\n{imports}{text}```"


def owners(cls: Any) -> list[Any]:
    """Return an add-on and its bases, without AddOnBase and Trainer."""
    return [each for each in cls.__mro__ if is_add_on(each) and not is_base(each)]


def hooks(cls: Any) -> Iterator[str]:
    """Yield a line for each hook that an add-on overrides, with what its override does."""
    for name in hooks_of(cls):
        owner = next((each for each in owners(cls) if name in each.__dict__), None)
        if owner is None:
            continue
        function = owner.__dict__[name]
        does = inspect.cleandoc(function_of(function).__doc__ or "").partition("\n\n")[0]
        mark = "; it does not call `super()`" if is_marked(function, "__replaces__") else ""
        does = options.markdown(" ".join(does.split())).rstrip(".")
        yield f"| `{name}` | {does}{mark} |"


@cache
def conflicts() -> dict[str, dict[str, str]]:
    """Map each add-on to those that it cannot be combined with, and the error that says why."""
    found: dict[str, dict[str, str]] = {name: {} for name in options.add_ons()}
    for (one, first), (two, second) in itertools.combinations(options.add_ons().items(), 2):
        try:
            Trainer.add_on(first, second)
        except AddOnConflict as error:
            found[one][two] = found[two][one] = str(error)
    return found


def meant(declared: Any) -> list[str]:
    """List the add-ons that are meant by traits, slots, classes and names."""
    wanted = {getattr(each, "__name__", each) for each in declared}
    found = {name: cls for name, cls in options.add_ons().items() if name in wanted or wanted & traits_of(cls)}
    return [name for name, cls in found.items() if not {*cls.__mro__[1:]} & {*found.values()}]  # Not its loggers.


def combining(name: str, cls: Any) -> Iterator[str]:
    """Yield what else has to be there, or must not."""
    for each in cls.requires:
        yield f"- It requires `{getattr(each, '__name__', each)}`."
    for word, others in (("inside", cls.inside), ("outside", cls.outside)):
        if others:
            names = ", ".join(f"`{each}`" for each in meant(others) if each not in conflicts()[name])
            yield f"- It acts {word} of {names}, where both are there."
    refused = conflicts()[name]
    for other, why in refused.items():
        why = re.sub(rf"^({name} and {other}|{other} and {name}) do not go together: ", "", why)
        yield f"- Not with [{other}]({other}.md): {options.markdown(why)}."
    if not refused:
        yield "- No add-on of zae excludes it."


def state(cls: Any) -> Iterator[str]:
    """Yield what a checkpoint contains of an add-on."""
    entries = declaring(cls)
    for owner in entries:
        shared = [f"`{each.lstrip('_')}`" for each in owner.state_attributes]
        by_rank = [f"`{each.lstrip('_')}`" for each in owner.rank_state_attributes]
        parts = [f"{', '.join(shared)}, the same on every rank"] if shared else []
        parts += [f"{', '.join(by_rank)}, for each rank"] if by_rank else []
        yield f"A checkpoint has an entry `{owner.__name__}` with {'; and '.join(parts)}.\n"
    written = [each for each in owners(cls) if "state_dict" in each.__dict__ and each not in entries]
    for owner in written:
        does = inspect.cleandoc(owner.__dict__["state_dict"].__doc__).partition("\n\n")[0]
        yield f"{options.markdown(' '.join(does.split()))}\n"
    if not entries and not written:
        yield "It saves nothing in checkpoints.\n"
    if cls.checks_model:
        yield "`start_from` loads this state with the weights, and refuses that of another model.\n"


def cost(name: str) -> str:
    """Return what a step costs with an add-on, from the measured figures."""
    if name in NOT_MEASURED:
        return NOT_MEASURED[name]
    found = json.loads(COSTS.read_text(encoding="utf-8"))
    if name not in found["add_ons"]:
        raise SystemExit(
            f"the cost of {name} is not measured: run python benchmarks/addon_costs.py {name}, or write into "
            "NOT_MEASURED of docs/_generators/addons.py why it is not"
        )
    rows = "\n".join(
        f"| {words} | {found['steps_us'][key] / 1000:.2g} ms | {middle:.2f} | {low:.2f} to {high:.2f} |"
        for key, words in (("free", "a tiny network, over a list of batches"), ("cnn", "a small convolutional network"))
        for low, middle, high in [found["add_ons"][name][key]]
    )
    setting = f"`{OPTIONS[name]}`" if OPTIONS.get(name) else "the default options"
    control = [bound for bounds in found.get("control", {}).values() for bound in bounds]
    noise = (
        f" A control, two runs without add-ons, gave {min(control):.2f} to {max(control):.2f}: a figure in this range "
        "is noise."
        if control
        else ""
    )
    return (
        f"The CPU time of a run with the add-on, in multiples of the same run without it. Both take turns in one "
        f"process (`python benchmarks/addon_costs.py`; {found['machine']}; {setting}). A run has "
        f"{found['steps']['free']} steps of the tiny network, or {found['steps']['cnn']} of the other.{noise}\n\n"
        f"| model | step without it | with it, median | {found['spread']} |\n|---|---|---|---|\n{rows}"
    )


def page(name: str, cls: Any) -> str:
    """Return the text of one page."""
    plain = options_of(Trainer)
    own = [option for option in options_of(Trainer.add_on(cls)) if option not in plain]
    required = [
        option for option in own if inspect.signature(cls).parameters[option].default is inspect.Parameter.empty
    ]
    if required and name not in {*OPTIONS, *USES}:
        raise SystemExit(
            f"{name} needs {', '.join(required)}: write a value into OPTIONS of docs/_generators/addons.py, or an "
            "example into USES"
        )
    extra = options.extra_of(name)
    parts = [
        f"# {name}\n\n{options.markdown(options.parse(cls)[0])}\n\n## Use\n",
        f"After [the README's first block](../../../README.md#write-your-own):\n\n{use(name)}\n",
        *([f'It needs the extra `{extra}`: `pip install -e ".[{extra}]"`.\n'] if extra else []),
        "## Options\n",
        *([*options.table(Trainer.add_on(cls), own)] if own else ["It has no options."]),
        "\nThe class takes [the options of every trainer](../options.md#every-trainer) as well.\n",
        f"## Layer and slot\n\nIt acts in the layer `{cls.layer}`"
        + (f", and fills the slot `{cls.slot}`.\n" if cls.slot else ", and fills no slot.\n"),
        *combining(name, cls),
        "\n## Hooks that it overrides\n\n| hook | what it does there |\n|---|---|",
        *hooks(cls),
        "\n## State\n",
        *state(cls),
        f"## Cost\n\n{cost(name)}\n",
        f"## Class\n\n:::{{eval-rst}}\n.. autoclass:: zae.addons.{name}\n   :members:\n:::\n",
        "This page is generated from the class by `python docs/_generators`; a test fails if it is out of date.",
    ]
    return "\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    """Return the text of each page."""
    return {FOLDER / f"{name}.md": page(name, cls) for name, cls in options.add_ons().items()}
