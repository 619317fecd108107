"""Remote files through fsspec: what a pattern names, and reads that continue after a failure.

Knows no format. A remote store that fails is never taken for a damaged file: what is read must not
depend on the weather, so every failure here ends the work, in one line, and can be gone on with.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from sgt_ds.errors import UserError
from sgt_ds.progress import counted

log = logging.getLogger(__name__)

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0)
"""Between attempts at one read. Any byte that arrives starts them again."""
WAIT_SECONDS = 60.0
"""No attempt but the second begins later than this after the first failure: stores' own packages may
try for long in each."""
EXTRA = "pip install 'sgt-ds[remote]'"
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    "hf": "huggingface_hub",
}
# What stores call the mark that changes with a file's content, best first.
_MARKS = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5", "Last-Modified", "mtime")
# What to do about credentials that are not there.
_CREDENTIALS = {
    **dict.fromkeys(
        ("s3", "s3a"),
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile in ~/.aws; "
        "for a public bucket, FSSPEC_S3_ANON=true",
    ),
    **dict.fromkeys(
        ("gs", "gcs"),
        "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    ),
    "hf": "set HF_TOKEN to a token that may read it",
}
# botocore's errors of credentials that are missing or incomplete, or of a login that has ended.
_NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoAuthTokenError"),
    *("InvalidConfigError", "ConfigParseError", "SSOError", "LoginError"),
}
_WEB_ADDRESS = re.compile(r"https?://[^\s'\")>]+")
_T = TypeVar("_T")

State = tuple[int, str]
"""Size in bytes (0: not told) and mark ("": none)."""


def is_remote(location: str) -> bool:
    """Whether fsspec has to read it."""
    return "://" in location


def is_remote_set(location: str) -> bool:
    """Whether it is the URL of a prepared set, not of files with texts."""
    name = location.rsplit("/", 1)[-1]
    return is_remote(location) and not any(
        ending in name for ending in (".json", ".txt", ".gz", ".zst")
    )


def check_remote(location: str) -> None:
    """Raises: UserError where no package is here that reads such a URL. Asks no store."""
    with _readable(location) as protocol:
        import fsspec

        fsspec.get_filesystem_class(protocol)


def remote_matches(pattern: str) -> list[tuple[str, State]]:
    """Locations that a URL names, in order of name, with their states. None: an empty list.

    Raises: UserError where a package is missing or the store cannot be asked.
    """
    filesystem, path = _filesystem(pattern)
    # In a web address, `?` begins a query and `[` stands for itself.
    magic = "*" if pattern.startswith(("http://", "https://")) else "*?["

    def ask() -> dict[str, dict[str, Any]]:
        if not any(character in path for character in magic):
            return {path: filesystem.info(path)}
        found = cast("dict[str, dict[str, Any]]", filesystem.glob(path, detail=True))
        # A web server's index tells names alone.
        return {
            name: info if info.get("size") is not None else filesystem.info(name)
            for name, info in found.items()
        }

    try:
        found = _persistent(ask, pattern, "cannot be listed")
    except FileNotFoundError:
        return []
    return [
        (str(filesystem.unstrip_protocol(name)), _state(info))
        for name, info in sorted(found.items())
    ]


def remote_state(location: str) -> State:
    """A file's state now, asked again. Raises: UserError."""
    filesystem, path = _filesystem(location)

    def ask() -> State:
        filesystem.invalidate_cache()
        return _state(filesystem.info(path))

    return _persistent(ask, location, "does not report its size")


class RemoteStream:
    """A remote file's bytes, front to back. A read that breaks off continues where it was.

    `state`: as listed. Raises, when reading: UserError where the file has changed since, or stays
    out of reach.
    """

    def __init__(self, location: str, state: State) -> None:
        self.location, self.state = location, state
        self._filesystem, self._path = _filesystem(location)
        self._stream: IO[bytes] | None = None
        self._position = 0
        self._ranges, self._broke = True, False

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""
        content = _persistent(
            lambda: self._attempt(size), self.location, f"broke off at byte {self._position}"
        )
        self._position += len(content)
        return content

    def close(self) -> None:
        """Close the connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _attempt(self, size: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self._opened_at(self._position)
            content = self._stream.read(size)
            if not content and self._position < self.state[0]:
                raise OSError(f"ended after {self._position} of {self.state[0]} bytes")
            return content
        except Exception as error:
            self._stream, self._broke = None, True  # closing what is broken may fail too
            if self._ranges and "range requests" in str(error):  # fsspec's word for such servers
                self._ranges = False
                return self._attempt(size)
            raise

    def _opened_at(self, position: int) -> IO[bytes]:
        if self._broke and (now := remote_state(self.location)) != self.state:
            raise changed_error(self.location, self.state, now)
        # A block size of 0 asks for one long answer in place of a range at a time.
        options = {} if self._ranges else {"block_size": 0}
        stream = cast("IO[bytes]", self._filesystem.open(self._path, "rb", **options))
        if position and self._ranges and stream.seekable():
            stream.seek(position)
            return stream
        while position:
            skipped = len(stream.read(min(position, 1 << 20)))
            if not skipped:
                raise OSError("ended before the byte at which it broke off")
            position -= skipped
        return stream


def without_secrets(location: str) -> str:
    """The address as logs and metrics may show it: no user, no password, no query."""
    parts = urlsplit(location)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def changed_error(location: str, old: State, new: State) -> UserError:
    """A file that is not the one that was listed."""
    sizes = f"{old[0]} to {new[0]} bytes" if old[0] != new[0] else f"still {new[0]} bytes"
    return UserError(
        location, None, f"changed while being read ({sizes}); run again when it is complete"
    )


def _persistent(attempt: Callable[[], _T], location: str, what: str) -> _T:
    """The attempt's result, after as many pauses as it takes. Each is told in a line of the log.

    Raises: UserError at the last failure, or at once where more attempts would end the same;
    FileNotFoundError of what is not there.
    """
    failed: float | None = None
    for number, pause in enumerate((*PAUSES_SECONDS, None), 1):
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:  # each store has its own kinds of error
            fault: BaseException = error
            if isinstance(error, FileNotFoundError):
                # fsspec says so of a web server that cannot be reached, too, and of what the hub
                # shows to nobody without a token: its cause tells.
                fault = error.__cause__ or error
                may_be_there = _module(fault).startswith("aiohttp") or _status(fault) == 401
                if not may_be_there or _status(fault) in (404, 410):
                    raise
            reason = str(fault) or type(fault).__name__
            remedy = _credentials_remedy(fault, location)
            refused = isinstance(fault, PermissionError | IsADirectoryError)
            # Of a store's 403, gcsfs makes an OSError that says no more.
            forbidden = refused or _is_final(_status(fault)) or reason.startswith("Forbidden: ")
            if remedy or forbidden:
                raise UserError(location, None, f"cannot be read ({reason}){remedy}") from None
            failed = time.monotonic() if failed is None else failed
            if pause is None or time.monotonic() + pause > failed + WAIT_SECONDS:
                raise UserError(
                    location,
                    None,
                    f"{what} ({reason}), {counted(number, 'time')}; the same command "
                    "continues once it is reachable: finished files are kept",
                ) from None
            _tell_pause(location, what, reason, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


def _tell_pause(location: str, what: str, reason: str, pause: float) -> None:
    line = UserError(_shown(location), None, f"{what} ({_shown(reason)})")
    log.warning("%s; trying again in %g s", line, pause)


def _shown(text: str) -> str:
    """A text in which web addresses are as a log may show them, whoever wrote them into it."""
    return _WEB_ADDRESS.sub(lambda found: without_secrets(found[0]), text)


def _credentials_remedy(error: BaseException, location: str) -> str:
    """What to do where the fault is that there are no credentials; else nothing."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    lacking = _module(error).startswith("botocore") and kinds & _NO_CREDENTIALS
    # Google's store and the hub are asked without any where there are none.
    if lacking or _status(error) == 401:
        remedy = _CREDENTIALS.get(_protocol(location), "")
        return f"; {remedy}" if remedy else ""
    return ""


def _module(error: BaseException) -> str:
    return type(error).__module__


def _status(error: BaseException) -> int:
    """A web server's answer, 0 where it gave none."""
    response = getattr(error, "response", None)  # the hub's errors keep it there
    # gcsfs calls it `code`.
    status = getattr(error, "status", getattr(error, "code", getattr(response, "status_code", 0)))
    return status if isinstance(status, int) else 0


def _is_final(status: int) -> bool:
    # Of those that name a client's fault, another attempt may change three.
    return 400 <= status < 500 and status not in (408, 425, 429)


def _state(info: dict[str, Any]) -> State:
    mark = next((str(info[key]) for key in _MARKS if info.get(key)), "")
    return int(info.get("size") or 0), mark


def _protocol(location: str) -> str:
    return location.partition("://")[0].rpartition("::")[2].lower()


def _filesystem(location: str) -> tuple[Any, str]:
    with _readable(location) as protocol:
        import fsspec

        if protocol in ("gs", "gcs") and "GCSFS_DEBUG" not in os.environ:
            # It logs each failure that it also raises, with a traceback, and how it sees a bucket.
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(location))


@contextmanager
def _readable(location: str) -> Iterator[str]:
    """For what finds the package that reads `location`. Yields the protocol. Raises: UserError."""
    protocol = _protocol(location)
    try:
        yield protocol
    except ImportError:
        package = _PACKAGES.get(protocol, f"that fsspec needs for {protocol}")
        raise UserError(location, None, f"needs the package {package}; {EXTRA}") from None
    except ValueError:
        raise UserError(
            location, None, f"{protocol}:// is not supported; give a path, s3, gs, hf or https"
        ) from None
