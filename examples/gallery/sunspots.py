"""Forecast the sunspots of the next eleven years, in a run that is killed with SIGKILL
and started again.

The killed run ends with bitwise the weights of one that was left alone. A classical
autoregression forecasts better.
"""

import multiprocessing
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from statsmodels.datasets import sunspots
from statsmodels.tsa.ar_model import AutoReg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zae import Trainer
from zae.addons import JSONLLoggerAddon, StateManagerAddon

PAST, AHEAD = 33, 11  # Years that a forecast sees, and years that it predicts.
YEARS = sunspots.load_pandas().data["SUNACTIVITY"].to_numpy()  # From 1700 on.


class Forecast(Trainer):
    def train_step(self, batch):
        past, future = batch
        return {"loss": nn.functional.mse_loss(self.model(past), future)}

    test_step = train_step


class Network(nn.Linear):
    """A linear forecast, and what a hidden layer adds to it."""

    def __init__(self):
        super().__init__(PAST, AHEAD)
        self.hidden = nn.Sequential(
            nn.Linear(PAST, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, AHEAD)
        )

    def forward(self, past):
        return super().forward(past) + self.hidden(past)


def windows():
    """Windows to train, validate and test, which forecast the years until 1918, 1948
    and 2008: no year is in two."""
    rows = torch.tensor(YEARS / 100, dtype=torch.float32).unfold(0, PAST + AHEAD, 1)
    parts = rows[: 209 - PAST], rows[219 - PAST : 239 - PAST], rows[249 - PAST :]
    return [TensorDataset(part[:, :PAST], part[:, PAST:]) for part in parts]


def train(folder):
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    # A checkpoint also within an epoch, which has 11 steps; and a start from the newest
    # one, if there is one.
    options = {
        "save_path": folder,
        "save_every": 5,
        "resume": "auto",
        "jsonl_path": f"{folder}/log.jsonl",
    }
    options |= {"optimizer": partial(torch.optim.AdamW, lr=3e-3), "seed": 0}
    trainer = Forecast.add_on(StateManagerAddon, JSONLLoggerAddon)(
        Network, "cpu", **options
    )
    train, valid, _ = windows()
    trainer.run(100, DataLoader(train, 16, shuffle=True), DataLoader(valid, 64))
    trainer.save_model(f"{folder}/last.safetensors")


def start(folder, kill_at=None):
    """Train in a process, and send SIGKILL to it once there is a checkpoint of this
    step, or a later one."""
    process = multiprocessing.get_context("fork").Process(target=train, args=(folder,))
    process.start()
    while (
        kill_at
        and process.is_alive()
        and not any(int(p.name[5:]) >= kill_at for p in Path(folder).glob("step-*"))
    ):
        process.join(0.001)
    if kill_at:
        process.kill()
    process.join()
    print(f"{folder}: exit code {process.exitcode}", flush=True)


def main():
    for folder, kill_at in (
        ("runs/alone", None),
        ("runs/killed", 200),
        ("runs/killed", 712),
        ("runs/killed", None),
    ):
        start(folder, kill_at)
    alone, killed = (
        Path("runs", name, "last.safetensors").read_bytes()
        for name in ("alone", "killed")
    )
    print(
        "the last weights are",
        "the same, bit for bit" if alone == killed else "not the same",
    )
    (past, future), model = windows()[2].tensors, Network().eval()
    model.load_state_dict(load_file("runs/killed/last.safetensors"))
    # The classical method, on the same years.
    fit = AutoReg(YEARS[:219], lags=11).fit()
    guesses = [
        torch.tensor(AutoReg(YEARS[:t], 11).predict(fit.params, t, t + AHEAD - 1))
        for t in range(249, 299)
    ]
    errors = {"network": model(past) - future, "the last year": past[:, -1:] - future}
    errors |= {
        "the cycle before": past[:, -AHEAD:] - future,
        "autoregression": torch.stack(guesses) / 100 - future,
    }
    for name, error in errors.items():
        print(
            f"{name}: root mean squared error {100 * error.square().mean().sqrt():.2f} "
            "sunspots"
        )


if __name__ == "__main__":
    main()
