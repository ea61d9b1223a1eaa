"""The small figures of the report: their labels have room, whatever is in them, and each stands for itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import search_sim as sim
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bole_codegen.report import panels
from bole_codegen.report.html import render_report
from bole_codegen.report.importance import importances
from bole_codegen.search.simulate import Surface

#: Long names of buckets, and times of few and of many digits.
NAMES = ["verify 128x128 g2 sfp32 lossless n64 p64 w8192", "tree_conv 16384x4 l3 bf16/fp32 bias+silu+dynamic n64 w128"]
TIMES = [[0.0123, 0.0124], [5.0, 9.5, 33.0, 8.0], [1234.5, 1240.25, 1239.0], [3.0, 4000.0], [12345.0, 13000.0]]
#: A page of the width that it has at most, and one of a phone, in inches at 96 pixels each.
PAGE, PHONE = (76 * 16 - 32) / 96, (420 - 32) / 96


def _boxes(figure: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Return the box of a figure and those of its texts, in pixels, as they are drawn."""
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    boxes = {
        "title": [axes.title.get_window_extent()],
        "x label": [axes.xaxis.label.get_window_extent()] if axes.get_xlabel() else [],
        "y label": [axes.yaxis.label.get_window_extent()] if axes.get_ylabel() else [],
        "x ticks": [t.get_window_extent() for t in axes.get_xticklabels() if t.get_text()],
        "y ticks": [t.get_window_extent() for t in axes.get_yticklabels() if t.get_text()],
    }
    # Labels of ticks beyond the limits are not drawn.
    inner = axes.get_window_extent()
    boxes["x ticks"] = [b for b in boxes["x ticks"] if inner.x0 - 1 <= (b.x0 + b.x1) / 2 <= inner.x1 + 1]
    boxes["y ticks"] = [b for b in boxes["y ticks"] if inner.y0 - 1 <= (b.y0 + b.y1) / 2 <= inner.y1 + 1]
    return figure.bbox, boxes


def _check(figure: Any) -> None:
    whole, boxes = _boxes(figure)
    every = [(name, box) for name, found in boxes.items() for box in found]
    for name, box in every:
        assert whole.x0 <= box.x0, name
        assert box.x1 <= whole.x1, name
        assert whole.y0 <= box.y0, name
        assert box.y1 <= whole.y1, name
    for i, (name, box) in enumerate(every):
        for other, second in every[i + 1 :]:
            assert not box.overlaps(second), (name, other)
    assert len(boxes["y ticks"]) >= 2


@pytest.mark.parametrize("count", [1, 2, 6, 18])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("times", TIMES)
def test_labels_of_a_history_have_room(count: int, name: str, times: list[float]) -> None:
    _check(panels._history(name, times, panels._size(count)))


@pytest.mark.parametrize("deepest", [1, 8])
def test_labels_of_bars_have_room(deepest: int) -> None:
    parts = [("prepare_registers", 0.9), ("bv", 0.5)][:deepest]
    figure = panels._bars("verify two_stage_slices", parts, max(2, deepest))
    whole, boxes = _boxes(figure)
    assert all(box.x0 >= whole.x0 and box.x1 <= whole.x1 for found in boxes.values() for box in found)


@pytest.mark.parametrize(("count", "columns"), [(1, 2), (2, 2), (3, 3), (6, 3), (18, 3)])
def test_a_line_of_the_page_is_full(count: int, columns: int) -> None:
    size, gap = panels._size(count), 16 / 96
    assert columns * size.width + (columns - 1) * gap <= PAGE < (columns + 1) * size.width + columns * gap
    # On a phone text may shrink, but is not to vanish: in pixels.
    assert size.text * 96 / 72 * min(1.0, PHONE / size.width) >= 8.0


def test_each_searched_bucket_has_a_figure_of_its_own(tmp_path: Path) -> None:
    search = sim.Simulation(tmp_path / "j", Surface(), variants=sim.few("fused", "steps"), trials=9, rounds=2)
    result = search.run(sim.targets(ops=["verify", "commit"], batches=[8, 256]))
    shown = sum(len(s.searched) for s in result.searches)
    assert panels.histories(result.searches).count("<svg") == shown == 4
    drawn = sum(any(w >= 0.01 for _, w in parts) for parts in importances(result.searches).values())
    text = render_report(result, sim.RECORD, "measured", {}, None)
    assert text.count("<svg") == 2 + shown + drawn
    assert text.count('<div class="panels">') == 1 + bool(drawn)
    for what in ("clipPath", "path"):
        ids = re.findall(rf'<{what} id="(m?p?[0-9a-f]{{10,}})"', text)
        assert len(ids) == len(set(ids))
