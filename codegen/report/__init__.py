"""What people see of a run: live progress, the final table, the HTML report."""

from __future__ import annotations

from bole_codegen.report.html import write_report
from bole_codegen.report.progress import make_progress
from bole_codegen.report.summary import as_json, earlier_line, failures_line, missing_lines, offline_line, results_table

__all__ = [
    "as_json",
    "earlier_line",
    "failures_line",
    "make_progress",
    "missing_lines",
    "offline_line",
    "results_table",
    "write_report",
]
