"""What resumecheck costs, in seconds of the processor: ``python benchmarks/resumecheck_cost.py [NAME ...]``.

For the watcher, its hooks are timed within the steps that they watch; shown is the least of the medians of three runs.
For a check, the script runs plain, then it is checked with all instants of all saves. The goals: at most 3 % of a step
of ten million weights with a batch of 16, at most 1 ms for 20 small tensors; a right loop of 40 steps is checked in
three times its plain run, a small GPT in 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "resumecheck"
TURNS = 3

STEPS = """
import functools, json, os, statistics, time
import torch
from resumecheck.steps import Recorder

HOOKS = ("before_step", "after_step", "before_forward", "after_forward")

def measure(model, batch, steps):
    spent, whole = [], []

    def timed(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[-1] += time.process_time() - begin
        return call

    for name in HOOKS:
        setattr(Recorder, name, timed(getattr(Recorder, name)))
    file = open(os.devnull, "w")
    Recorder(torch, lambda row: file.write(json.dumps(row)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        spent.append(0.0)
        begin = time.process_time()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        whole.append(time.process_time() - begin)
    print(json.dumps([statistics.median(each[5:]) for each in (spent, whole)]))
"""
LAYERS = """
layers = [torch.nn.Linear(1024, 1024) for _ in range(10)]
measure(torch.nn.Sequential(*layers), torch.randn(16, 1024), 45)
"""
SMALL_TENSORS = """
layers = [torch.nn.Linear(32, 32) for _ in range(10)]
measure(torch.nn.Sequential(*layers), torch.randn(16, 32), 1000)
"""
RIGHT_LOOP = """
import os
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
data = torch.randn(320, 64)
first = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    first = state["step"]
for step in range(first, 40):
    optimizer.zero_grad()
    model(data[8 * step : 8 * step + 8]).square().mean().backward()
    optimizer.step()
    if step % 10 == 9:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save({**state, "random": torch.get_rng_state()}, "new.pt")
        os.replace("new.pt", "last.pt")
"""
SMALL_GPT = '''
"""A character model of the kind of nanoGPT's: a memory-mapped file, random places in it, AdamW, a checkpoint."""

import math
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(1337)
WIDTH, CONTEXT, CHARACTERS = 64, 64, 65


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.heads, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        parts = self.heads(self.norms[0](x)).view(*x.shape[:2], 12, WIDTH // 4).transpose(1, 2).chunk(3, 1)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.blocks(self.tokens(tokens) + self.places.weight)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


data = np.memmap("train.bin", dtype=np.uint16, mode="r")
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
done, best = 0, 1e9
if os.path.exists("out/ckpt.pt"):
    state = torch.load("out/ckpt.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done, best = state["iter_num"], state["best_val_loss"]


def batch():
    starts = torch.randint(len(data) - CONTEXT, (12,))
    text = torch.stack([torch.from_numpy(data[i : i + CONTEXT + 1].astype(np.int64)) for i in starts])
    return text[:, :-1], text[:, 1:]


for step in range(done, 60):
    if step % 20 == 0 and step:
        model.eval()
        with torch.no_grad():
            loss = torch.stack([model(*batch()) for _ in range(5)]).mean()
        model.train()
        best = min(best, float(loss))
        os.makedirs("out", exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
        torch.save({**state, "best_val_loss": best}, "out/ckpt.pt")
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 60)) / 2
    model(*batch()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
'''


def run(words: list[str], folder: Path) -> tuple[float, str]:
    """Return the seconds of the processor of a command and its children, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def measure_steps(name: str, model: str, folder: Path) -> None:
    """Print what the watcher adds to a step."""
    (folder / "steps.py").write_text(STEPS + model)
    turns = [json.loads(run([sys.executable, "steps.py"], folder)[1]) for _ in range(TURNS)]
    added, whole = (1000 * min(values) for values in zip(*turns))
    plain = whole - added
    print(f"{name}: a step {plain:.2f} ms, the watcher {added:.2f} ms: {100 * added / plain:.1f} %")


def measure_check(name: str, script: str, folder: Path) -> None:
    """Print what a check with all instants costs."""
    plain = []
    for turn in ("1", "2", "3", "checked"):
        place = folder / turn
        place.mkdir()
        (place / "train.py").write_text(script)
        (place / "train.bin").write_bytes(bytes(index // 2 % 65 * (index % 2 == 0) for index in range(100_000)))
        if turn != "checked":
            plain.append(run([sys.executable, "train.py"], place)[0])
    words = [sys.executable, "-m", "resumecheck", "--all", "--", sys.executable, "train.py"]
    checked, report = run(words, place)
    least = min(plain)
    print(
        f"{name}: plain {least:.1f} s, checked {checked:.1f} s: {checked / least:.1f} times;{report.splitlines()[-1]}"
    )


MEASUREMENTS = {
    "layers": (measure_steps, "ten million weights, batch 16", LAYERS),
    "small": (measure_steps, "20 small tensors", SMALL_TENSORS),
    "loop": (measure_check, "a right loop of 40 steps", RIGHT_LOOP),
    "gpt": (measure_check, "a small GPT", SMALL_GPT),
}


def main() -> None:
    """Measure what is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    for name in parser.parse_args().names or MEASUREMENTS:
        measure, label, script = MEASUREMENTS[name]
        with tempfile.TemporaryDirectory() as folder:
            measure(label, script, Path(folder))


if __name__ == "__main__":
    main()
