"""What the figures of the report share: SVG text of matplotlib's figures, and axes labelled with ordinary numbers."""

from __future__ import annotations

import io
from typing import Any

#: Colours of what was found, of what it is compared with, of the memory floor, and of what joins them.
TUNED, DEFAULT, FLOOR, FAINT = "#1f5fa8", "#9a9a9a", "#111111", "#c9d6e8"


def plain(text: str) -> str:
    """Keep matplotlib from reading mathematics into a label."""
    return text.replace("$", r"\$")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches."""
    # No pyplot: it keeps global state and picks a display backend.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def to_svg(figure: Any, salt: str, tight: bool = True) -> str:
    """Return a figure as an SVG element.

    Args:
        figure: a matplotlib figure.
        salt: makes its identifiers differ from those of the other figures of a report.
        tight: whether to fit the size to what is drawn, which draws twice, rather than to keep that of the figure.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        box = "tight" if tight else None
        figure.savefig(buffer, format="svg", bbox_inches=box, metadata={"Date": None, "Creator": "bole-tune"})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plain_ticks(axis: Any, most: int = 8, size: float = 8.0) -> None:
    """Label a logarithmic axis, whose limits are set, with ordinary numbers: a narrow one has few powers of ten.

    Args:
        axis: x or y of some axes.
        most: labels of a narrow one.
        size: of the labels, in points.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    if high >= 10 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    elif high >= 3 * low and most <= 6:
        # Few numbers at equal steps would all be in the upper half, and what was found is at the lower end.
        axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    else:
        axis.set_major_locator(MaxNLocator(most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_tick_params(labelsize=size)
