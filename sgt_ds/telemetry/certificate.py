"""The TLS certificate of the exporters, reloaded when one of its files changes."""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path

from sgt_ds.errors import UserError, refusal

log = logging.getLogger(__name__)


def check_pem(file: Path, field: str) -> None:
    """Raises: UserError where it can't be read: of a pair, OpenSSL does not say which file is missing.

    `field`: the key or flag that names it.
    """
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError(file, field, refusal(error, "read", "give a PEM file")) from None


class Certificate:
    """A certificate, its key and the authority that clients must be signed by, if any."""

    def __init__(self, certificate: Path, private_key: Path, client_ca: Path | None) -> None:
        """Raises: UserError where a file cannot be loaded."""
        self._certificate, self._private_key = certificate, private_key
        self._client_ca = client_ca
        self._loaded = self._written()
        self._context = self._load()

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Speak TLS on an accepted connection; the handshake comes with the first read."""
        written = self._written()
        if written != self._loaded:
            self._loaded = written
            try:
                self._context = self._load()
                log.info("telemetry: certificate %s reloaded", self._certificate)
            except UserError as error:
                log.warning("telemetry: new certificate not usable, keeping the old one: %s", error)
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def _load(self) -> ssl.SSLContext:
        check_pem(self._certificate, "telemetry.certificate")
        check_pem(self._private_key, "telemetry.private_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as error:  # ssl.SSLError is one
                raise UserError(
                    self._client_ca,
                    "telemetry.client_ca",
                    refusal(error, "loaded", "give a PEM file"),
                ) from None
        try:
            # An empty password makes an encrypted key fail; without one OpenSSL asks a terminal.
            context.load_cert_chain(self._certificate, self._private_key, password=lambda: "")
        except OSError as error:
            raise UserError(
                self._certificate,
                "telemetry.certificate",
                f"cannot be loaded with {self._private_key} ({error}); "
                "give a PEM pair without password",
            ) from None
        return context

    def _written(self) -> tuple[float, ...]:
        files = (self._certificate, self._private_key, self._client_ca)
        try:
            return tuple(file.stat().st_mtime for file in files if file is not None)
        except OSError:
            # Being replaced, or gone: loading says so at start, later the old one stays.
            return ()
