"""Sums by chunks against sums token by token: the paper's ablation."""

from dataclasses import replace

from benchmarks.cpu.settings import Bench, Figure, Outcome, floor_note
from polysketch.benchmarking import CumulativeSumsSettings, time_cumulative_sums
from polysketch.benchmarking.cumulative_sums import CHUNKS


def cumulative_sums(bench: Bench) -> Outcome:
    """Seconds token by token over seconds by chunks."""
    settings = bench.settings
    asked = CumulativeSumsSettings(lengths=settings.summed_lengths, features=settings.summed_features)
    measurements = time_cumulative_sums(replace(bench, repeats=settings.summed_repeats), asked)
    figures = [
        Figure(
            f"{one['direction']} at {one['length']:,}, by chunks: times as fast as token by token",
            one["ratio"],
            note=f"{floor_note(one)}; all states at once: {one['all_states_bytes'] / 1e9:,.0f} GB",
        )
        for one in measurements
        if one["series"] == CHUNKS
    ]
    return Outcome(figures, measurements)
