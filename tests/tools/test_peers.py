"""Peers load from what a user points at, or say why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from peers import PEERS, PeerOptions, PeerUnavailable, load_peers
from peers.pack_sglang import main as pack_main
from peers.sglang_loader import ENTRY, KERNEL_FILE, OTHER_FILES, load_entry, locate, pack

TOOLS = Path(__file__).resolve().parents[2] / "tools"

#: Imports what the real file imports, and nothing of it otherwise.
FAKE_KERNEL = f"""
from sglang.kernels.jit.utils import is_arch_support_pdl
from sglang.srt.utils import get_device_sm, is_cuda, is_gfx95_supported, is_hip, is_sm90_supported

ANSWERS = (is_arch_support_pdl(), get_device_sm(), is_cuda(), is_gfx95_supported(), is_hip(), is_sm90_supported())

def {ENTRY}(**arguments):
    return arguments
"""


def make_wheel(folder: Path, text: str = FAKE_KERNEL, name: str = KERNEL_FILE) -> Path:
    wheel = folder / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/__init__.py", "raise RuntimeError('the whole package was imported')")
        archive.writestr(name, text)
        archive.writestr("sglang-9.9.9.dist-info/METADATA", "Metadata-Version: 2.4\nName: sglang\nVersion: 9.9.9\n")
    return wheel


def test_a_wheel_loads_without_importing_the_package(tmp_path: Path) -> None:
    before = set(sys.modules)
    source = locate(str(make_wheel(tmp_path)), tmp_path / "cache")
    entry = load_entry(source)
    assert source.version == "9.9.9"
    assert entry(q=1) == {"q": 1}
    assert not any(m == "sglang" or m.startswith("sglang.") for m in set(sys.modules) - before)
    assert all(not answer for answer in entry.__globals__["ANSWERS"][3:5])


def test_an_installed_sglang_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("sglang")
    monkeypatch.setitem(sys.modules, "sglang", real)
    load_entry(locate(str(make_wheel(tmp_path)), tmp_path / "cache"))
    assert sys.modules["sglang"] is real


def test_unpacked_site_packages_and_packed_folders_load(tmp_path: Path) -> None:
    unpacked = tmp_path / "site-packages"
    with zipfile.ZipFile(make_wheel(tmp_path)) as archive:
        archive.extractall(unpacked)
    for given in (unpacked, unpacked / "sglang"):
        assert locate(str(given), tmp_path / "unused").version == "9.9.9"
    packed = pack(unpacked, tmp_path / "packed")
    again = locate(str(tmp_path / "packed"), tmp_path / "unused")
    assert (again.version, again.sha256) == (packed.version, packed.sha256)
    assert not (tmp_path / "unused").exists()
    assert load_entry(again)(a=2) == {"a": 2}


def test_pack_command_writes_only_what_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert pack_main([str(make_wheel(tmp_path)), "--out", str(out)]) == 0
    assert "9.9.9" in capsys.readouterr().out
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert files == ["SOURCE.json", KERNEL_FILE]
    assert json.loads((out / "SOURCE.json").read_text())["project"] == "sglang"


def test_pack_command_takes_the_other_peers_along(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(OTHER_FILES[0], "one = 1")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    for source, out in ((wheel, tmp_path / "a"), (tmp_path / "unpacked", tmp_path / "b")):
        assert pack_main([str(source), "--out", str(out)]) == 0
        assert (out / OTHER_FILES[0]).read_text() == "one = 1"
        assert not (out / OTHER_FILES[1]).exists()


def test_pack_command_reports_a_bad_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    assert pack_main([str(tmp_path / "broken.whl"), "--out", str(tmp_path / "out")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_mamba2_and_kda_have_kernels_and_others_none(tmp_path: Path) -> None:
    from bole_codegen.measure import Workload

    kernel = (
        "from sglang.kernels.jit.utils import is_arch_support_pdl\ndef selective_state_update(*a, **b): return a, b"
    )
    wheel = str(make_wheel(tmp_path, kernel, "sglang/kernels/ops/mamba/triton_ops/mamba_ssm.py"))
    (mamba,), missing = load_peers(["sglang"], PeerOptions(sglang=wheel, family="mamba2"))
    assert not missing
    assert mamba.refuses(Workload(1, 16, 1, 4, family="mamba2")) is None
    assert "not of gdn" in mamba.refuses(Workload(1, 16, 1, 4))
    (serial,), _ = load_peers(["sglang"], PeerOptions(sglang=str(make_wheel(tmp_path)), family="kda"))
    assert serial.refuses(Workload(1, 16, 4, 4, family="kda")) is None
    assert "not of lightning" in serial.refuses(Workload(1, 16, 4, 4, family="lightning"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: None, "no --sglang PATH"),
        (lambda d: str(d / "missing"), "no such file"),
        (lambda d: str(d), "holds no"),
        (lambda d: str(make_wheel(d, name="sglang/other.py")), "holds no"),
        (lambda d: str(make_wheel(d, text="from sglang.srt.server_args import x")), "sglang.srt.server_args"),
        (lambda d: str(make_wheel(d, text="from sglang.srt.utils import is_npu")), "is_npu"),
        (lambda d: str(make_wheel(d, text="x = 1")), f"has no {ENTRY}"),
    ],
)
def test_what_cannot_load_is_listed_with_its_reason(tmp_path: Path, make, reason: str) -> None:
    loaded, missing = load_peers(["sglang"], PeerOptions(sglang=make(tmp_path)))
    assert loaded == []
    assert reason in missing["sglang"]


def test_unknown_peers_are_listed() -> None:
    assert "known: " + ", ".join(PEERS) in load_peers(["weaver"], PeerOptions())[1]["weaver"]


def test_both_forms_load(tmp_path: Path) -> None:
    loaded, missing = load_peers(["sglang", "sglang-dense"], PeerOptions(sglang=str(make_wheel(tmp_path))))
    assert [p.name for p in loaded] == ["sglang", "sglang-dense"]
    assert not missing
    assert all("9.9.9" in p.version for p in loaded)


def test_adapter_passes_what_target_verification_passes(tmp_path: Path) -> None:
    import torch

    from bole_codegen.measure import make_verify_inputs
    from bole_runtime.kernels.problem import Problem

    problem = Problem("verify", "gdn", 16, 8, 2, "bf16", "bf16", "raw", "fast", 16, 8, 0, 8)
    inputs = make_verify_inputs(problem, 2, 4, 3, 5, "ragged", layers=2, device="cpu")
    packed, dense = load_peers(["sglang", "sglang-dense"], PeerOptions(sglang=str(make_wheel(tmp_path))))[0]

    def arguments(peer, shape: str):
        prepared = peer.prepare(inputs, shape, 1 << 30)
        prepared.make_layer(1)()
        return prepared, prepared._outputs[1]

    prepared, given = arguments(packed, "ragged")
    assert given["q"].shape == given["k"].shape == (1, 15, 2, 16)
    assert given["v"].shape == (1, 15, 4, 8)
    assert given["a"].shape == given["b"].shape == (15, 4)
    assert given["cu_seqlens"].tolist() == [0, 5, 10, 15]
    assert given["retrieve_parent_token"].shape == (3, 5)
    assert given["intermediate_states_buffer"].shape == (4, 5, 4, 8, 16)
    assert given["intermediate_states_buffer"].dtype == torch.bfloat16
    assert given["disable_state_update"] is True
    assert given["initial_state_source"] is inputs.layers[1].state
    assert prepared.workspace_bytes == packed.memory_bytes(inputs.workload)
    assert arguments(packed, "chain")[1]["retrieve_parent_token"] is None
    given = arguments(dense, "ragged")[1]
    assert given["cu_seqlens"] is None
    assert given["q"].shape == (3, 5, 2, 16)


def test_snapshots_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from bole_codegen.measure import make_verify_inputs
    from bole_runtime.kernels.problem import Problem

    problem = Problem("verify", "gdn", 16, 8, 2, "bf16", "fp32", "raw", "fast", 16, 8, 0, 8)
    inputs = make_verify_inputs(problem, 2, 4, 3, 5, device="cpu")
    peer = load_peers(["sglang"], PeerOptions(sglang=str(make_wheel(tmp_path))))[0][0]
    with pytest.raises(PeerUnavailable, match="snapshots need"):
        peer.prepare(inputs, "ragged", 1000)


def test_sizes_that_take_minutes_to_compile_are_refused(tmp_path: Path) -> None:
    from bole_codegen.measure import Workload

    packed, dense = load_peers(["sglang", "sglang-dense"], PeerOptions(sglang=str(make_wheel(tmp_path))))[0]
    assert packed.refuses(Workload(64, 64, 16, 32)) is None
    assert "registers" in (packed.refuses(Workload(256, 200, 16, 32)) or "")
    assert dense.refuses(Workload(256, 200, 16, 32)) is None
    assert dense.refuses(Workload(1, 1, 1, 1, pending=4)) == "has no pending chain"


INTERPRETED = """
import builtins, contextlib, sys
sys.path.insert(0, {tools!r})
import torch

torch.cpu.device = lambda index: contextlib.nullcontext()  # The Mamba2 kernel's wrapper asks for it.
from bole_codegen.measure import make_verify_inputs, relative_error
from bole_runtime.kernels.problem import Problem
from bole_runtime.reference import verify_sequential
from bole_runtime.tree import TreeBatch
from peers import PeerOptions, load_peers

for family in ("gdn", "kda", "mamba2"):
    names = ["sglang"] if family == "mamba2" else ["sglang", "sglang-dense"]
    peers, missing = load_peers(names, PeerOptions(sglang={path!r}, family=family))
    assert not missing, missing
    problem = Problem("verify", family, 16, 8, 2, "fp32", "fp32", "raw", "fast", 16, 8, 0, 8)
    for peer in peers:
        # The interpreter's scalars are one-element arrays, which newer NumPy does not turn into loop bounds.
        def counted(*bounds):
            return builtins.range(*(b if isinstance(b, int) else int(b.handle.data.item()) for b in bounds))

        peer._entry.__globals__["range"] = counted
        for shape in ("ragged", "chain"):
            inputs = make_verify_inputs(problem, 2, 4, 2, 6, shape, layers=1, device="cpu", seed=7)
            layer = inputs.layers[0]
            want = verify_sequential(
                layer.q, layer.k, layer.v, gates=layer.raw, state=layer.state, slots=inputs.slots,
                tree=TreeBatch.from_parents(inputs.parents), recurrence=family,
            )
            prepared = peer.prepare(inputs, shape, 1 << 30)
            prepared.poison()
            prepared.make_layer(0)()
            error = relative_error(prepared.output(0), want)
            assert error < 2e-6, (family, shape, peer.name, error)
            print("right", family, shape, peer.name, error)
"""


@pytest.mark.skipif("BOLE_SGLANG" not in os.environ, reason="set BOLE_SGLANG to an sglang 0.5.23 wheel or folder")
def test_the_real_kernel_agrees_with_the_sequential_recurrence() -> None:
    code = INTERPRETED.format(tools=str(TOOLS), path=os.environ["BOLE_SGLANG"])
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.count("right") == 10
