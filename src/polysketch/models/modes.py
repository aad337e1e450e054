"""Evaluation for a while, and every module back in its own mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch `model` to evaluation inside, and leave every module of it in the mode in which it was.

    `model.train(was_training)` would give all of them the mode of the outermost one: parts that are frozen in
    evaluation mode, so that their dropout is off, would train from then on.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
