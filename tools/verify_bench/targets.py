"""What Bole is held to against peers other than the serial kernel, at equal state dtype and equal precision."""

from __future__ import annotations

from verify_bench.grid import Point
from verify_bench.rows import Row

#: Nodes of the chains that are judged against kernels for chains.
CHAIN_NODES = (4, 8)
#: A ratio over a peer this near to its own floor is void: there is not enough left to be that much faster.
NEAR_FLOOR = 3.75


def peer_target(name: str, point: Point) -> float | None:
    """Return the least ratio over a peer at a point, or None where it is not judged there.

    Args:
        name: of the peer, as it was asked for.
        point: the benchmark point.
    """
    kind = name.partition("-")[0]
    if kind == "replayssm":
        return 1.0 if point.shape == "chain" and point.nodes in CHAIN_NODES else None
    if kind in ("weaver", "treewy") and point.shape != "chain":
        return 3.0 if point.nodes <= 64 else 2.5
    return None


def peer_verdict(row: Row, name: str) -> str:
    """Return the judgement of a row against one peer, or an empty string where there is none.

    Against ``weaver-tf32x3``: ``lossless over weaver-tf32x3: 3.2x met >=3x``. A ratio is void where the peer is under
    3.75 times its own memory floor; a ratio of a peer that commits as well is over Bole's verify and commit.
    """
    target = peer_target(name, row.point)
    if target is None:
        return ""
    peer = row.results[name]
    over = f"{peer.profile}{' verify and commit' if peer.commits else ''} over {name}"
    ratio = row.peer_ratio(name)
    if ratio is None:
        return f"{over}: no ratio (>={target:g}x)"
    text = f"{over}: {ratio:.1f}x {'met' if ratio >= target else 'MISSED'} >={target:g}x"
    if target > 1.0 and peer.us and peer.floor_us and peer.us < NEAR_FLOOR * peer.floor_us:
        text += f" (void: {peer.us / peer.floor_us:.1f} x its floor)"
    return text
