"""Synthetic tasks of looking up: one file a task, and one model and one training loop for all of them."""
