"""Databases that hold evaluations: opening them, and what their errors mean without what a URL keeps secret."""

from __future__ import annotations

import importlib.util
import time
from typing import Any
from urllib.parse import quote, quote_plus

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage

#: For servers that neither answer nor refuse: seconds to connect, milliseconds until sent bytes are acknowledged.
_LIBPQ: dict[str, Any] = {"connect_timeout": 10, "tcp_user_timeout": 30_000}


def _with_driver(url: str) -> str:
    """Name the PostgreSQL driver that is installed where a URL names none: SQLAlchemy's default differs by version."""
    scheme, rest = url.split("://", 1)
    if scheme not in ("postgresql", "postgres"):
        return url
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver) is not None:
            return f"postgresql+{driver}://{rest}"
    return f"postgresql://{rest}"


def open_database(url: str) -> BaseStorage:
    """Open a database.

    Args:
        url: of SQLAlchemy.

    Raises:
        Exception: see :func:`opening`.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy import make_url

    url = _with_driver(url)
    options: dict[str, Any] = {}
    if url.startswith(("postgresql+psycopg://", "postgresql+psycopg2://")):
        said = make_url(url).query
        options["connect_args"] = {name: value for name, value in _LIBPQ.items() if name not in said}
    for again in range(5):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except Exception as error:
            # Two runs that begin at once both create the tables, and one of them fails.
            if again == 4 or type(error).__name__ not in ("IntegrityError", "ProgrammingError"):
                raise
            time.sleep(0.5 * (again + 1))
    raise AssertionError


def opening(error: Exception, url: str) -> str:
    """Return why a database could not be opened and what to look at."""
    from sqlalchemy.exc import NoSuchModuleError

    kind = url.split("://", 1)[0]
    if isinstance(error, NoSuchModuleError):
        return "SQLAlchemy knows no such kind of database; check how the URL begins"
    if isinstance(error, ImportError):
        install = " (pip install '.[postgresql]' in a checkout)" if kind.startswith("postgres") else ""
        return f"its driver is not installed{install}"
    if isinstance(error, RuntimeError) and "optuna" in str(error):  # Tables of another version of Optuna.
        return " ".join(str(error).split()).rstrip(".")
    return f"{reason(error, url)}; check server, user, password and database of the URL"


def reason(error: BaseException, url: object) -> str:
    """Return what a driver says in its error, on one line, without passwords.

    Args:
        error: of SQLAlchemy, or one of Optuna's that was raised from it.
        url: of the database.
    """
    cause = _of_sqlalchemy(error)
    # Only the driver's own words: others quote URLs and statements.
    text = " ".join(str(getattr(cause, "orig", None) or "").split())
    name = type(cause or error).__name__
    for secret in _secrets(url):
        text = text.replace(secret, "***")
    return f"{name}: {text[:300]}" if text else name


def without_password(url: str) -> str:
    """Return a URL as it may be shown: with ``***`` for what is secret in it."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return f"{url.split('://', 1)[0]}://***"
    hidden = {name: "***" for name in parsed.query if "pass" in name.lower()}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _secrets(url: object) -> list[str]:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)  # type: ignore[arg-type]
    except (ArgumentError, ValueError):
        return []
    known = [parsed.password, *(v for n, v in parsed.query.items() if "pass" in n.lower())]
    plain = {str(k) for k in known if k}
    return sorted({form for k in plain for form in (k, quote(k, safe=""), quote_plus(k))}, key=len, reverse=True)


def may_pass(error: BaseException) -> bool:
    """Return whether a database may answer the same later: it is not reached, starts, or is busy."""
    from sqlalchemy import exc

    cause = _of_sqlalchemy(error)
    if isinstance(cause, exc.TimeoutError):
        return True
    if not isinstance(cause, exc.DBAPIError):
        return False
    # SQLite has one kind of error for a lock, which passes, and for a table that is not there.
    lasting = ("no such", "readonly", "has no column")
    passing = isinstance(cause, exc.OperationalError | exc.InterfaceError) or cause.connection_invalidated
    return passing and not any(words in str(cause.orig) for words in lasting)


def _of_sqlalchemy(error: BaseException) -> BaseException | None:
    """Return the error of SQLAlchemy that one is, or was raised from."""
    from sqlalchemy.exc import SQLAlchemyError

    found: BaseException | None = error
    for _ in range(4):
        if found is None or isinstance(found, SQLAlchemyError):
            return found
        found = found.__cause__ if isinstance(found, StorageInternalError) else None
    return None
