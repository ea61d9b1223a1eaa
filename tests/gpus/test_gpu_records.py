"""GPU records: exact names, aliases, and figures that hang together."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bole_runtime import gpus
from bole_runtime.gpus.devices import ASSUMED_BANDWIDTH_GBS, SMEM_WITHOUT_OPT_IN

# The names that were confused by substring matching elsewhere, and what each must be.
EXACT = {
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": "h20-3e",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
NOT_A_KNOWN_GPU = (
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H200 MIG 3g.71gb",
    "NVIDIA H100",
    "NVIDIA H2",
    "NVIDIA H200 ",
    "nvidia h200",
    "NVIDIA H200X",
    "H200",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "",
)


@pytest.mark.parametrize(("name", "key"), EXACT.items())
def test_identify_exact_names(name: str, key: str) -> None:
    record = gpus.identify(name)
    assert record is not None
    assert record.key == key


@pytest.mark.parametrize("name", NOT_A_KNOWN_GPU)
def test_identify_never_matches_a_part(name: str) -> None:
    assert gpus.identify(name) is None


def test_explain_device_name() -> None:
    assert "key h200" in gpus.explain_device_name("NVIDIA H200")
    mig = gpus.explain_device_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me")
    assert "MIG slice (1g.10gb+me)" in mig
    assert "key h100" in mig
    assert "gpus.json" in gpus.explain_device_name("NVIDIA H300")
    assert "not supported" in gpus.explain_device_name("AMD Instinct MI300X")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("h100", "h100"),
        ("H100-SXM", "h100"),
        ("h100 sxm5", "h100"),
        ("H100_PCIe", "h100-pcie"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("nvidia h200 nvl", "h200-nvl"),
        ("4090", "rtx4090"),
        ("gh200-144g", "gh200-144gb"),
    ],
)
def test_get_by_word(word: str, key: str) -> None:
    assert gpus.get(word).key == key


@pytest.mark.parametrize("word", ["h", "h10", "hopper", "h100 80gb hbm3", "", "nvidia"])
def test_get_refuses_parts_of_words(word: str) -> None:
    with pytest.raises(gpus.UnknownGpuError, match="unknown GPU"):
        gpus.get(word)


def test_get_suggests_and_lists() -> None:
    with pytest.raises(gpus.UnknownGpuError, match=r"Did you mean .*h100-pcie.*Known: a10, "):
        gpus.get("h100-pci")
    with pytest.raises(gpus.UnknownGpuError, match="MIG slice"):
        gpus.get("NVIDIA H100 80GB HBM3 MIG 1g.10gb")


def test_words_and_names_belong_to_one_record() -> None:
    seen: dict[str, str] = {}
    for record in gpus.all_records():
        for word in (record.key, *record.aliases, *record.device_names):
            word = word.lower().replace(" ", "-").replace("_", "-")
            assert seen.setdefault(word, record.key) == record.key, f"{word} names two GPUs"


def test_table_keys_are_declared_and_of_one_architecture() -> None:
    assert gpus.table_keys(gpus.get("h100")) == ("h100", "h200")
    for record in gpus.all_records():
        for key in record.tables_from:
            other = gpus.get(key)
            assert other.key == key != record.key
            assert not other.tables_from, "stand-ins are one step, never a chain"
            assert other.compute_capability == record.compute_capability


def test_records_are_sorted_and_plausible() -> None:
    records = gpus.all_records()
    assert [r.key for r in records] == sorted(r.key for r in records)
    shared_kib = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99, (12, 1): 99}
    for record in records:
        assert record.device_names
        assert record.bf16_tflops == pytest.approx(2 * record.tf32_tflops, rel=0.02)
        assert all(int(size) == record.memory_gib for size in re.findall(r"(\d+) GB", record.title))
        assert 16 <= record.memory_gib <= 512
        assert 1 << 20 < record.l2_bytes < 1 << 28
        assert (record.reason != "") == (not record.supported)
        if record.compute_capability is not None:
            assert record.smem_per_block == shared_kib[record.compute_capability] * 1024


def test_limits_and_the_named_gap() -> None:
    limits = gpus.get("h200").limits()
    assert (limits.compute_capability, limits.sms, limits.smem_per_block) == ((9, 0), 132, 232448)
    with pytest.raises(ValueError, match="MI300X is not supported"):
        gpus.get("mi300x").limits()


def _properties(**changes: object) -> SimpleNamespace:
    fields: dict[str, object] = {
        "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 16,
        "shared_memory_per_block_optin": 232448,
        "L2_cache_size": 6 << 20,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_device_limits_of_a_slice_are_its_own() -> None:
    limits = gpus.device_limits(_properties())
    assert (limits.sms, limits.l2_bytes, limits.bandwidth_gbs) == (16, 6 << 20, ASSUMED_BANDWIDTH_GBS)
    clocked = gpus.device_limits(_properties(memory_clock_rate=2_619_000, memory_bus_width=5120))
    assert clocked.bandwidth_gbs == pytest.approx(3352, rel=1e-3)
    assert gpus.device_limits(_properties(name="NVIDIA H200")).bandwidth_gbs == 4800


def test_device_limits_without_opt_in_figure() -> None:
    old = _properties()
    del old.shared_memory_per_block_optin
    assert gpus.device_limits(old).smem_per_block == SMEM_WITHOUT_OPT_IN
    old.name = "NVIDIA H200"
    assert gpus.device_limits(old).smem_per_block == 232448


def test_import_reads_nothing_and_pulls_in_no_tuner() -> None:
    code = (
        "import sys; import bole_runtime.gpus.lookup as lookup; "
        "assert lookup.all_records.cache_info().currsize == 0; "
        "bad = {'optuna', 'jinja2', 'rich', 'msgspec', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.gpu
def test_the_gpu_present_agrees_with_its_record() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    record = gpus.identify(properties.name)
    if record is None:
        pytest.skip(gpus.explain_device_name(properties.name))
    assert 0.9 * record.memory_gib <= properties.total_memory / 2**30 <= record.memory_gib
    limits, seen = record.limits(), gpus.device_limits(properties)
    assert seen == limits
