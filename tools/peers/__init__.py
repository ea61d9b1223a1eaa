"""Peers by name. To add one, write a module with a class that follows ``peers.base.Peer`` and name it here."""

from __future__ import annotations

from peers.base import (
    ChainedInputs,
    CommittingPeer,
    Loader,
    Peer,
    PeerOptions,
    PeerRefuses,
    PeerUnavailable,
    PreparedPeer,
)


def _sglang(options: PeerOptions) -> Peer:
    if options.family == "mamba2":
        from peers.sglang_mamba import SglangMamba

        return SglangMamba.load(options.sglang)
    from peers.sglang_serial import SglangSerial

    return SglangSerial.load(options.sglang, dense=False)


def _sglang_dense(options: PeerOptions) -> Peer:
    from peers.sglang_serial import SglangSerial

    return SglangSerial.load(options.sglang, dense=True)


def _weaver(options: PeerOptions) -> Peer:
    from peers.weaver import Weaver

    return Weaver.load(options.weaver, "tf32")


def _weaver_x3(options: PeerOptions) -> Peer:
    from peers.weaver import Weaver

    return Weaver.load(options.weaver, "tf32x3")


def _treewy(options: PeerOptions) -> Peer:
    from peers.treewy import TreeWY

    return TreeWY.load(options.treewy, bf16=True)


def _treewy_ieee(options: PeerOptions) -> Peer:
    from peers.treewy import TreeWY

    return TreeWY.load(options.treewy, bf16=False)


def _replayssm_ring(options: PeerOptions) -> Peer:
    from peers.sglang_replay import ReplaySSM

    return ReplaySSM.load(options.sglang)


def _replayssm_fold(options: PeerOptions) -> Peer:
    from peers.sglang_fold import ReplayFold

    return ReplayFold.load(options.sglang)


#: Loaders raise PeerUnavailable with the reason.
PEERS: dict[str, Loader] = {
    "sglang": _sglang,
    "sglang-dense": _sglang_dense,
    "replayssm-ring": _replayssm_ring,
    "replayssm-fold": _replayssm_fold,
    "weaver-tf32": _weaver,
    "weaver-tf32x3": _weaver_x3,
    "treewy-bf16": _treewy,
    "treewy-ieee": _treewy_ieee,
}
#: The beginning of a peer's name to the option that says where it is.
SOURCES: dict[str, str] = {"sglang": "--sglang", "replayssm": "--sglang", "weaver": "--weaver", "treewy": "--treewy"}


def source_of(name: str) -> str:
    """Return the option that says where a peer is."""
    return next(option for begin, option in SOURCES.items() if name.startswith(begin))


def load_peers(names: list[str], options: PeerOptions) -> tuple[list[Peer], dict[str, str]]:
    """Load peers by name.

    Returns:
        The peers that loaded, and name to reason for those that did not.
    """
    loaded: list[Peer] = []
    missing: dict[str, str] = {}
    for name in names:
        if name not in PEERS:
            missing[name] = f"unknown peer; known: {', '.join(PEERS)}"
            continue
        try:
            loaded.append(PEERS[name](options))
        except PeerUnavailable as error:
            missing[name] = str(error)
    return loaded, missing


__all__ = [
    "PEERS",
    "SOURCES",
    "ChainedInputs",
    "CommittingPeer",
    "Peer",
    "PeerOptions",
    "PeerRefuses",
    "PeerUnavailable",
    "PreparedPeer",
    "load_peers",
    "source_of",
]
