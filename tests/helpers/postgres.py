"""A PostgreSQL server of the distribution's packages, started for one test."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
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


class Server:
    """A server on a free port of this machine.

    Args:
        folder: short, and open to the user that runs the server: sockets have a limit on their paths.

    Attributes:
        url: of an empty database.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._data = folder, folder / "data"
        self._user = _other_user() if os.geteuid() == 0 else None
        self._data.mkdir()
        if self._user is not None:
            shutil.chown(folder, self._user)
            shutil.chown(self._data, self._user)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"postgresql://bole@127.0.0.1:{self._port}/postgres"
        # Trust and no fsync: it lives for one test, and listens to this machine alone.
        self._run("initdb", "-D", str(self._data), "-U", "bole", "--auth=trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = f"-c listen_addresses=127.0.0.1 -p {self._port} -k {self._folder} -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-l", log, "-w", "-o", options, "start")

    def stop(self) -> None:
        """Stop it at once; connections are cut."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "stop")

    def demand_password(self, password: str) -> None:
        """Give the user a password, and ask for it from now on."""
        sql = f"ALTER USER bole PASSWORD '{password}'"
        self._run("psql", "-h", str(self._folder), "-p", str(self._port), "-U", "bole", "-d", "postgres", "-c", sql)
        rules = self._data / "pg_hba.conf"
        rules.write_text(rules.read_text().replace("trust", "scram-sha-256"))
        self._run("pg_ctl", "-D", str(self._data), "reload")

    def trust(self) -> None:
        """Ask for no password any more."""
        rules = self._data / "pg_hba.conf"
        rules.write_text(rules.read_text().replace("scram-sha-256", "trust"))
        self._run("pg_ctl", "-D", str(self._data), "reload")

    def _run(self, tool: str, *arguments: str) -> None:
        binaries = tools()
        assert binaries is not None
        done = subprocess.run(
            [str(binaries / tool), *arguments], user=self._user, cwd=self._folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        if done.returncode:
            log = self._folder / "log"
            raise RuntimeError(f"{tool} failed: {done.stdout}\n{log.read_text() if log.exists() else ''}")


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Run a server."""
    with tempfile.TemporaryDirectory(prefix="bole-pg-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        found = Server(Path(folder))
        found.start()
        try:
            yield found
        finally:
            with contextlib.suppress(RuntimeError):
                found.stop()
