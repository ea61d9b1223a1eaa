"""``bole-tune --exhaustive``: within its time budget, and one JSON document on stdout whatever happens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import search_fakes
import search_sim as sim
import table_fakes as fakes

from bole_codegen import cli
from bole_codegen.arguments import make_parser, options_of
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.quality import Closeness, compare
from bole_codegen.search.simulate import Surface

BUCKET = ["--gpu", "h100", "--offline", "--hk", "1", "--hv", "2", "--dk", "32", "--dv", "32"]
BUCKET += ["--nodes", "16", "--ops", "commit", "--precision", "fast", "--batch", "1", "--exhaustive"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any, *more: str, entry: bool = True, stop: bool = False
) -> tuple[int, dict[str, Any]]:
    """Run the command with a search that is over at once and a comparison that ends in ``outcome``.

    Returns:
        The status, and the arguments of the comparison.
    """
    asked: dict[str, Any] = {}
    (target,) = search_fakes.targets((1,))
    buckets = [BucketResult(target, fakes.entry() if entry else None, "" if entry else "no candidate works")]

    def search(self: Any) -> RunResult:
        self.driver = SimpleNamespace(environment=None, result=RunResult(buckets=buckets, tried=7))
        if stop:
            raise KeyboardInterrupt
        asked["search"] = self.options.time_budget
        return self.driver.result

    def compared(*args: Any, **options: Any) -> Closeness:
        asked.update(options)
        if not buckets[0].entry:
            raise ValueError("the search found nothing to compare: no candidate works")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(cli.Session, "run", search)
    monkeypatch.setattr(cli, "compare", compared)
    monkeypatch.setattr(cli.OfflineEvaluator, "close", lambda self: None)
    return cli.main([*BUCKET, "--no-report", "--out", str(tmp_path / "out"), *more]), asked


CONFIG = fakes._default(fakes.PROBLEM, fakes.LIMITS)
CLOSE = Closeness(1, 0, 1, (CONFIG, 5.0), (CONFIG, 5.5), 1)


@pytest.mark.parametrize(
    ("outcome", "entry", "stop", "status", "words"),
    [
        (CLOSE, True, False, 0, {"gap": 0.1, "points": 1, "tried": 1, "out_of_time": False}),
        (ValueError("nothing works"), True, False, 1, {"error": "nothing works"}),
        (CLOSE, False, False, 1, {"error": "the search found nothing to compare: no candidate works"}),
        (KeyboardInterrupt(), True, False, cli.INTERRUPTED, {"error": "interrupted"}),
        (CLOSE, True, True, cli.INTERRUPTED, {"error": "interrupted"}),
    ],
)
def test_json_is_one_document(
    outcome: Any, entry: bool, stop: bool, status: int, words: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(tmp_path, monkeypatch, outcome, "--json", entry=entry, stop=stop)[0] == status
    data = json.loads(capsys.readouterr().out)
    assert data["candidates"] == 7
    assert len(data["entries"]) == entry
    assert {k: data["exhaustive"][k] for k in words} == words


def test_text_ends_in_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, monkeypatch, CLOSE)[0] == 0
    out = capsys.readouterr().out
    assert "tuned us" in out
    assert out.splitlines()[-1].startswith("search: 1 of 1 candidate (100%), 5.50 us with fused(")
    assert out.splitlines()[-1].endswith("0 failed; 10.0% slower than the best")


def test_the_budget_is_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = run(tmp_path, monkeypatch, CLOSE, "--time-budget", "1000")
    assert asked["search"] == 400
    assert 900 < asked["seconds"] < 1000
    # What asks for everything is cut short by no default.
    _, asked = run(tmp_path, monkeypatch, CLOSE)
    assert (asked["search"], asked["seconds"]) == (None, None)
    assert options_of(make_parser().parse_args(BUCKET)).time_budget is None
    assert options_of(make_parser().parse_args(BUCKET[:-1])).time_budget is not None


def searched(folder: Path) -> tuple[sim.Simulation, Any]:
    folder.mkdir()
    (target,) = sim.targets(ops=["verify"])
    search = sim.Simulation(folder / "j", Surface(seed=0), variants=sim.few("fused"), trials=12, rounds=2, anchors=1)
    return search, search.run([target])


def test_a_comparison_ends_with_its_time(tmp_path: Path) -> None:
    ends: list[float] = []

    def within(seconds: float | None) -> Any:
        search, result = searched(tmp_path / str(len(ends)))

        def go(loop: Any) -> Closeness:
            begun = loop.time()
            try:
                return compare(
                    search.env, search.evaluator, result.buckets[0], result.tried, loop=loop, seconds=seconds
                )
            finally:
                ends.append(loop.time() - begun)

        return sim.jumping(go)

    whole = within(None)
    assert not whole.out_of_time
    assert whole.tried == whole.points
    took = ends[-1]
    part = within(took / 2)
    assert part.out_of_time
    assert 0 < part.tried < part.points == whole.points
    assert part.failed <= part.tried
    assert ends[-1] <= took / 2
    assert f"exhaustive (the time budget ended it after {part.tried} of {part.points}): " in str(part)
    assert str(part).endswith("the best of those tried")
    with pytest.raises(ValueError, match="the time budget ended before the fastest were compared"):
        within(1e-3)
    assert ends[-1] <= 1e-2


@pytest.mark.slow  # It compiles.
def test_an_offline_run_keeps_its_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    status = cli.main([*BUCKET, "--json", "--time-budget", "40", "--out", str(tmp_path / "out")])
    assert time.monotonic() - begun < 80  # It may take some seconds more, and machines are shared.
    data = json.loads(capsys.readouterr().out)
    found = data["exhaustive"]
    assert status == (1 if "error" in found else 0)
    assert "error" in found or found["tried"] <= found["points"]
