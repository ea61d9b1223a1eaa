"""What a resumed or repeated search tells is what an undisturbed one tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import search_fakes as fakes

from bole_codegen.report import offline_line, results_table


def test_parameters_keep_their_declared_order(tmp_path: Path) -> None:
    first, _ = fakes.run(tmp_path, fakes.targets(), trials=100)
    again, _ = fakes.run(tmp_path, fakes.targets(), trials=100)
    assert all(b.reused for b in again.buckets)
    declared = [p.name for p in fakes.fakes.FUSED.params]
    assert declared != sorted(declared)
    for entry in again.entries:
        assert list(entry.params) == declared
        assert list(entry.runner_up.params) == declared
    assert results_table(again.entries) == results_table(first.entries)
    # As if the model were sure of the second: it is named as worth measuring.
    worth = [_second_is_faster(result.entries) for result in (first, again)]
    assert worth[0].count("worth measuring in ") == 3
    assert worth[0] == worth[1]


def _second_is_faster(entries: Any) -> str:
    import msgspec

    return offline_line(
        [msgspec.structs.replace(e, runner_up=msgspec.structs.replace(e.runner_up, median_us=1.0)) for e in entries]
    )
