"""The studies of approximation: one run is one map or one mechanism, and its errors at every size."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from polysketch.studies.approximation.maps import MapSettings, measure_map
from polysketch.studies.approximation.mechanisms import MechanismSettings, measure_mechanism
from polysketch.studies.approximation.picture import plot_approximation
from polysketch.studies.approximation.vectors import InputSettings, described, vectors_of
from polysketch.studies.pieces import Measurements, in_pieces
from polysketch.studies.presentation import number
from polysketch.studies.study import Record, Study, Verdict

Judge = Callable[[Sequence[dict[str, Any]]], Verdict]
"""Measurements -> verdict."""


class ApproximationStudy(Study):
    """Errors of rows, which are data-independent, or fitted to some tokens and measured on others.

    Args:
        claim, paper, rows, sizes: as for `Study`.
        judge: what the measurements say.
        needs: as for `Study`.
        error: which one is drawn.
    """

    def __init__(
        self,
        *,
        claim: str,
        paper: str,
        rows: Sequence[str],
        sizes: Mapping[str, Any],
        judge: Judge,
        needs: Sequence[str],
        error: str = "frobenius",
    ) -> None:
        self.claim, self.paper, self.rows, self.sizes = claim, paper, tuple(rows), sizes
        self.needs = tuple(needs)
        self._judge, self._error = judge, error

    def depends_on(self, row: str, seed: int, settings: InputSettings) -> dict[str, Any]:
        """As the base class has it. Where a run lies is of no consequence, and what was trained is."""
        given = {**dataclasses.asdict(settings), "row": row, "seed": seed}
        given.pop("run"), given.pop("data")
        return {**given, "inputs": described(settings)}

    def make(self, row: str, seed: int, settings: Any, folder: Path) -> dict[str, Any]:
        """Measure, a piece for each of the inputs and degrees."""
        vectors = vectors_of(settings, max(settings.lengths), seed)
        pieces = {name: make for inputs in vectors for name, make in self.pieces(row, inputs, settings, seed).items()}
        return {"measurements": in_pieces(folder, self.depends_on(row, seed, settings), pieces)}

    @abstractmethod
    def pieces(self, row: str, inputs: Any, settings: Any, seed: int) -> dict[str, Callable[[], Measurements]]:
        """What is measured on one of the inputs, by names of files."""

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Errors against features and length."""
        plot_approximation(_all(records), folder / "errors.png", self._error)

    def judge(self, records: Sequence[Record]) -> Verdict:
        """At the most features and the largest length."""
        return self._judge(_all(records))


class MapStudy(ApproximationStudy):
    """Feature maps against (q . k)^p."""

    def pieces(self, row: str, inputs: Any, settings: MapSettings, seed: int) -> dict[str, Callable[[], Measurements]]:
        """One for each degree."""
        return {
            f"{inputs.name}-degree-{degree}": partial(measure_map, row, inputs, degree, settings, seed)
            for degree in settings.degrees
        }

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each map, seed, degree, number of features and length: means over the inputs, held out."""
        heading = ["map", "seed", "p", "features", "length", "Frobenius", "over optimum", "fitted", "over its optimum"]
        more = ["mean of ratios", "median", "mean error / mean", "epsilon", "lost by products"]
        return [*heading, *more], [
            [record["row"], str(record["seed"]), *map(str, place), *_cells(group)]
            for record in records
            for place, group in _groups(record, ("degree", "features", "length")).items()
        ]


def _cells(group: Sequence[Mapping[str, Any]]) -> list[str]:
    held_out = {name: _mean(one["held_out"][name] for one in group) for name in group[0]["held_out"]}
    fitted = {name: _mean(one["fitted"][name] for one in group) for name in group[0]["fitted"]}
    lost = [one["factor_error"][0] for one in group if one.get("factor_error")]
    return [
        number(held_out["frobenius"]),
        number(held_out["ratio"], 2),
        number(fitted["frobenius"]),
        number(fitted["ratio"], 2),
        "-" if held_out["relative_mean_absolute"] is None else f"{held_out['relative_mean_absolute']:.3g}",
        number(held_out["median_relative"], 2),
        number(held_out["mean_absolute_ratio"]),
        number(held_out["sketch_error"], 4),
        number(fmean(lost) if lost else None),
    ]


class MechanismStudy(ApproximationStudy):
    """Mechanisms against what they approximate."""

    def pieces(
        self, row: str, inputs: Any, settings: MechanismSettings, seed: int
    ) -> dict[str, Callable[[], Measurements]]:
        """One for all sizes and lengths."""
        return {inputs.name: partial(measure_mechanism, row, inputs, settings, seed)}

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each mechanism, seed, inputs, length and size."""
        heading = ["mechanism", "seed", "inputs", "length", "size", "Frobenius", "operator norm"]
        return [*heading, "alpha", "alpha / n", "without 32", "mass beyond", "exactly"], [
            [
                record["row"],
                str(record["seed"]),
                one["inputs"],
                f"{one['length']:,}",
                str(one["features"]),
                number(one["frobenius"]),
                number(one["operator_norm_error"], 4),
                number(one["alpha"], 1),
                number(one["alpha_over_length"]),
                number(one["alpha_without_sinks"]),
                _shares(one["beyond"]),
                _shares(one["exact_beyond"]),
            ]
            for record in records
            for one in record["measurements"]
        ]


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{window}: {share:.0%}" for window, share in shares.items())


def _all(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [one for record in records for one in record["measurements"]]


def _groups(record: Record, names: Sequence[str]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in record["measurements"]:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    return found


def _mean(values: Any) -> float | None:
    """None where one of them is not finite."""
    values = list(values)
    return None if None in values else fmean(values)


def of_largest(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the most features at the largest length."""
    most, longest = (max(one[name] for one in measurements) for name in ("features", "length"))
    return [one for one in measurements if (one["features"], one["length"]) == (most, longest)]


def in_order(*names: str) -> Judge:
    """The claim that these maps, the worst first, come nearer and nearer, at every degree."""

    def judge(measurements: Sequence[dict[str, Any]]) -> Verdict:
        told, holds = [], []
        largest = of_largest(measurements) if measurements else []
        for degree in sorted({one["degree"] for one in largest}):
            errors = {
                name: fmean(one["held_out"]["frobenius"] for one in own)
                for name in names
                if (own := [one for one in largest if (one["map"], one["degree"]) == (name, degree)])
            }
            told.append(f"p = {degree}: " + ", ".join(f"{name} {error:.2f}" for name, error in errors.items()))
            found = list(errors.values())
            holds.append(None if len(errors) < len(names) else found == sorted(found, reverse=True))
        known = bool(holds) and None not in holds
        return Verdict("; ".join(told) or "none of these maps", all(holds) if known else None)

    return judge


def falling(rows: Sequence[str], error: Callable[[dict[str, Any]], float | None], size: str, at_most: float) -> Judge:
    """The claim that an error of these rows falls at least as size^at_most, at every degree, at the largest length."""

    def judge(measurements: Sequence[dict[str, Any]]) -> Verdict:
        longest = max((one["length"] for one in measurements), default=0)
        slopes: dict[str, float] = {}
        for one in measurements:
            name = one.get("map") or one["mechanism"]
            label = f"{name} at p = {one['degree']}" if "degree" in one else name
            if name in rows and label not in slopes:
                same = [
                    other
                    for other in measurements
                    if other["length"] == longest
                    and (other.get("map") or other["mechanism"]) == name
                    and other.get("degree") == one.get("degree")
                ]
                slopes[label] = _slope([(other[size], error(other)) for other in same])
        told = ", ".join(f"{label} {slope:+.2f}" for label, slope in slopes.items())
        known = bool(slopes) and all(map(math.isfinite, slopes.values()))
        return Verdict(f"powers {told}" if told else "no such row", max(slopes.values()) <= at_most if known else None)

    return judge


def _slope(points: Sequence[tuple[float, float | None]]) -> float:
    """Of the logarithms, by least squares; not a number where there is one size, or an error of zero."""
    known = [(math.log(size), math.log(error)) for size, error in points if error]
    if len({size for size, _ in known}) < 2 or len(known) < len(points):
        return math.nan
    return linear_regression(*zip(*known, strict=True)).slope
