"""An actor-critic learns to balance a pole, step by step in games that go on: a batch
is the next moves of eight games.

The games are part of the training: each is saved with its state and its random stream,
so a run that ends in the middle of a game resumes to the same weights, bit for bit.
"""

from functools import partial

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical

from zae import Trainer
from zae.addons import JSONLLoggerAddon, StateManagerAddon

GAMES, MOVES = 8, 32


class Pole:
    """A game that begins again when it has ended, and can be saved."""

    def __init__(self, seed):
        self.game = gymnasium.make("CartPole-v1")
        self.seen = self.game.reset(seed=seed)[0]

    def step(self, action):
        self.seen, _, has_fallen, is_late, _ = self.game.step(action)
        if has_fallen or is_late:
            self.seen = self.game.reset()[0]
        return has_fallen or is_late

    def state_dict(self):
        game = self.game.unwrapped
        stream = game.np_random.bit_generator.state
        return {
            "place": list(game.state),
            "moves": self.game._elapsed_steps,
            "stream": stream,
        }

    def load_state_dict(self, state):
        game = self.game.unwrapped
        game.state, self.game._elapsed_steps = tuple(state["place"]), state["moves"]
        game.np_random.bit_generator.state = state["stream"]


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, seen):
        return Categorical(logits=self.actor(seen)), self.critic(seen).squeeze(-1)


class PlayAndLearn(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.games = [Pole(seed) for seed in range(GAMES)]

    def seen(self):
        return torch.tensor([game.seen.tolist() for game in self.games])

    def train_step(self, batch):
        rows = []
        for _ in range(MOVES):
            seen = self.seen()
            with torch.no_grad():
                actions = self.model(seen)[0].sample()
            ended = [
                game.step(int(action)) for game, action in zip(self.games, actions)
            ]
            rows.append((seen, actions, torch.tensor(ended)))
        seen, actions, ended = map(torch.stack, zip(*rows))
        with torch.no_grad():
            value = self.model(self.seen())[1]
        returns = torch.empty(MOVES, GAMES)
        for move in reversed(range(MOVES)):
            # A move wins 1; a game that has ended wins nothing more.
            value = returns[move] = torch.where(ended[move], 0.0, 1 + 0.99 * value)
        policy, expected = self.model(seen)
        advantage = returns - expected
        scale = advantage.detach() / advantage.detach().std()
        actor = (
            -(policy.log_prob(actions) * scale).mean() - 0.01 * policy.entropy().mean()
        )
        return {
            "loss": actor + advantage.square().mean() / 10,
            "ended": ended.float().sum(),
        }

    def test_step(self, seed):
        """Play one game with the best moves."""
        game, moves = Pole(int(seed)), 0
        has_ended = False
        while not has_ended:
            seen = torch.tensor(game.seen.tolist())
            has_ended = game.step(int(self.model(seen)[0].probs.argmax()))
            moves += 1
        return {"return": torch.tensor(float(moves))}


def train(folder, max_steps=None):
    trainer = PlayAndLearn.add_on(StateManagerAddon, JSONLLoggerAddon)(
        ActorCritic,
        "cpu",
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        seed=0,
        save_path=folder,
        resume="auto",
        jsonl_path=f"{folder}/log.jsonl",
        log_every=10,
    )
    # train_step plays: an item of the loader is a step.
    trainer.run(1, [torch.zeros(1)] * 400, max_steps=max_steps)
    return trainer


def main():
    # In models this small, threads would mostly wait for one another.
    torch.set_num_threads(1)
    whole = train("runs/played")
    train("runs/resumed", max_steps=133)  # It ends in the middle of eight games.
    resumed = train("runs/resumed").model.state_dict()
    assert all(
        torch.equal(resumed[name], weight)
        for name, weight in whole.model.state_dict().items()
    )
    print("ended after 133 steps and resumed: the same weights, bit for bit")
    games = torch.arange(1000, 1050).split(1)
    print(f"test: mean return {whole.evaluate(games)['return']:.1f} in 50 games")


if __name__ == "__main__":
    main()
