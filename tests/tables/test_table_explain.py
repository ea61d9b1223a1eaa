"""``bole-tune --explain KEY``: keys that name nothing, and reasons that are the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes

from bole_codegen import cli
from bole_codegen.tables.keys import parse_key
from bole_runtime import gpus
from bole_runtime.kernels.default import default_config
from bole_runtime.kernels.variants import get_variant

P = fakes.PROBLEM
LIMITS = gpus.get("h200").limits()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))


def explained(key: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["--gpu", "h200", "--explain", key, "--out", str(out)]) == 0
    return capsys.readouterr().out


def entry(problem: Any, **changes: Any) -> Any:
    """Return an entry of the analytic default, with changes to its parameters."""
    config = default_config(problem, LIMITS)
    return fakes.entry(problem, {**config.as_dict(), **changes}, variant=config.variant)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("-g2", "-g0"), "group must be at least 1, got 0"),
        (("dk128", "dk0"), "dk must be at least 1, got 0"),
        (("dv128", "dv0"), "dv must be at least 1, got 0"),
        (("n16", "n0"), "nodes must be at least 1, got 0"),
        (("w32", "w0"), "work must be at least 1, got 0"),
        (("dk128", "dk5000"), "dk = 5000 is above the largest supported value, 4096"),
        (("n16-d16", "n16-d64"), "trees of 16 nodes are no deeper than depth 16, got 64"),
        (("n16-d16", "n20-d33"), "trees of 32 nodes are no deeper than depth 32, got 33"),
        (("verify/gdn", "verify/lightning"), "family lightning has no raw gates, only ready"),
    ],
)
@pytest.mark.parametrize("action", ["--explain", "--reproduce"])
def test_a_key_that_no_call_can_have_is_refused(
    action: str, change: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--gpu", "h200", action, P.key().replace(*change)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("nodes", "depth", "taken"), [(4, 8, 8), (10, 16, 16), (20, 24, 32), (64, 64, 64)])
def test_depths_go_up_to_the_nearest_bucket_like_nodes(nodes: int, depth: int, taken: int) -> None:
    assert parse_key(P.key().replace("n16-d16", f"n{nodes}-d{depth}")).depth == taken


def test_families_with_ready_gates_alone_are_named_by_them() -> None:
    problem = P.replace(family="lightning", gate_mode="ready")
    assert parse_key(problem.key()) == problem


def test_entries_that_wait_for_a_check_are_not_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In a geometry that no shipped table has.
    problem = P.replace(op="commit", dk=32, dv=32)
    fakes.write(tmp_path, *(entry(problem.replace(work=w)) for w in (32, 64)), triton="3.1.0")
    out = explained(problem.key(), tmp_path, capsys)
    assert out.count("was written under Triton 3.1.0") >= 2
    (because,) = (line for line in out.splitlines() if line.startswith("because: "))
    assert "tables have 2 entries that await a check by warmup() here" in because
    assert "no table has an entry" not in out
    assert "no table has an entry" in explained(problem.replace(dk=64).key(), tmp_path, capsys)


def test_an_entry_for_more_nodes_is_passed_over_for_its_rows_not_its_solve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = get_variant("verify", "two_stage")
    wide = P.replace(dk=32, dv=32, nodes=32, depth=32)
    config = two.default(wide, LIMITS)
    assert (config["row_block"], config["solve"]) == (32, "fp16")
    fakes.write(tmp_path, fakes.entry(wide, config.as_dict(), variant="two_stage"))
    out = explained(wide.replace(nodes=16, depth=16).key(), tmp_path, capsys)
    assert "cannot run here (row_block=32 is more than the 16 rows of a tile)" in out
    assert "does not keep" not in out


@pytest.mark.parametrize(
    ("change", "params", "words"),
    [
        ({"nodes": 64}, {"row_block": 32}, "rows in several blocks are solved by solve=tf32x3, not by fp16"),
        ({"qk_l2norm": False}, {}, "solve=fp16 has the range for l2-normalised rows only"),
        ({"family": "mamba2"}, {"gather": "together"}, "nothing is solved for family 'mamba2'"),
        ({}, {"solve": "fp16x2"}, "solve=fp16x2 does not keep fast"),
        ({}, {"mix": "tf32x3"}, "mix=tf32x3 does not keep fast"),
    ],
)
def test_a_solve_is_refused_for_what_is_in_its_way(change: Any, params: Any, words: str) -> None:
    two = get_variant("verify", "two_stage")
    default = two.default(P.replace(nodes=change.get("nodes", 16)), LIMITS)
    plain = {"gather": "apart", "mix_store": "fp32", "prepare_warps": 1}
    config = two.config({**default.as_dict(), **plain, **params})
    assert words in (two.reason(P.replace(**change), config, LIMITS) or "")


def test_a_name_without_a_depth_says_which_one_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = P.replace(op="commit", dk=32, dv=32)
    name = "commit gdn 32x32 g2 bf16/fp32 raw fast n16"
    note = "the key names no depth: depth 16 is taken; rows of depth 8 exist too (n16 d8)"
    fakes.write(tmp_path, entry(problem), entry(problem.replace(depth=8)), entry(problem.replace(work=64)))
    out = explained(f"{name} w32", tmp_path, capsys)
    assert note in out
    assert out.startswith(problem.key())
    for other in (f"{name} w64", f"{name} d8 w32", f"{name} d16 w32", problem.key()):
        assert "names no depth" not in explained(other, tmp_path, capsys), other
    assert cli.main(["--gpu", "h200", "--reproduce", f"{name} w32", "--out", str(tmp_path)]) == 0
    assert note in capsys.readouterr().err
