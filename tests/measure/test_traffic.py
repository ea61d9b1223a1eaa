"""The byte model against numbers worked out by hand and against BENCH.md's floors."""

from __future__ import annotations

import pytest

from bole_codegen.measure import Workload, commit_traffic, floor_us, is_cold, layers_for_cold_l2, verify_traffic

MIB = 1 << 20
L2 = 60 * MIB


def test_verify_bytes_by_hand() -> None:
    t = verify_traffic(Workload(batch=2, nodes=3, hk=1, hv=2, dk=4, dv=8, gate_mode="ready"))
    assert t.state_read == 2 * 2 * 4 * 8 * 4
    assert t.state_written == 0
    assert t.inputs == 2 * 3 * ((4 + 4 + 16) * 2 + 2 * 2 * 4)
    assert t.outputs == 2 * 3 * 16 * 2
    assert t.factors == 0
    assert t.total == t.state_read + t.inputs + t.outputs


def test_raw_gates_are_two_bytes_a_head_and_constants_count_once() -> None:
    ready = verify_traffic(Workload(batch=2, nodes=3, hk=1, hv=2, gate_mode="ready"))
    raw = verify_traffic(Workload(batch=2, nodes=3, hk=1, hv=2, gate_mode="raw"))
    assert ready.inputs - raw.inputs == 2 * 3 * 2 * 2 * 2 - 2 * 2 * 4


@pytest.mark.parametrize(
    ("batch", "nodes", "floor"), [(1, 16, 0.6), (8, 16, 4.6), (64, 16, 37), (64, 32, 43), (1, 64, 0.9), (64, 64, 55)]
)
def test_floors_match_the_reference_points(batch: int, nodes: int, floor: float) -> None:
    work = Workload(batch, nodes, hk=16, hv=32, gate_mode="ready")
    assert verify_traffic(work).floor_us(4300) == pytest.approx(floor, rel=0.06)


def test_factors_of_the_reference_geometry_are_12544_bytes_a_node() -> None:
    work = Workload(batch=1, nodes=1, hk=16, hv=32)
    assert work.factor_bytes_per_node == 12544
    assert 160 < work.state_bytes / work.factor_bytes_per_node < 170
    captured = verify_traffic(work, captured=True)
    assert captured.total - verify_traffic(work).total == work.factor_bytes_per_node


def test_pending_tokens_have_no_query_and_no_output() -> None:
    plain, pending = (Workload(3, 4, 2, 4, pending=p) for p in (0, 5))
    extra = verify_traffic(pending).total - verify_traffic(plain).total
    assert extra == 3 * 5 * ((2 * 128 + 4 * 128) * 2 + 2 * 4 * 2)


def test_commit_reads_and_writes_only_live_states() -> None:
    work = Workload(batch=4, nodes=16, hk=16, hv=32)
    t = commit_traffic(work, [3, 0, 1, 0])
    assert t.state_read == t.state_written == work.state_bytes // 2
    assert t.inputs == 4 * ((16 * 128 + 32 * 128) * 2 + 2 * 32 * 2)
    assert commit_traffic(work, 0).total == 0


def test_commit_floor_matches_the_reference_point() -> None:
    assert commit_traffic(Workload(64, 16, 16, 32), 4).floor_us(4300) == pytest.approx(62, rel=0.03)


def test_commit_wants_an_entry_a_request() -> None:
    with pytest.raises(ValueError, match="3 entries for a batch of 4"):
        commit_traffic(Workload(4, 16, 16, 32), [1, 2, 3])


def test_snapshots_at_the_largest_point() -> None:
    assert Workload(256, 200, 16, 32).snapshot_bytes == pytest.approx(107e9, rel=0.01)


def test_flops_grow_with_the_nodes() -> None:
    small, large = (verify_traffic(Workload(8, n, 16, 32)).flops for n in (16, 64))
    assert large > 4 * small


def test_unknown_dtype_and_bandwidth_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        _ = Workload(1, 1, 1, 1, state_dtype="int8").state_bytes
    with pytest.raises(ValueError, match="positive"):
        floor_us(1, 0.0)


def test_cold_layers_at_the_protocols_points() -> None:
    assert layers_for_cold_l2(2 * MIB, L2) >= 90
    assert layers_for_cold_l2(64 * 2 * MIB, L2) == 3
    assert is_cold(layers_for_cold_l2(2 * MIB, L2), 2 * MIB, L2)
    assert not is_cold(24, 2 * MIB, L2)


def test_memory_cap_lowers_the_layers_and_one_must_fit() -> None:
    assert layers_for_cold_l2(2 * MIB, L2, memory_cap=40 * MIB, bytes_per_layer=4 * MIB) == 10
    with pytest.raises(ValueError, match="memory cap"):
        layers_for_cold_l2(2 * MIB, L2, memory_cap=MIB)


def test_cold_layers_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="positive"):
        layers_for_cold_l2(0, L2)
