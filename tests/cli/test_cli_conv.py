"""``bole-tune --ops tree_conv,conv_commit`` from the outside, and how its table is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bole_codegen import cli
from bole_codegen.arguments import UsageError, make_parser, targets_of
from bole_codegen.conv_arguments import preset_convolutions
from bole_codegen.presets import get_preset, load_presets
from bole_runtime import gpus
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.kinds import tune_command
from bole_runtime.tables.load import load_table
from bole_runtime.tables.lookup import Dispatcher

TINY = ["--gpu", "h100", "--offline", "--channels", "32", "--width", "2", "--nodes", "16", "--batch", "1"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))


def asked(line: str) -> tuple[Any, ...]:
    return targets_of(make_parser().parse_args(line.split()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--channels 64 --width 4", "--channels is of a convolution; add --ops tree_conv,conv_commit"),
        ("--bias --hk 1 --hv 1 --dk 32 --dv 32", "--bias is of a convolution"),
        ("--ops tree_conv --channels 64", "an explicit convolution needs --width too"),
        ("--ops tree_conv --width 4", "an explicit convolution needs --channels too"),
        ("--ops tree_conv --channels 64 --width 9", "width = 9 is not allowed; allowed: 2 to 8"),
        ("--ops tree_conv --channels 64 --width 4 --length 2", "length = 2 is not allowed; allowed: 3 to 16"),
        ("--ops tree_conv --channels 0 --width 4", "channels = 0 is not allowed"),
        ("--ops tree_conv --channels 64 --width 4 --nodes 9999", "above the largest"),
        ("--ops tree_conv --channels 64 --width 4 --shape weird", "unknown tree shape 'weird'"),
        ("--ops tree_conv --hk 1 --hv 1 --dk 32 --dv 32", "--hk is of verify and commit, which --ops leaves out"),
        ("--ops verify,tree_conv --channels 64 --width 4", "needs --hk, --hv, --dk, --dv too"),
        ("--ops verify,tree_conv --hk 1 --hv 1 --dk 32 --dv 32", "needs --channels, --width too"),
        ("--ops tree_conv --model RWKV-7-1.5B", "has no convolution"),
        ("--ops tree_conv --model qwen3.5-9b --tp 3", "tp = 3 does not divide"),
        ("--ops tree_conv --families lightning", "nothing to search"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--gpu", "h100", "--offline", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


def test_the_default_searches_recurrences_alone() -> None:
    assert {t.problem.op for t in asked("--model qwen3.5-9b")} == {"verify", "commit"}


def test_a_model_gives_its_convolution() -> None:
    found = asked("--ops tree_conv,conv_commit --model qwen3.5-9b --tp 2 --nodes 16,64 --batch 1,8")
    assert len(found) == 2 * 2 * 2
    conv = [t for t in found if t.problem.op == "tree_conv"]
    assert conv[0].problem == ConvProblem("tree_conv", 4096, 4, 3, "bf16", "bf16", False, True, False, 16, 0, 1)
    assert {t.hv for t in found} == {4096}
    both = asked("--ops verify,tree_conv --model qwen3.5-9b --nodes 16 --batch 8 --precision fast")
    assert [t.problem.op for t in both] == ["tree_conv", "verify"]
    assert {t.problem.state_dtype for t in both} == {"bf16", "fp32"}


def test_what_models_convolutions_have() -> None:
    def of(name: str) -> Any:
        return preset_convolutions(get_preset(name))[0]

    assert (of("Nemotron-H-8B").bias, of("PLaMo-2-8B").bias, of("Qwen3.5-9B").bias) == (True, False, False)
    assert (of("LFM2-1.2B").silu, of("LFM2-1.2B").width, of("Qwen3.5-9B").silu) == (False, 3, True)
    assert (of("Jet-Nemotron-4B").dynamic, of("Qwen3.5-9B").dynamic) == (True, False)
    for preset in load_presets().values():
        assert bool(preset.conv_channels) == bool(preset.conv_width)
        assert len(preset_convolutions(preset)) == len(preset.conv_channels)


def test_without_a_model_the_families_are_searched() -> None:
    found = asked("--ops tree_conv --nodes 16 --batch 8")
    # Of models that share a bucket the widest stands for it.
    channels = {t.problem.channels: t.hv for t in found if not t.problem.dynamic}
    assert channels[8192] == 8192
    assert channels[16384] == 12288


@pytest.mark.parametrize(
    "change",
    [{}, {"bias": True, "silu": False}, {"dynamic": True, "pending": 16}, {"op": "conv_commit", "silu": False}],
)
def test_the_command_of_a_warning_searches_exactly_that_bucket(change: dict[str, Any]) -> None:
    problem = ConvProblem("tree_conv", 8192, 4, 4, "bf16", "fp32", False, True, False, 64, 0, 32).replace(**change)
    args = make_parser().parse_args(tune_command(problem, "h100").split()[1:])
    assert [t.problem for t in targets_of(args)] == [problem]


def test_an_explicit_geometry_of_both_kinds() -> None:
    found = asked("--ops verify,conv_commit --hk 1 --hv 1 --dk 32 --dv 32 --channels 96 --width 4 --nodes 16 --batch 1")
    assert {t.problem.op for t in found} == {"verify", "conv_commit"}
    with pytest.raises(UsageError):
        asked("--ops conv_commit --channels 96")


def test_an_offline_search_writes_a_table_that_serves_once_it_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = [*TINY, "--ops", "tree_conv,conv_commit", "--trials", "2", "--workers", "1", "--out", str(out)]
    assert cli.main([*line, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "tree_conv 32x2 l1 bf16/bf16 silu n16 w1" in printed
    path = out / "h100" / "conv.json"
    table = load_table(path, all_variants)
    assert table.header.family == "conv"
    assert [e.problem.op for e in table.entries] == ["conv_commit", "tree_conv"]
    assert {e.entry.label for e in table.entries} == {"predicted"}
    assert all(e.entry.median_us > e.entry.floor_us for e in table.entries)
    names = {k.name for e in table.entries for k in e.entry.kernels}
    assert {p.stem for p in (out / "h100" / "kernels").glob("*.py")} == names
    assert "tree_conv" in (out / "h100" / "report.html").read_text()

    record = gpus.get("h100")
    dispatcher = Dispatcher((out,), user_roots=1)
    held = table.entries[1]
    (waiting,) = dispatcher.unchecked(held.problem, record.device_names[0], record.limits())
    dispatcher.mark_checked(waiting, record.device_names[0])
    found = dispatcher.resolve(held.problem, record.device_names[0], record.limits())
    assert (found.source, found.config) == ("h100", held.config)

    # The same command again finds everything finished, and reports the whole search.
    assert cli.main([*line, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["finished_earlier"] == 2
    assert data["resumed_evaluations"] >= data["candidates"] >= 2
    assert {e["op"] for e in data["entries"]} == {"tree_conv", "conv_commit"}

    for arguments in (["--show"], ["--explain", held.key], ["--stale"]):
        assert cli.main(["--gpu", "h100", "--out", str(out), *arguments]) == 0
        assert "conv" in capsys.readouterr().out or arguments == ["--stale"]
    assert cli.main(["--diff", str(path), str(path)]) == 0
    assert "2 same" in capsys.readouterr().out
    assert cli.main(["--gpu", "h100", "--out", str(out), "--reproduce", held.key]) == 0
    script = tmp_path / "script.py"
    script.write_text(capsys.readouterr().out)
    done = subprocess.run([sys.executable, script, "--torch"], capture_output=True, text=True, check=False)
    assert "relative error against the fp64 reference" in done.stdout, done.stderr
