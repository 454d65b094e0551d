"""Errors of database drivers in terms of XA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bascule.xa.errors import BranchRolledBack, Code, DuplicateXid, ResourceError, ResourceFailed, RetryLater, UnknownXid, XaError

#: XA errors by the longest matching prefix of the SQLSTATE of the standard, of PostgreSQL, and of MySQL and MariaDB (XA...).
SQLSTATES: dict[str, tuple[type[XaError], Code]] = {
    "08": (ResourceFailed, Code.XAER_RMFAIL),  # connection
    "23": (BranchRolledBack, Code.XA_RBINTEGRITY),
    "25P03": (BranchRolledBack, Code.XA_RBTIMEOUT),  # idle in transaction
    "40": (BranchRolledBack, Code.XA_RBROLLBACK),
    "40003": (ResourceFailed, Code.XAER_RMFAIL),  # statement completion unknown
    "40001": (BranchRolledBack, Code.XA_RBTRANSIENT),  # serialization failure
    "40P01": (BranchRolledBack, Code.XA_RBDEADLOCK),
    "42704": (UnknownXid, Code.XAER_NOTA),  # no prepared transaction of that name
    "42710": (DuplicateXid, Code.XAER_DUPID),
    "55006": (RetryLater, Code.XA_RETRY),  # another session is finishing it
    "57P": (ResourceFailed, Code.XAER_RMFAIL),  # shutting down, crashed, starting up
    "XA1": (BranchRolledBack, Code.XA_RBROLLBACK),
    "XA102": (BranchRolledBack, Code.XA_RBDEADLOCK),
    "XA106": (BranchRolledBack, Code.XA_RBTIMEOUT),
    "XAE04": (UnknownXid, Code.XAER_NOTA),
    "XAE08": (DuplicateXid, Code.XAER_DUPID),
}
#: "General error": drivers of MySQL and MariaDB report it also if the connection was lost, so it does not say that the server has answered.
GENERAL_ERROR: Final = "HY000"
#: For drivers that do not report SQLSTATE: by the error codes of SQLite, and of Oracle ("transaction does not exist").
CODES: dict[str, tuple[type[XaError], Code]] = {
    "SQLITE_BUSY": (BranchRolledBack, Code.XA_RBTRANSIENT),  # another connection has the lock; nothing is committed
    "SQLITE_LOCKED": (BranchRolledBack, Code.XA_RBTRANSIENT),
    "SQLITE_FULL": (BranchRolledBack, Code.XA_RBOTHER),
    "ORA-24756": (UnknownXid, Code.XAER_NOTA),
}
#: For other errors of these drivers: by the exception classes of PEP 249.
EXCEPTIONS: dict[str, tuple[type[XaError], Code]] = {
    "IntegrityError": (BranchRolledBack, Code.XA_RBINTEGRITY),
    "OperationalError": (ResourceFailed, Code.XAER_RMFAIL),
    "InterfaceError": (ResourceFailed, Code.XAER_RMFAIL),
}


def in_words_of_xa(error: Exception) -> XaError:
    """Return the XaError for a driver's exception."""
    cause, state = _of_driver(error), _sqlstate(error)
    fits = [SQLSTATES[state[:size]] for size in range(len(state), 1, -1) if state[:size] in SQLSTATES]
    if not state:
        fits = [CODES[code] for code in _codes(cause) if code in CODES]
        fits += [EXCEPTIONS[kind.__name__] for kind in type(cause).__mro__ if kind.__name__ in EXCEPTIONS]
    kind, code = fits[0] if fits else (ResourceError, Code.XAER_RMERR)
    return kind(f"{cause}".strip() or type(cause).__name__, code, cause=cause)


@contextmanager
def translated() -> Iterator[None]:
    """Raise exceptions of the driver as XaError within the block."""
    try:
        yield
    except XaError:
        raise
    except Exception as error:
        raise in_words_of_xa(error) from error


@contextmanager
def unprepared_commit() -> Iterator[None]:
    """Surround the commit of an unprepared branch. A driver error without an SQLSTATE leaves the branch in doubt.

    BranchRolledBack and ResourceFailed pass unchanged: who raises one of them within the block knows the outcome, or the doubt.
    """
    try:
        yield
    except (BranchRolledBack, ResourceFailed):
        raise
    except Exception as error:
        said = in_words_of_xa(error)
        if isinstance(said, ResourceError) and not _sqlstate(error):
            said = ResourceFailed(f"{type(error).__name__}: {error}", cause=error)
        raise said from error


@contextmanager
def asked_about(commit: ResourceFailed) -> Iterator[None]:
    """Surround a question about the outcome of a commit. If the question fails, the commit stays in doubt."""
    try:
        yield
    except XaError as error:
        raise ResourceFailed(f"{commit}; {error}", cause=commit.cause) from error


def _of_driver(error: Exception) -> Any:
    """Return the driver's exception, which SQLAlchemy wraps."""
    return getattr(error, "orig", None) or error


def _sqlstate(error: Exception) -> str:
    """Return the SQLSTATE of an error, or "" if the error may be the driver's own, or the driver does not report it."""
    cause = _of_driver(error)
    state: str = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""
    return "" if state == GENERAL_ERROR else state


def _codes(cause: Any) -> Iterator[str]:
    """Yield the codes of an error of sqlite3, whose extended codes have a suffix, or of python-oracledb."""
    name: str = getattr(cause, "sqlite_errorname", None) or ""
    yield "_".join(name.split("_")[:2])
    yield from (getattr(each, "full_code", "") for each in getattr(cause, "args", ()))
