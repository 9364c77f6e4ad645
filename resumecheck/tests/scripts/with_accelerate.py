"""Digits with Accelerate, in the way of its example ``by_feature/checkpointing.py``.

``--resume_from_checkpoint`` is the folder of a checkpoint, or "last".
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpointing_steps", default="10", help='a number of steps, or "epoch"')
    parser.add_argument("--use_stateful_dataloader", action="store_true")
    parser.add_argument("--use_seedable_sampler", action="store_true")
    parser.add_argument("--output_dir", default="checkpoints")
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    set_seed(42)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    train_dataloader = DataLoader(dataset, batch_size=64, shuffle=True)
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=args.use_stateful_dataloader, use_seedable_sampler=args.use_seedable_sampler
    )
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(train_dataloader))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    overall_step = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        path = args.resume_from_checkpoint
        if path == "last":
            folders = [entry.path for entry in os.scandir(args.output_dir) if entry.is_dir()]
            path = max(folders, key=os.path.getctime)
        accelerator.load_state(path)
        difference = os.path.basename(path)
        if "epoch" in difference:
            starting_epoch = int(difference.replace("epoch_", "")) + 1
            overall_step = starting_epoch * len(train_dataloader)
        else:
            overall_step = int(difference.replace("step_", ""))
            starting_epoch = overall_step // len(train_dataloader)
            resume_step = overall_step - starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, 3):
        model.train()
        if epoch == starting_epoch and resume_step and not args.use_stateful_dataloader:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for images, targets in active_dataloader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if args.checkpointing_steps.isdigit() and overall_step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))


if __name__ == "__main__":
    main()
