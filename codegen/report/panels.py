"""Small figures of the HTML report, one SVG each, which a page sets side by side in as many columns as fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bole_codegen.report.svg import DEFAULT, TUNED, new_figure, plain, plain_ticks, to_svg
from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.kinds import order as order_of
from bole_codegen.search.results import Timed

#: Histories drawn; a run of a hundred buckets would otherwise make a report nobody opens.
MAX_HISTORIES = 18
#: Importance below which a parameter has no bar, and bars of a variant.
_LEAST, _MOST_BARS = 0.01, 8


@dataclass(frozen=True)
class _Size:
    """How large a panel is: inches, and points of its text.

    Margins are in inches too. As parts of the figure they would leave no room for labels in a small one.
    """

    width: float
    height: float
    text: float

    def axes(self, left: float, right: float = 0.12, bottom: float = 0.46, top: float = 0.28) -> tuple[Any, Any]:
        """Return a figure with axes that leave so much free at each side, in inches at 8 points."""
        figure = new_figure(self.width, self.height)
        scale = self.text / 8.0
        figure.subplots_adjust(
            left=scale * left / self.width, right=1 - scale * right / self.width,
            bottom=scale * bottom / self.height, top=1 - scale * top / self.height,
        )  # fmt: skip
        return figure, figure.add_subplot()


def _size(count: int) -> _Size:
    """Return the size of each of so many panels: three small ones fill a line of the page, as two larger ones do."""
    return _Size(5.6, 2.9, 9.0) if count <= 2 else _Size(3.75, 2.3, 7.5)


def _together(panels: Sequence[str]) -> str:
    return '<div class="panels">\n' + "\n".join(panels) + "\n</div>"


def histories(searches: Sequence[ClassSearch]) -> str:
    """Draw the times of the candidates of each searched bucket, in the order tried, with the best so far."""
    series: list[tuple[str, list[float]]] = []
    for search in sorted(searches, key=lambda s: order_of(s.problem)):
        for target in search.searched:
            key = target.problem.key()
            times = [r.median_us for k, _, r in search.history if k == key and isinstance(r, Timed)]
            if len(times) > 1:
                series.append((kind_of(target.problem).title(target.problem), times))
    shown = series[:MAX_HISTORIES]
    size = _size(len(shown))
    figures = [_history(name, times, size) for name, times in shown]
    return _together([to_svg(f, f"history {i}", tight=False) for i, f in enumerate(figures)]) if shown else ""


def _history(name: str, times: Sequence[float], size: _Size) -> Any:
    from matplotlib.ticker import MaxNLocator

    # Room for the label of the axis beside five digits.
    figure, axes = size.axes(left=0.68)
    best, so_far = math.inf, []
    for t in times:
        best = min(best, t)
        so_far.append(best)
    order = range(1, len(times) + 1)
    axes.plot(order, times, ".", color=DEFAULT, markersize=6, zorder=3)
    # Half a step to both sides, so that a single candidate has a line too.
    axes.step([0.5, *order, len(times) + 0.5], [so_far[0], *so_far, so_far[-1]], where="mid", color=TUNED)
    axes.set_yscale("log")
    low, high = min(times), max(times)
    room = max(1.05, (high / low) ** 0.06)  # For the dots at both ends.
    axes.set_ylim(low / room, high * room)
    axes.set_title(plain(name), fontsize=size.text)
    plain_ticks(axes.yaxis, most=5, size=size.text - 1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.tick_params(axis="x", labelsize=size.text - 1)
    axes.set_xlabel("candidate", fontsize=size.text)
    axes.set_ylabel("microseconds a layer", fontsize=size.text)
    # At one place, however wide the numbers are: panels below each other line up.
    axes.yaxis.set_label_coords(-0.52 * size.text / 8.0 / _inches(axes, size), 0.5)
    axes.grid(color="#f2f2f2")
    return figure


def _inches(axes: Any, size: _Size) -> float:
    """Return the width of axes in inches."""
    return float(axes.get_position().width) * size.width


def bars(weights: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """Draw the importance of parameters, a block of bars a variant."""
    shown = [(name, [w for w in parts if w[1] >= _LEAST][:_MOST_BARS]) for name, parts in weights.items()]
    shown = [(name, parts) for name, parts in shown if parts]
    if not shown:
        return "<p>No parameter alone explains the times.</p>"
    deepest = max(len(parts) for _, parts in shown)
    figures = [_bars(name, parts, deepest) for name, parts in shown]
    return _together([to_svg(f, f"importances {i}", tight=False) for i, f in enumerate(figures)])


def _bars(name: str, parts: Sequence[tuple[str, float]], deepest: int) -> Any:
    size = _Size(3.75, 0.65 + 0.2 * deepest, 7.5)
    # Names are of up to 17 letters.
    figure, axes = size.axes(left=1.15, right=0.2, bottom=0.28)
    places = range(len(parts))
    axes.barh(places, [w for _, w in parts], color=TUNED, height=0.6)
    axes.set_yticks(places, [plain(n) for n, _ in parts], fontsize=size.text)
    axes.set_ylim(deepest - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_title(plain(name), fontsize=size.text)
    axes.tick_params(axis="x", labelsize=size.text - 1)
    axes.grid(axis="x", color="#f2f2f2")
    axes.set_axisbelow(True)
    return figure
