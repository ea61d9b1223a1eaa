"""Keys as people type them: empty, in another case, with blanks, with parts that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes

from bole_codegen import cli
from bole_codegen.tables.conv_keys import CONV_EXAMPLE, parse_conv
from bole_codegen.tables.keys import parse_key

KEY = "verify/gdn/dk128-dv128-g2/bf16-sfp32/raw/fast/n16-d16-p0-w256"
NAME = "verify gdn 128x128 g2 bf16/fp32 raw fast n16 w256"
CONV_NAME = "tree_conv 8192x4 l3 bf16/bf16 silu n16 w8"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("action", ["--explain", "--reproduce"])
@pytest.mark.parametrize("key", ["", " ", " \t\n"])
def test_an_empty_key_is_refused_with_an_example(
    action: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # It passed for an option that was left out: a search began.
    monkeypatch.setattr(cli, "_session", lambda *_: pytest.fail("a search began"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["--gpu", "h200", "--offline", action, key])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {action}: expected a table key, got {key!r}; one reads verify/gdn/" in error
    assert CONV_EXAMPLE in error
    with pytest.raises(ValueError, match=f"an empty key names no bucket; one reads {KEY}"):
        parse_key(key)


@pytest.mark.parametrize("option", ["--gpu", "--model", "--storage", "--out", "--report", "--families"])
def test_other_options_are_not_empty_either(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", " "):
        with pytest.raises(SystemExit) as caught:
            cli.main(["--show", option, text])
        assert caught.value.code == 2
        assert f"argument {option}: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["--diff", "", "somewhere"])
    assert caught.value.code == 2
    assert "argument --diff: expected a path, got ''" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "parse"), [(KEY, parse_key), (NAME, parse_key), (CONV_EXAMPLE, parse_key)])
def test_case_and_blanks_do_not_matter(key: str, parse: Any) -> None:
    assert parse(key.upper()) == parse(key)
    assert parse(f"  {key.replace('/', ' / ')}\n") == parse(key)
    assert parse(key.replace(" ", "   ")) == parse(key)
    assert parse_key(CONV_NAME.upper()) == parse_conv(CONV_EXAMPLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("verify", "verfy"), "operation 'verfy' is not one of verify, commit, tree_conv, conv_commit; one reads"),
        (("gdn", "gnd"), "family 'gnd' is not one of "),
        (("-g2", ""), "'dk128-dv128' should be dk, dv and HV/HK, such as dk128-dv128-g2"),
        (("bf16-s", "bf17-s"), "in_dtype 'bf17' is not one of bf16, fp16, fp32"),
        (("sfp32", "sfp23"), "state_dtype 'fp23' is not one of"),
        (("raw", "row"), "gate_mode 'row' is not one of raw, ready"),
        (("fast", "quick"), "precision 'quick' is not one of fast, lossless"),
        (("n16-d16-p0-w256", "n16-w256"), "'n16-w256' should be nodes, depth, pending chain and B x HV, such as n16-d"),
        (("w256", "w256/more"), "'n16-d16-p0-w256/more' should be nodes"),
        (("/fast/n16-d16-p0-w256", ""), "it ends before a precision (fast), nodes, depth"),
        (("w256", "w" + "9" * 5000), "should be nodes"),
        (("n16", "n٣"), "should be nodes"),
    ],
)
def test_the_part_that_is_unknown_is_named(change: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_key(KEY.replace(*change))
    assert words in str(caught.value)


def test_every_unknown_part_is_named() -> None:
    with pytest.raises(ValueError) as caught:
        parse_key("verify gdn 128 g2 bf17/fp32 raw slow n16 w256")
    said = str(caught.value)
    assert "'128' should be dk x dv, such as 128x128" in said
    assert "in_dtype 'bf17'" in said
    assert "precision 'slow'" in said


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("tree_conv/c8192-w4-l3", "it ends before the types of x and of the state (bf16-sbf16), plain or bias, silu"),
        (CONV_EXAMPLE.replace("c8192-w4-l3", "8192x4"), "'8192x4' should be channels, width and length of the state"),
        (CONV_EXAMPLE.replace("silu", "gelu"), "'gelu' is not one of plain, bias, silu, dynamic"),
        (CONV_NAME.replace(" l3", ""), "'bf16/bf16' should be length of the state, such as l3"),
    ],
)
def test_parts_of_a_convolution_are_named_too(key: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_key(key)
    assert words in str(caught.value)


def test_what_is_typed_is_what_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--gpu", "h200", "--explain", f" {KEY.upper()} ", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{KEY} on NVIDIA H200")
    assert parse_key(fakes.PROBLEM.key()) == fakes.PROBLEM
