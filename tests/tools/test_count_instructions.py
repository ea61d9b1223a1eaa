"""The counts of docs/performance.md come from here."""

from __future__ import annotations

import re

import count_instructions
import pytest


@pytest.mark.slow
def test_a_row_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert count_instructions.main(["--nodes", "16", "--batch", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fused(")
    found = re.fullmatch(r"verify_fused +4 +(\d+) +(\d+) +0 +\d+ +\d+ *", lines[-1])
    # Far fewer would be a kernel that lost its work, more than 255 registers do not exist.
    assert found is not None
    assert int(found[1]) > 500
    assert 32 < int(found[2]) <= 255
