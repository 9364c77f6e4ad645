"""REINFORCE learns to balance a pole: the data set is the seeds of the games, and a
step plays those of its batch.

So a loader, a validation and a checkpoint are what they are for any other task; early
stopping ends the run.
"""

from functools import partial

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader

from zae import Trainer
from zae.addons import EarlyStoppingAddon, JSONLLoggerAddon


class Reinforce(Trainer):
    def play(self, seeds, is_greedy):
        """Play a game for each seed; return what was seen, what was done, and whether
        the game was still on."""
        games = gymnasium.make_vec("CartPole-v1", len(seeds), vectorization_mode="sync")
        seen, is_on, moves = (
            games.reset(seed=seeds.tolist())[0],
            np.ones(len(seeds), bool),
            [],
        )
        while is_on.any():
            logits = self.model(torch.from_numpy(seen))
            action = (
                logits.argmax(1) if is_greedy else Categorical(logits=logits).sample()
            )
            moves.append(
                (torch.from_numpy(seen), action, torch.from_numpy(is_on.copy()))
            )
            seen, _, has_fallen, is_late, _ = games.step(action.numpy())
            is_on &= ~(has_fallen | is_late)
        return map(torch.stack, zip(*moves))

    def train_step(self, seeds):
        with torch.no_grad():
            seen, actions, is_on = self.play(seeds, is_greedy=False)
        # The discounted sum of what is won from each move on:
        left = torch.zeros(len(is_on) + 1, len(seeds))
        for t in reversed(range(len(is_on))):
            # A move of a game that is on wins 1.
            left[t] = is_on[t] * (1 + 0.99 * left[t + 1])
        advantage = (left[:-1] - left[:-1][is_on].mean()) / left[:-1][is_on].std()
        # Of all moves at once, with gradients.
        policy = Categorical(logits=self.model(seen))
        loss = -(policy.log_prob(actions) * advantage + 0.01 * policy.entropy())[
            is_on
        ].mean()
        return {"loss": loss, "return": is_on.sum(0).float().mean()}

    def test_step(self, seeds):
        *_, is_on = self.play(seeds, is_greedy=True)
        return {"return": is_on.sum(0).float().mean()}


def main():
    # In a model this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    trainer = Reinforce.add_on(EarlyStoppingAddon, JSONLLoggerAddon)(
        lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)),
        "cpu",
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        seed=0,
        monitor="return",
        monitor_mode="max",
        patience=2,
        jsonl_path="runs/reinforce.jsonl",
    )
    train, valid, test = (
        DataLoader(range(*seeds), 10)
        for seeds in ((0, 100), (1000, 1010), (2000, 2100))
    )
    untrained = trainer.evaluate(test)["return"]
    metrics = trainer.run(20, train, valid)
    print(
        f"{metrics['step'] * 10} games played: "
        f"{metrics['stop_reason'] or 'all epochs are done'}"
    )
    print(
        f"test: mean return {trainer.evaluate(test)['return']:.1f} in 100 games; "
        f"before training {untrained:.1f}"
    )


if __name__ == "__main__":
    main()
