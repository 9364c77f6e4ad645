"""A loop of one's own on a GPU, in float16 with a loss scale and dropout, that goes on from its last checkpoint.

With --forget, its checkpoint has the random state of the host alone.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--forget", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
inputs = torch.randn(1024, 64)
dataset = TensorDataset(inputs, inputs @ torch.randn(64, 10))
order = torch.Generator().manual_seed(0)
loader = DataLoader(dataset, batch_size=32, shuffle=True, generator=order, pin_memory=True)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 10)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cuda", growth_interval=10)

first_epoch, first_batch = 0, 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    order.set_state(state["order"])
    torch.set_rng_state(state["random"])
    if not args.forget:
        torch.cuda.set_rng_state(state["random of the GPU"])
    first_epoch, first_batch = state["epoch"], state["batch"]

for epoch in range(first_epoch, 3):
    order_of_epoch = order.get_state()
    for index, (rows, targets) in enumerate(loader):
        if epoch == first_epoch and index < first_batch:
            continue
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.mse_loss(model(rows.to("cuda")), targets.to("cuda"))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if (index + 1) % 8 == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "order": order_of_epoch,
                "random": torch.get_rng_state(),
                "random of the GPU": torch.cuda.get_rng_state(),
                "epoch": epoch,
                "batch": index + 1,
            }
            torch.save(state, "checkpoint.pt.new")
            os.replace("checkpoint.pt.new", "checkpoint.pt")
