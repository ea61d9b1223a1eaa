"""The accepted length that drafts are aimed at, told to an engine that runs."""

from __future__ import annotations

from pathlib import Path


def write_length(path: Path, least: int, most: int) -> None:
    """Say how many tokens a round are accepted from now on; never half a file to a reader."""
    new = path.with_name(path.name + ".new")
    new.write_text(f"{least} {most}", encoding="utf-8")
    new.replace(path)
