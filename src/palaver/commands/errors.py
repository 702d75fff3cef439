"""Every refusal on the command line is one sentence and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from palaver.errors import PalaverError, RequestError

FAILED, USAGE = 1, 2


@contextmanager
def errors_told() -> Iterator[None]:
    """Status 2 for how it was asked, 1 for the model or the engine."""
    try:
        yield
    except RequestError as error:
        _tell(error)
        raise typer.Exit(USAGE) from None
    except PalaverError as error:
        _tell(_explained(error))
        raise typer.Exit(FAILED) from None
    except BrokenPipeError:  # whoever read the answer has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except OSError as error:  # a file or a folder that can't be read or written
        name = error.filename2 or error.filename
        _tell(f"{name}: {error.strerror}" if name else error)
        raise typer.Exit(FAILED) from None


def _explained(error: PalaverError) -> str:
    """Of a database that does not answer also what its driver says, which clients of a server are not shown."""
    driver = getattr(error.__cause__, "orig", None)
    from palaver.store.errors import Unreachable

    if not isinstance(error, Unreachable) or driver is None:
        return str(error)
    return f"{error} {str(driver).strip().splitlines()[0]}"


def _tell(error: object) -> None:
    print(f"palaver: {error}", file=sys.stderr)
