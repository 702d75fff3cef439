"""The errors of an object storage as errors of the store: those that pass by themselves, and those that don't.

fsspec's file systems raise errors of their libraries, which need not be installed. They are told apart by their status
of HTTP, their code and the names of their classes."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from palaver.errors import PalaverError
from palaver.store.errors import StorageDisconnected, StorageNotFound, Unreachable

_PASSING_STATUSES = (408, 425, 429)
_LASTING_STATUSES = (501, 505)
_PASSING_CODES = (
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
)
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
_PASSING_ERRNOS = (
    errno.EAGAIN,
    errno.EBUSY,
    errno.EDQUOT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOSPC,
)
_NETWORK_CLASSES = frozenset(
    (
        "ChunkedEncodingError",  # requests
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "ConnectionError",  # botocore, requests
        "HTTPClientError",  # botocore
        "IncompleteReadError",
        "ProtocolError",  # urllib3
        "ServiceRequestError",  # azure
        "ServiceResponseError",
        "Timeout",  # requests
        "TransportError",  # google
    )
)
_CREDENTIALS_CLASSES = frozenset(("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"))


@contextmanager
def reach_storage() -> Iterator[None]:
    """Raises the errors of a storage as those of the store. A missing file is one of the storage itself: the block
    handles missing objects."""
    try:
        yield
    except PalaverError:
        raise
    except FileNotFoundError as error:
        raise StorageNotFound from error
    except PermissionError as error:
        raise Unreachable("The storage of the media refuses the access.") from error
    except Exception as error:
        raise _translate(error) from error


def is_bucket_missing(error: FileNotFoundError) -> bool:
    """Whether the storage says that the bucket is missing, not an object in it."""
    return any(_code(one) in _NO_BUCKET_CODES for one in _causes(error))


def _translate(error: Exception) -> Unreachable:
    if _passes(error):
        return StorageDisconnected("The storage of the media does not answer.")
    if _class_names(error) & _CREDENTIALS_CLASSES:
        return Unreachable("There are no credentials for the storage of the media.")
    return Unreachable(f"The storage of the media can't be used ({type(error).__name__}): the server's log says why.")


def _passes(error: Exception) -> bool:
    """Whether the same call may succeed later: the network, the storage or its limit of requests failed it."""
    causes = _causes(error)
    if any(_code(one) in _PASSING_CODES for one in causes):
        return True
    status = next(filter(None, map(_status, causes)), 0)
    if status:
        return status in _PASSING_STATUSES or (status >= 500 and status not in _LASTING_STATUSES)
    if any(_is_certificate(one) for one in causes):
        return False
    return any(_is_network(one) for one in causes)


def _is_certificate(error: BaseException) -> bool:
    """Whether the storage's certificate is wrong. Libraries keep that in the text of their errors alone."""
    return isinstance(error, ssl.SSLCertVerificationError) or "certificate verify failed" in str(error).lower()


def _is_network(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    return bool(_class_names(error) & _NETWORK_CLASSES)


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__
    return found


def _class_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    """The status of HTTP that an error carries; 0 if there is none."""
    response = getattr(error, "response", None)
    values: list[Any] = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    values.append(getattr(response, "status_code", None))
    if isinstance(response, dict):
        values.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((value for value in values if isinstance(value, int) and 100 <= value < 600), 0)


def _code(error: BaseException) -> str:
    """The name that the storage gives to an error."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(error, "error_code", None)
    return str(code or "")
