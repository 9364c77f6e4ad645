import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from zae import Trainer

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)  # 1797 digits of 8 x 8 pixels
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train, valid, test = random_split(digits, [0.7, 0.15, 0.15])
train = DataLoader(train, batch_size=64, shuffle=True)
valid, test = DataLoader(valid, batch_size=256), DataLoader(test, batch_size=256)


class Digits(Trainer):
    def train_step(self, batch):
        images, labels = batch
        logits = self.model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

    test_step = train_step


def make_model():
    hidden, classes = torch.nn.Linear(64, 512), torch.nn.Linear(512, 10)
    return torch.nn.Sequential(hidden, torch.nn.ReLU(), classes)
