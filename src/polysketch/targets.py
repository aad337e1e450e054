"""Where nothing is to be predicted."""

NO_TARGET = -100
"""A target that asks for nothing: padding, and what a task does not ask. PyTorch's losses ignore it by default."""
