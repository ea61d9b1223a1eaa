"""Peers by name. To add one, write a module with a class that follows ``peers.base.Peer`` and name it here."""

from __future__ import annotations

from peers.base import Loader, Peer, PeerOptions, PeerUnavailable, PreparedPeer


def _sglang(options: PeerOptions) -> Peer:
    if options.family == "mamba2":
        from peers.sglang_mamba import SglangMamba

        return SglangMamba.load(options.sglang)
    from peers.sglang_serial import SglangSerial

    return SglangSerial.load(options.sglang, dense=False)


def _sglang_dense(options: PeerOptions) -> Peer:
    from peers.sglang_serial import SglangSerial

    return SglangSerial.load(options.sglang, dense=True)


#: Loaders raise PeerUnavailable with the reason.
PEERS: dict[str, Loader] = {"sglang": _sglang, "sglang-dense": _sglang_dense}


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


__all__ = ["PEERS", "Peer", "PeerOptions", "PeerUnavailable", "PreparedPeer", "load_peers"]
