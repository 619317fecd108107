"""User name and password for scrapers, HTTP basic authentication. Knows no server."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
from pathlib import Path

from pydantic import SecretStr

from sgt_ds.errors import UserError, refusal

log = logging.getLogger(__name__)


class Credentials:
    """One name and its password; from a file, that is read again when it changes."""

    def __init__(self, username: str, password: SecretStr | None, file: Path | None) -> None:
        """Raises: UserError where the password is missing, empty or only its asterisks."""
        self._username, self._file = username, file
        self._read = self._written()
        if file is not None:
            try:
                self._password = read_password(file)
            except (OSError, ValueError) as error:
                message = refusal(error, "read", "give a text file")
                raise UserError(file, "telemetry.password_file", message) from None
        else:
            self._password = "" if password is None else password.get_secret_value()
        where = "telemetry.password" if file is None else "telemetry.password_file"
        if not self._password.strip("*"):
            raise UserError(
                file or "the configuration",
                where,
                "contains no password (run.yaml shows asterisks instead); give it again",
            )

    def accept(self, authorization: str) -> bool:
        """Whether a request's Authorization header holds them."""
        scheme, _, encoded = authorization.partition(" ")
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            return False
        self._reread()
        wanted = f"{self._username}:{self._password}".encode()
        return scheme.lower() == "basic" and hmac.compare_digest(given, wanted)

    def _reread(self) -> None:
        written = self._written()
        if self._file is None or written is None or written == self._read:
            return
        try:
            password = read_password(self._file)
        except (OSError, ValueError) as error:
            log.warning(
                "telemetry: %s not readable, keeping the old password: %s", self._file, error
            )
            return
        if password:
            self._password, self._read = password, written
            log.info("telemetry: password in %s reloaded", self._file)

    def _written(self) -> float | None:
        try:
            return None if self._file is None else self._file.stat().st_mtime
        except OSError:
            return None


def read_password(file: Path) -> str:
    """A password: the first line of its file. Raises: OSError, ValueError."""
    return (file.read_text(encoding="utf-8").splitlines() or [""])[0].strip()
