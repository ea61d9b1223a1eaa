"""What the options of ``bole-tune`` ask for of convolutions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bole_codegen.presets import get_preset, load_presets
from bole_codegen.presets.preset import ModelPreset
from bole_codegen.search.conv_targets import ConvGeometry, make_conv_targets
from bole_codegen.search.targets import Target
from bole_runtime.kernels.conv_problem import CONV_OPS

#: Options of an explicit geometry, by the attribute that they set.
_OPTIONS = {
    "channels": "--channels",
    "width": "--width",
    "length": "--length",
    "bias": "--bias",
    "no_silu": "--no-silu",
    "dynamic": "--dynamic",
}
#: What models.json says of convolutions in notes and sources only: Mamba's have a bias, with one exception; those of
#: LFM2 and LFM3 no activation; Jet-Nemotron generates the weights of every token.
_BIAS_FAMILIES, _NO_BIAS = ("mamba1", "mamba2"), ("PLaMo-2-8B",)
_NO_SILU_FAMILIES = ("short_conv",)
_DYNAMIC = ("Jet-Nemotron-2B", "Jet-Nemotron-4B")


def add_conv_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of an explicit convolution."""
    group = parser.add_argument_group("convolution (with --ops tree_conv,conv_commit; default: the models')")
    group.add_argument("--channels", type=int, metavar="N", help="explicit geometry: channels of a rank")
    group.add_argument("--width", type=int, metavar="N", help="explicit geometry: taps, 2 to 8")
    group.add_argument("--length", type=int, metavar="N", help="inputs that the state keeps; default, width - 1")
    group.add_argument("--bias", action="store_true", help="explicit geometry: with a bias")
    group.add_argument("--no-silu", action="store_true", help="explicit geometry: without SiLU")
    group.add_argument("--dynamic", action="store_true", help="explicit geometry: weights of its own for every node")


def conv_ops(args: argparse.Namespace) -> list[str]:
    """Return the operations on convolutions that are asked for."""
    return [op for op in args.ops if op in CONV_OPS]


def given(args: argparse.Namespace) -> list[str]:
    """Return the options of an explicit convolution that were given."""
    values = ((option, getattr(args, name)) for name, option in _OPTIONS.items())
    return [option for option, value in values if value is not None and value is not False]


def conv_targets(args: argparse.Namespace, families: Sequence[str]) -> list[Target]:
    """Return the buckets of convolutions that are asked for.

    Args:
        args: of the command line.
        families: whose shipped models are searched where neither a model nor a geometry is named.

    Raises:
        ValueError: a model, geometry or size that cannot be served; the message says what can.
    """
    ops = conv_ops(args)
    explicit = given(args)
    if explicit and not ops:
        raise ValueError(f"{explicit[0]} is of a convolution; add --ops {','.join(CONV_OPS)}")
    found: list[Target] = []
    for state_dtype, geometry in _geometries(args, families) if ops else ():
        found += make_conv_targets(
            [geometry],
            ops=ops,
            in_dtypes=args.dtype,
            state_dtypes=args.state_dtype or [state_dtype],
            nodes=args.nodes,
            batches=args.batch,
            pendings=args.pending,
            shape=args.shape,
        )
    # Of models whose convolutions fall into the same bucket the widest stands for it.
    return sorted(found, key=lambda t: -t.hv)


def _geometries(args: argparse.Namespace, families: Sequence[str]) -> list[tuple[str, ConvGeometry]]:
    """Return (state type, geometry) of everything asked for."""
    found: list[tuple[str, ConvGeometry]] = []
    if given(args):
        missing = [option for option in ("--channels", "--width") if option not in given(args)]
        if missing:
            raise ValueError(f"an explicit convolution needs {', '.join(missing)} too")
        length = args.width - 1 if args.length is None else args.length
        silu = not args.no_silu
        found.append((args.dtype[0], ConvGeometry(args.channels, args.width, length, args.bias, silu, args.dynamic)))
    presets = [get_preset(name) for name in args.model]
    for preset in presets:
        if not preset.conv_channels:
            raise ValueError(f"{preset.name} ({preset.family}) has no convolution that models.json knows")
    if not found and not presets:
        presets = [p for p in load_presets().values() if p.family in families and p.conv_channels]
    return [*found, *((p.conv_state_dtype, g) for p in presets for g in preset_convolutions(p, args.tp))]


def preset_convolutions(preset: ModelPreset, tp: int = 1) -> list[ConvGeometry]:
    """Return the convolutions of one of ``tp`` ranks of a model; the state keeps what the next token needs.

    Raises:
        ValueError: its heads or channels do not divide by ``tp``.
    """
    if preset.hk is not None:
        preset.shard(tp)  # Channels follow the heads.
    width = preset.conv_width or 0
    found = []
    for channels in preset.conv_channels:
        if tp < 1 or channels % tp:
            raise ValueError(f"tp = {tp} does not divide the {channels} channels of {preset.name}")
        bias = preset.family in _BIAS_FAMILIES and preset.name not in _NO_BIAS
        silu = preset.family not in _NO_SILU_FAMILIES
        found.append(ConvGeometry(channels // tp, width, width - 1, bias, silu, preset.name in _DYNAMIC))
    return found
