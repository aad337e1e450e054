"""Rows that experiments/mechanisms shares."""
