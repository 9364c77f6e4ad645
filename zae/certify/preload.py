"""What each process of a certificate would import: the server that they are forked from imports this module."""

import torch

import zae.certify.child  # noqa: F401

torch.optim.SGD([torch.zeros(1)], lr=1.0)  # The first optimizer of a process imports much.
