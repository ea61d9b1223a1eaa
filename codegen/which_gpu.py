"""Which GPU a command works for: the one named, and whether it has to be the one present."""

from __future__ import annotations

import argparse

from bole_codegen.arguments import UsageError
from bole_runtime import gpus
from bole_runtime.gpus import GpuRecord, UnknownGpuError


def present(index: int) -> str | None:
    """Return the name of a CUDA device, None when there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        has = "device 0 alone" if count == 1 else f"devices 0 to {count - 1}"
        raise UsageError(f"--devices {index}: this machine has {has}")
    return torch.cuda.get_device_name(index)


def gpu_of(args: argparse.Namespace) -> GpuRecord:
    """Return the GPU to work for, making sure that it is the one present unless nothing runs.

    Args:
        args: of the command line.

    Raises:
        UsageError: it is not, or is not supported.
    """
    if len(set(args.devices)) != len(args.devices):
        raise UsageError(f"--devices names a device twice: {','.join(map(str, args.devices))}")
    try:
        named = None if args.gpu is None else gpus.get(args.gpu)
    except UnknownGpuError as error:
        raise UsageError(str(error)) from error
    if named is not None and not named.supported:
        raise UsageError(f"{named.title} is not supported: {named.reason}")
    without = [f"--{a}" for a in ("offline", "show", "explain", "reproduce") if getattr(args, a) not in (None, False)]
    if without:
        if named is None:
            raise UsageError(f"{without[0]} needs --gpu, the GPU to work for")
        return named
    name = present(args.devices[0])
    offline = f"add --offline to compile for {named.title if named else 'a named GPU'} without one"
    if args.verify:
        # Its entries have to run: nothing offline stands in for that.
        offline = "--verify runs every entry on the GPU of its table; without one, --show and --stale read tables"
    if name is None:
        raise UsageError(f"this machine has no CUDA GPU; {offline}")
    for index in args.devices[1:]:
        other = present(index)
        if other != name:
            raise UsageError(
                f"--devices: device {index} is {other!r}, device {args.devices[0]} is {name!r}; one table is of one GPU"
            )
    found = gpus.identify(name)
    if found is None:
        raise UsageError(f"{gpus.explain_device_name(name)}; {offline}")
    if named is not None and named.key != found.key:
        raise UsageError(
            f"this machine has {found.title} ({name!r}), not {named.title}; run with --gpu {found.key}"
            f"{'; ' if args.verify else ', or '}{offline}"
        )
    if not found.supported:
        raise UsageError(f"{found.title} is not supported: {found.reason}")
    return found
