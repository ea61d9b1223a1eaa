"""Extract the kernel files that the benchmarks need from an sglang wheel or folder.

    python tools/peers/pack_sglang.py sglang-0.5.23-*.whl --out .peers/sglang
    python tools/bench_verify.py --peers sglang --sglang .peers/sglang

The packed folder is a few hundred kilobytes, for machines that a whole wheel is not carried to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.base import PeerUnavailable
from peers.sglang_loader import TESTED_VERSION, pack


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Extract SGLang's kernels for tools/bench_verify.py.")
    parser.add_argument("source", type=Path, help="wheel file, unpacked wheel, or site-packages that holds sglang")
    parser.add_argument("--out", type=Path, default=Path(".peers/sglang"), help="folder to write (%(default)s)")
    args = parser.parse_args(argv)
    try:
        packed = pack(args.source, args.out)
    except PeerUnavailable as error:
        print(f"pack_sglang: {error}", file=sys.stderr)
        return 1
    note = "" if packed.version == TESTED_VERSION else f" (tested with {TESTED_VERSION})"
    print(f"{packed.path}: sglang {packed.label}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
