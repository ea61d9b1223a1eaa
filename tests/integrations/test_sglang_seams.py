"""The plug-in finds what it needs in real wheels, and says what a changed one lacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bole_runtime.integrations.sglang import (
    BUDGET_CHANGED,
    BUDGET_READ,
    CHANGED,
    KNOWN_VERSIONS,
    READ,
    Seam,
    SeamError,
    missing,
    register,
    unpacked,
)
from bole_runtime.integrations.sglang.options import read_options
from bole_runtime.integrations.sglang.seams import COMMIT, GDN, KIMI_FORWARD, check, mentions

EVERYTHING = (*CHANGED, *READ, *BUDGET_CHANGED, *BUDGET_READ)
#: Folder with one unpacked wheel a version, which CI downloads (tools/fetch_sglang.py).
WHEELS = os.environ.get("BOLE_SGLANG_WHEELS", "")


@pytest.mark.skipif(not WHEELS, reason="BOLE_SGLANG_WHEELS is not set: tools/fetch_sglang.py")
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_real_wheels_have_every_seam(version: str) -> None:
    folder = Path(WHEELS) / version
    assert (folder / "sglang").is_dir(), f"no unpacked wheel in {folder}"
    assert missing(unpacked(folder), EVERYTHING) == []


@pytest.mark.skipif(not WHEELS, reason="BOLE_SGLANG_WHEELS is not set: tools/fetch_sglang.py")
def test_which_version_hands_over_ready_write_gates() -> None:
    ready = [v for v in KNOWN_VERSIONS if mentions(KIMI_FORWARD, "sigmoid", unpacked(Path(WHEELS) / v))]
    assert ready == ["0.5.16"]


def test_a_seam_s_text_tells_versions_apart(tmp_path: Path) -> None:
    find = unpacked(_tree(tmp_path, (KIMI_FORWARD,)))
    assert mentions(KIMI_FORWARD, "is_decode", find)
    assert not mentions(KIMI_FORWARD, "sigmoid", find)
    with pytest.raises(SeamError, match="not there"):
        mentions(COMMIT, "sigmoid", find)


def _tree(folder: Path, seams: tuple[Seam, ...], without: str = "") -> Path:
    """Write modules that have every seam but one."""
    modules: dict[str, dict[str, list[Seam]]] = {}
    for seam in seams:
        owner, _, _ = seam.name.rpartition(".")
        modules.setdefault(seam.module, {}).setdefault(owner, []).append(seam)
    for module, owners in modules.items():
        lines = []
        for owner, members in owners.items():
            indent = ""
            if owner:
                lines.append(f"class {owner}:")
                indent = "    "
            for seam in members:
                if seam.target == without:
                    continue
                given = ", ".join(p for p in seam.parameters if p != without)
                words = "; ".join(w for w in seam.mentions if w != without) or "pass"
                lines += [f"{indent}def {seam.name.rpartition('.')[2]}({given}):", f"{indent}    {words}"]
            lines.append(f"{indent}pass")
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


def test_what_lacks_is_named(tmp_path: Path) -> None:
    everything = (*CHANGED, *READ)
    assert missing(unpacked(_tree(tmp_path / "all", everything)), everything) == []
    for n, seam in enumerate(everything):
        found = missing(unpacked(_tree(tmp_path / f"seam{n}", everything, seam.target)), everything)
        assert found == [f"{seam.target}: not there"]
    found = missing(unpacked(_tree(tmp_path / "parameter", everything, "mamba_steps_to_track")), everything)
    assert found == [f"{COMMIT.target}: takes no mamba_steps_to_track"]
    found = missing(unpacked(_tree(tmp_path / "word", everything, "retrieve_next_sibling")), everything)
    readers = [s for s in everything if "retrieve_next_sibling" in s.mentions]
    assert GDN in readers
    assert found == [f"{s.target}: does not know retrieve_next_sibling" for s in readers]
    assert len(missing(unpacked(tmp_path / "nothing"), everything)) == len(everything)


def test_an_error_names_version_seam_and_way_out() -> None:
    with pytest.raises(SeamError, match=r"SGLang 9\.9.*\n  a\.b: not there\n.*Unset BOLE_SGLANG"):
        check("9.9", ["a.b: not there"])
    check("9.9", [])


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_options({}).enabled
    assert not read_options({"BOLE_SGLANG": "0"}).enabled
    assert read_options({"BOLE_SGLANG": "1"}).precision == "lossless"
    assert read_options({"BOLE_SGLANG": "on", "BOLE_SGLANG_PRECISION": "fast"}).precision == "fast"
    with pytest.raises(ValueError, match=r"BOLE_SGLANG='maybe' is not allowed; allowed: 1"):
        read_options({"BOLE_SGLANG": "maybe"})
    with pytest.raises(ValueError, match="BOLE_SGLANG_PRECISION='fp8'"):
        read_options({"BOLE_SGLANG": "1", "BOLE_SGLANG_PRECISION": "fp8"})


def test_options_of_the_budget() -> None:
    on = {"BOLE_SGLANG": "1"}
    assert read_options(on).budget == ""
    assert read_options({**on, "BOLE_SGLANG_BUDGET": "0"}).budget == ""
    assert read_options({**on, "BOLE_SGLANG_BUDGET": "1"}).budget == "auto"
    assert read_options({**on, "BOLE_SGLANG_BUDGET": "Auto"}).budget == "auto"
    given = read_options({**on, "BOLE_SGLANG_BUDGET": " 32,8, 16", "BOLE_SGLANG_BUDGET_COSTS": "a.json"})
    assert (given.budget, given.budget_costs) == ((8, 16, 32), "a.json")
    for wrong in ("many", "8,,16", "0,8", "-8", "8.5"):
        with pytest.raises(ValueError, match=r"BOLE_SGLANG_BUDGET=.*allowed: auto"):
            read_options({**on, "BOLE_SGLANG_BUDGET": wrong})
    with pytest.raises(ValueError, match="BOLE_SGLANG_BUDGET is not"):
        read_options({**on, "BOLE_SGLANG_BUDGET_COSTS": "a.json"})


def test_registration_ends_the_process_where_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BOLE_SGLANG", raising=False)
    register()  # off: nothing is looked at
    # SGLang catches Exception around a plug-in, so anything else than SystemExit would leave its own path in place.
    monkeypatch.setenv("BOLE_SGLANG", "1")
    monkeypatch.setattr("bole_runtime.integrations.sglang.seams.installed_version", lambda: "0.0.1")
    monkeypatch.setattr("bole_runtime.integrations.sglang.seams.missing", lambda **more: ["a.b: not there"])
    with pytest.raises(SystemExit):
        register()
    assert "SGLang 0.0.1 is not as Bole's plug-in needs it" in capsys.readouterr().err
    monkeypatch.setenv("BOLE_SGLANG", "perhaps")
    with pytest.raises(SystemExit):
        register()
    assert "BOLE_SGLANG='perhaps'" in capsys.readouterr().err


def test_the_document_lists_every_seam() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    for seam in (*CHANGED, *BUDGET_CHANGED):
        assert f"| `{seam.name}` | {seam.does} |" in text
    for version in KNOWN_VERSIONS:
        assert version in text
