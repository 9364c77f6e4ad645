"""Train on a GPU, and print the milliseconds of a step and the number of places that waited for the device."""

import sys
import time
import warnings

import torch
from gpu.networks import GPT, gpt_batch, loss_of, optimizer_of
from torch import nn

STEPS, WARM = (6, 2) if "--small" in sys.argv else (40, 10)


def ten_million() -> nn.Module:
    """Return ten layers of a million parameters."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
    return nn.Sequential(*layers)


def main() -> None:
    torch.manual_seed(0)
    is_gpt = "gpt" in sys.argv
    with torch.device("cuda"):
        model = GPT() if is_gpt else ten_million()
        batch = gpt_batch() if is_gpt else (torch.randn(4096, 1024), torch.randint(1024, (4096,)))
    optimizer = optimizer_of(model.parameters())
    began = 0.0
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if step == WARM:
                torch.cuda.synchronize()
                began = time.perf_counter()
                torch.cuda.set_sync_debug_mode("warn")
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (STEPS - WARM)
    places = {f"{each.filename}:{each.lineno}" for each in waits if "synchronizing" in str(each.message)}
    print(f"{seconds * 1e3:.3f} {len(places)} {sorted(places)[:3]}")


if __name__ == "__main__":
    main()
