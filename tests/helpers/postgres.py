"""A PostgreSQL server of the distribution's packages, started for one test."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path


def tools() -> Path | None:
    """Return the folder with ``initdb`` and ``pg_ctl``, None where PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[4]))
    place = found[-1] if found else Path(shutil.which("initdb") or "")
    return place.parent if place.name == "initdb" and (place.parent / "pg_ctl").exists() else None


def missing() -> str | None:
    """Return why no server can be started here, None when one can."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if tools() is None:
        return "PostgreSQL is not installed (Debian, Ubuntu: apt install postgresql)"
    if os.geteuid() == 0 and _other_user() is None:
        return "a PostgreSQL server does not run as root, and there is no other user here"
    return None


def _other_user() -> str | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run a server on a free port of this machine; yield the URL of an empty database.

    Args:
        folder: short, and open to the user that runs the server: sockets have a limit on their paths.
    """
    binaries = tools()
    assert binaries is not None
    user = _other_user() if os.geteuid() == 0 else None
    data, log = folder / "data", folder / "log"
    data.mkdir()
    if user is not None:
        shutil.chown(folder, user)
        shutil.chown(data, user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(*command: str) -> None:
        done = subprocess.run(
            command, user=user, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=60, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stdout}\n{log.read_text() if log.exists() else ''}")

    # Trust and no fsync: it lives for one test, and listens to this machine alone.
    run(str(binaries / "initdb"), "-D", str(data), "-U", "bole", "--auth=trust", "--no-sync", "-E", "UTF8")
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off"
    run(str(binaries / "pg_ctl"), "-D", str(data), "-l", str(log), "-w", "-o", options, "start")
    try:
        yield f"postgresql://bole@127.0.0.1:{port}/postgres"
    finally:
        run(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
