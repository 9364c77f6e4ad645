"""What the pages of docs/howto show beside their blocks: the command of the container, stopped and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from kit import faults, hand
from kit.blocks import find_page, read_dockerfile
from kit.scripts import Script
from zae import Every, Trainer
from zae.addons import AMPAddon, GradientAccumulationAddon, StateManagerAddon
from zae.checkpoint.folder import list_checkpoints
from zae.checkpoint.reader import load_checkpoint
from zae.errors import CheckpointMismatch, ConfigError, StepError, TaskError


def _parts() -> tuple[str, list[str]]:
    """The script of the page on containers, and the command of its Dockerfile."""
    text = find_page("docker").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", text, re.S)[1]
    file = read_dockerfile(re.search(r"```dockerfile\n(.*?)```", text, re.S)[1])
    assert [rest for name, rest in file if name == "STOPSIGNAL"] == ["SIGTERM"]
    assert [rest for name, rest in file if name == "VOLUME"] == ["/app/runs"]
    return script, json.loads(dict(file)["CMD"])


def _start(command: list[str], folder: Path) -> subprocess.Popen[Any]:
    """Start the command of the container as a container would: no terminal, and all signals at their default."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [{"python": sys.executable}.get(word, word) for word in command], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal: else the kernel withholds it from process 1 of a container."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def _blocks(name: str) -> list[str]:
    """Return the python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", find_page(name).read_text(encoding="utf-8"), re.S)


def test_the_plain_loop_and_its_checkpoints_need_nothing_of_zae() -> None:
    """One process trains with zae; another, which cannot import it, trains alone and takes over from its checkpoint."""
    loop, with_zae, read = _blocks("plain_loop")
    assert "zae" not in loop + read
    without = f"import sys\nsys.modules['zae'] = None\n{loop}\n{read}"
    for code in (f"{loop}\n{with_zae}", without):
        status, _, error = Script(code).end()
        assert status == 0, error


def _equal(one: Any, other: Any) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_the_gan_resumes_within_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    page: dict[str, Any] = {}
    exec(_blocks("dcgan")[0], page)
    saves = page["GanTask"].add_on(StateManagerAddon)
    steps_of_an_epoch = len(page["train"])
    for max_steps in (3, steps_of_an_epoch + 1, None):
        model, optimizers = page["make_parts"]()
        torch.manual_seed(1)
        trainer = saves(model, "cpu", optimizer=optimizers, save_path=tmp_path / "gan", resume="auto")
        trainer.run(2, page["train"], max_steps=max_steps)
    assert trainer.progress_checker.step == 2 * steps_of_an_epoch
    assert _equal(page["model"], model)
    assert "random streams" not in caplog.text


def test_five_steps_of_the_discriminator_to_one_of_the_generator() -> None:
    """As the page says it, and by hand: the same weights."""
    page: dict[str, Any] = {}
    exec(_blocks("dcgan")[0], page)

    class Five(page["GanTask"]):  # type: ignore[misc]
        def step_one(self, optimizer: Any) -> bool:
            if optimizer is self.optimizers["generator"] and self.progress_checker.step % 5 != 4:
                return Trainer.step_one(self, optimizer)
            return bool(super().step_one(optimizer))

    model, optimizers = page["make_parts"]()
    torch.manual_seed(1)
    Five(model, "cpu", optimizer=optimizers).run(1, page["train"])

    by_hand, optimizers = page["make_parts"]()
    generator, discriminator = by_hand.generator, by_hand.discriminator
    torch.manual_seed(1)
    for step, real in enumerate(page["train"]):
        fake = generator(torch.randn(len(real), 16))
        by_hand.zero_grad()
        (softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()).backward()
        optimizers["discriminator"].step()
        if step % 5 == 4:
            softplus(-discriminator(fake)).mean().backward()
            optimizers["generator"].step()
    assert _equal(by_hand, model)


@pytest.mark.parametrize(
    ("add_on", "options"),
    [
        (AMPAddon, {"precision": "bf16"}),
        (AMPAddon, {"precision": "fp16"}),
        (GradientAccumulationAddon, {"gradient_accumulation_steps": 2}),
        (None, {"gradient_clip": 1.0}),
    ],
)
def test_what_would_not_act_on_the_generator_is_refused(add_on: Any, options: dict[str, Any]) -> None:
    page: dict[str, Any] = {}
    exec(_blocks("dcgan")[0], page)
    model, optimizers = page["make_parts"]()
    cls = page["GanTask"] if add_on is None else page["GanTask"].add_on(add_on)
    name = "gradient_clip" if add_on is None else add_on.__name__
    with pytest.raises(TaskError, match=f"GanTask.step_one computes gradients without {name}; leave these out"):
        cls(model, "cpu", optimizer=optimizers, **options).run(1, page["train"])


@pytest.mark.exhaustive
def test_the_command_of_the_container_saves_at_sigterm_and_continues(tmp_path: Path) -> None:
    """Stopped as ``docker stop`` does, the run saves and ends with 143; started again, it ends as one that was not."""
    script, command = _parts()
    assert command == ["python", "train.py"]
    (tmp_path / "train.py").write_text(script.replace("n_epoch=2", "n_epoch=400"))
    saved = tmp_path / "runs" / "container"
    process = _start(command, tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not list_checkpoints(saved) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _catches(process.pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    finally:
        process.kill()
    stopped = load_checkpoint(list_checkpoints(saved)[0])[0]["step"]
    n_epoch = stopped // 200 + 1
    (tmp_path / "train.py").write_text(script.replace("n_epoch=2", f"n_epoch={n_epoch}"))
    assert _start(command, tmp_path).wait(120) == 0
    whole: dict[str, Any] = {"__name__": "train"}
    exec(script, whole)
    threads = whole["torch"].get_num_threads()
    whole["torch"].set_num_threads(1)
    try:
        whole["main"](n_epoch, tmp_path / "whole")
    finally:
        whole["torch"].set_num_threads(threads)
    ends = [load_checkpoint(list_checkpoints(folder)[0]) for folder in (saved, tmp_path / "whole")]
    assert ends[0][0]["step"] == ends[1][0]["step"] == 200 * n_epoch > stopped
    assert all((ends[0][1][name] == tensor).all() for name, tensor in ends[1][1].items())


def test_a_loss_of_several_numbers_is_refused_in_a_validation() -> None:
    """As in a training step: its mean would be over another thing than the samples, and was left out in silence."""

    class Unreduced(faults.Task):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch[0])[:, 0]}

    trainer = faults.build(Unreduced)
    with pytest.raises(StepError, match=r"Unreduced.test_step .* returned a loss of shape \(4,\); reduce it"):
        trainer.evaluate(hand.loader())
    with pytest.raises(StepError, match=r"reduce it to a scalar: loss\.mean\(\), or return the losses"):
        trainer.run(1, hand.loader(), hand.loader())


def test_steps_beside_a_default_in_epochs_name_the_option() -> None:
    """``--save_every.steps=10`` of a command line is merged with the default: the error says what to write."""
    with pytest.raises(ConfigError, match=r"write the steps alone: --save_every=100"):
        Every(steps=10, epochs=1)


def test_another_batch_size_is_for_another_call_of_run(tmp_path: Path) -> None:
    """Refused within an epoch and between two epochs of a call; the next call of ``run`` may have another loader."""

    def trainer() -> Any:
        return faults.build(faults.Task, StateManagerAddon, save_path=tmp_path / "run", resume="auto")

    for steps in (6, 2):  # At the end of an epoch, and then within one.
        trainer().run(3, hand.loader(), max_steps=steps)
        with pytest.raises(CheckpointMismatch, match="batch_size was 4 and is 2"):
            trainer().run(3, hand.loader(batch_size=2))
    made = trainer()
    made.run(3, hand.loader())
    assert made.run(1, hand.loader(batch_size=2))["step"] == 18 + 11
