"""What the benchmarks refuse before they run anything, and the files that they write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import bench_args
import bench_conv
import bench_round
import bench_sampling
import bench_verify
import pytest
import torch

TOOLS: dict[ModuleType, list[str]] = {
    bench_verify: ["--points", "1x4", "--hk", "1", "--hv", "1", "--dk", "16", "--dv", "16", "--layers", "1"],
    bench_conv: ["--points", "1x4", "--channels", "8"],
    bench_round: ["--batch", "1", "--nodes", "4", "--layers", "1", "--tp", "16", "--policy", "eager"],
    bench_sampling: ["--batch", "1", "--nodes", "4", "--vocabulary", "60"],
}


def refusal(tool: ModuleType, args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the usage error that a benchmark leaves with."""
    with pytest.raises(SystemExit) as stop:
        tool.main(["--check-only", *args])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("tool", "args", "message"),
    [
        *((bench_verify, [option, ","], option) for option in ("--state-dtype", "--precision", "--peers", "--shape")),
        *((bench_verify, [option, "0"], option) for option in ("--accepted", "--layers", "--replays", "--dk", "--dv")),
        (bench_verify, ["--hk", "0"], "--hk"),
        (bench_verify, ["--accepted", "-3"], "--accepted"),
        (bench_verify, ["--seed", "-1"], "--seed"),
        (bench_verify, ["--seed", "1.5"], "--seed"),
        (bench_verify, ["--seed", str(1 << 70)], "--seed"),
        (bench_verify, ["--points", "8x16,1x600"], "600 nodes are not allowed; allowed: 1 to 512"),
        (bench_verify, ["--nodes", "513"], "513 nodes"),
        (bench_verify, ["--shape", "ragged,bush"], "unknown tree shape 'bush'"),
        (bench_verify, ["--shape", ";"], "--shape"),
        (bench_verify, ["--sglang", "/nonexistent"], "add --peers"),
        (bench_conv, ["--accepted", "0"], "--accepted"),
        (bench_conv, ["--layers", "-1"], "--layers"),
        (bench_conv, ["--width", "9"], "--width"),
        (bench_conv, ["--seed", "-1"], "--seed"),
        (bench_conv, ["--points", "1x600"], "600 nodes"),
        (bench_conv, ["--shape", "bush"], "--shape"),
        (bench_round, ["--policy", ","], "--policy"),
        (bench_round, ["--tp", "0"], "--tp"),
        (bench_round, ["--pending", "0"], "--pending"),
        (bench_round, ["--layers", "0"], "--layers"),
        (bench_round, ["--nodes", "600"], "600 nodes"),
        (bench_sampling, ["--batch", "0"], "--batch"),
        (bench_sampling, ["--nodes", "600"], "600 nodes"),
        (bench_sampling, ["--vocabulary", "0"], "--vocabulary"),
    ],
)
def test_bad_arguments_are_usage_errors(
    tool: ModuleType, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(tool, args, capsys)


def outputs() -> Iterator[tuple[ModuleType, str]]:
    """Yield every option of a benchmark that names a file to write."""
    for tool in (bench_verify, bench_round):
        yield from ((tool, option) for option in ("--csv", "--json"))
    yield bench_verify, "--plot"
    yield bench_conv, "--json"
    yield bench_sampling, "--csv"


@pytest.mark.parametrize(("tool", "option"), list(outputs()))
def test_a_file_that_cannot_be_written_stops_before_the_run(
    tool: ModuleType, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{option}: {tmp_path} is a folder" in refusal(tool, [*TOOLS[tool], option, str(tmp_path)], capsys)
    (tmp_path / "file").touch()
    args = [*TOOLS[tool], option, str(tmp_path / "file" / "out")]
    assert f"no file can be written to {tmp_path / 'file'}" in refusal(tool, args, capsys)


def test_two_options_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(tmp_path / "out")
    assert "is the file of --csv already" in refusal(bench_verify, ["--csv", name, "--json", name], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
@pytest.mark.parametrize(("tool", "option"), [o for o in outputs() if o[1] != "--plot"])
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_that_the_umask_says(tool: ModuleType, option: str, umask: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "out"
    before = os.umask(umask)
    try:
        assert tool.main(["--check-only", *TOOLS[tool], option, str(path)]) == 0
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert path.stat().st_size
    assert list(path.parent.iterdir()) == [path]


def test_a_file_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "file", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    bench_args.write_whole(link, "new\r\n")
    assert (target.read_bytes(), link.is_symlink()) == (b"new\r\n", True)
    with pytest.raises(TypeError):
        bench_args.write_whole(target, 3)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
    bench_args.write_whole(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "was not written by --json: JSONDecodeError"),
        ("[]", "was not written by --json: TypeError"),
        ('{"provenance": {}, "rows": [{"batch": 8}]}', "was not written by --json: KeyError: 'point'"),
        ('{"provenance": {}, "rows": []}', "was not written by --json: KeyError: 'device'"),
        (json.dumps({"provenance": {"device": {"name": "x"}, "triton": "", "date": ""}, "rows": []}), "copy bandwidth"),
    ],
)
def test_replot_of_a_foreign_file(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    if text is not None:
        saved.write_text(text)
    said = refusal(bench_verify, ["--replot", str(saved), "--plot", str(tmp_path / "out.png")], capsys)
    assert "--replot: " in said
    assert message in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
@pytest.mark.parametrize("tool", [bench_conv, bench_round])
def test_a_peer_that_is_missing_costs_the_status(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--check-only", *TOOLS[tool], "--sglang", "/nonexistent"]) == 1
    assert "Not compared with sglang" in capsys.readouterr().out
