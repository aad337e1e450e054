"""A study of time: ratios of alternating calls, at several lengths; a piece of a run for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from polysketch.attention import check_options
from polysketch.benchmarking.settings import check_positive
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.workbench import Workbench, measure_rates
from polysketch.studies.pieces import in_pieces
from polysketch.studies.presentation import Line, number, plot_lines
from polysketch.studies.rows import parsed
from polysketch.studies.study import Record, Study, Verdict
from polysketch.training.environment import resolve_device, resolve_dtype


@dataclass(frozen=True, kw_only=True)
class TimeSettings:
    """What all sizes have.

    Attributes:
        lengths: tokens.
        repeats: timed rounds, after one to warm up; the median counts.
        dtype: of tensors; auto is bfloat16 on a GPU and float32 on a CPU.
    """

    lengths: tuple[int, ...]
    repeats: int = 3
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_positive(lengths=self.lengths, repeats=self.repeats)


Timed = Callable[[Workbench, str, Any, int], list[dict[str, Any]]]
"""(bench, row, settings, length) -> measurements, the baseline's and the row's, as `Workbench.measurement` has them."""

Ratios = Mapping[str, Mapping[tuple[str, int], float]]
"""By row, and by direction and length: times as fast as the baseline."""


class TimeStudy(Study):
    """Times as fast as a baseline, at several lengths.

    Args:
        claim, paper, rows, sizes: as for `Study`.
        timed: what makes the measurements of a row at a length.
        baseline: what ratios compare with.
        judge: ratios -> what they say.
        needs: as for `Study`.
        parts: names that rows with options begin with; mechanisms when it is empty.
    """

    def __init__(
        self,
        *,
        claim: str,
        paper: str,
        rows: Sequence[str],
        sizes: Mapping[str, Any],
        timed: Timed,
        baseline: str,
        judge: Callable[[Ratios], Verdict],
        needs: Sequence[str],
        parts: Sequence[str] = (),
    ) -> None:
        self.claim, self.paper, self.rows, self.sizes = claim, paper, tuple(rows), sizes
        self.needs = tuple(needs)
        self._timed, self._baseline, self._judge, self._parts = timed, baseline, judge, tuple(parts)

    def check_row(self, row: str) -> None:
        """A row, or a part of rows with other options."""
        name, options = parsed(row)
        if row in self.rows or name in self._parts:
            return
        if self._parts:
            raise ValueError(f"expected rows of {', '.join(self.rows)}, found {row!r}")
        check_options(name, options)

    def depends_on(self, row: str, seed: int, settings: TimeSettings) -> dict[str, Any]:
        """As the base class has it. Runs of several seeds are repetitions."""
        device = resolve_device("auto")
        dtype = str(resolve_dtype(settings.dtype, device)).removeprefix("torch.")
        told = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
        return {**told, "row": row, "seed": seed, "dtype": dtype, "device": device.type}

    def make(self, row: str, seed: int, settings: TimeSettings, folder: Path) -> dict[str, Any]:
        """Time, a piece for each length."""
        device = resolve_device("auto")
        clock, dtype = Clock(device), resolve_dtype(settings.dtype, device)
        bench = Workbench(clock=clock, rates=measure_rates(clock, dtype), dtype=dtype, repeats=settings.repeats)
        pieces = {f"length-{length}": partial(self._timed, bench, row, settings, length) for length in settings.lengths}
        rates = dataclasses.asdict(bench.rates)
        return {"rates": rates, "measurements": in_pieces(folder, self.depends_on(row, seed, settings), pieces)}

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each measurement of each record; those of the baseline are of the same minute."""
        heading = ["row", "seed", "what", "length", "ms", f"times as fast as {self._baseline}", "of the floor"]
        return [*heading, "tokens/s", "error"], [
            [
                record["row"],
                str(record["seed"]),
                one["direction"] if one["series"] == record["row"] else f"{one['direction']}: {one['series']}",
                f"{one['length']:,}",
                number(one["seconds"] * 1e3, 3),
                number(one["ratio"], 2),
                f"{one['floor_seconds'] / one['seconds']:.0%}" if one["floor_seconds"] else "-",
                number(one["tokens_per_second"], 0),
                "-" if one.get("error") is None else f"{one['error']:.2g}",
            ]
            for record in records
            for one in record["measurements"]
        ]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Times as fast as the baseline, over the length."""
        lines = [
            Line(
                row if direction == next(iter(ratios))[0] else f"{row}, {direction}",
                [length for place, length in ratios if place == direction],
                [ratio for (place, _), ratio in ratios.items() if place == direction],
                dashed=direction != next(iter(ratios))[0],
            )
            for row, ratios in ratios_of(records).items()
            for direction in dict.fromkeys(place for place, _ in ratios)
        ]
        places = sorted({int(length) for line in lines for length in line.x})
        label = f"times as fast as {self._baseline}"
        plot_lines(folder / "times.png", lines, xlabel="tokens", ylabel=label, places=places)

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By medians over seeds."""
        return self._judge(ratios_of(records))


def ratios_of(records: Sequence[Record]) -> dict[str, dict[tuple[str, int], float]]:
    """Medians over seeds, of the rows themselves."""
    found: dict[str, dict[tuple[str, int], list[float]]] = {}
    for record in records:
        own = found.setdefault(record["row"], {})
        for one in record["measurements"]:
            if one["series"] == record["row"]:
                own.setdefault((one["direction"], one["length"]), []).append(one["ratio"])
    return {row: {place: median(values) for place, values in own.items()} for row, own in found.items()}


def at_the_longest(wanted: Mapping[str, float]) -> Callable[[Ratios], Verdict]:
    """The claim that these rows are so many times as fast as the baseline, forward, at the longest length."""

    def judge(ratios: Ratios) -> Verdict:
        told, holds = [], []
        for row, least in wanted.items():
            if row in ratios:
                (_, length), ratio = _last(ratios[row])
                told.append(f"{row} {ratio:.2f} times at {length:,}")
                holds.append(ratio >= least)
        known = len(holds) == len(wanted)
        return Verdict("; ".join(told) or "none of these rows", all(holds) if known else None)

    return judge


def _last(own: Mapping[tuple[str, int], float]) -> tuple[tuple[str, int], float]:
    """The longest, of the first direction."""
    direction = next(iter(own))[0]
    return max(((place, ratio) for place, ratio in own.items() if place[0] == direction), key=lambda one: one[0][1])


def faster_than(row: str, other: str) -> Callable[[Ratios], Verdict]:
    """The claim that a row is faster than another at every length; each is compared with the same baseline."""

    def judge(ratios: Ratios) -> Verdict:
        if row not in ratios or other not in ratios:
            return Verdict(f"not both of {row} and {other}", None)
        shared = sorted(ratios[row].keys() & ratios[other].keys(), key=lambda place: place[1])
        speed = {place: ratios[row][place] / ratios[other][place] for place in shared}
        told = ", ".join(f"{length:,}: {ratio:.2f}" for (_, length), ratio in speed.items())
        return Verdict(f"times as fast as {other}: {told}", min(speed.values()) > 1)

    return judge


def best_in_between(part: str) -> Callable[[Ratios], Verdict]:
    """The claim that neither the first nor the last of the rows that begin so is the fastest at the longest length."""

    def judge(ratios: Ratios) -> Verdict:
        found = {row: _last(own) for row, own in ratios.items() if row.startswith(part)}
        if len(found) < 3:
            return Verdict(", ".join(f"{row} {ratio:.2f}" for row, (_, ratio) in found.items()) or "none", None)
        names = list(found)
        best = max(names, key=lambda row: found[row][1])
        (_, length), ratio = found[best]
        return Verdict(f"{best} is fastest at {length:,}, {ratio:.2f} times", best not in (names[0], names[-1]))

    return judge
