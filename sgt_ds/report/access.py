"""How exporters are queried: over TLS, with a client certificate, with user name and password."""

from __future__ import annotations

import base64
import http.client
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from sgt_ds.config import RunLayout, load_run_config
from sgt_ds.errors import SgtError, UserError
from sgt_ds.telemetry import check_pem, read_password


class NoAnswer(SgtError):
    """No exporter answered; the text says why, and what to give where it asked for something."""


@dataclass(frozen=True)
class Access:
    """What exporters ask for. Without anything it is plain HTTP."""

    ca_file: Path | None = None
    """PEM authority that signed the exporters' certificates; None trusts the system's."""
    certificate: Path | None = None
    """PEM certificate of the one who asks, where exporters want one."""
    private_key: Path | None = None
    """PEM key of that certificate."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    pinned: bool = False
    """Whether `ca_file` is the exporters' own certificate, whatever host it names."""

    @property
    def is_tls(self) -> bool:
        """Whether anything was given that goes with TLS only."""
        return self.ca_file is not None or self.certificate is not None

    def fetch(self, url: str, timeout_seconds: float) -> str:
        """The text at `url`. Raises: NoAnswer; UserError where a file given is not usable."""
        request = urllib.request.Request(url)
        if self.username is not None:
            pair = base64.b64encode(f"{self.username}:{self.password or ''}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {pair}")
        context = self._context if url.startswith("https:") else None
        try:
            # No proxy: exporters are this network's, and a password is theirs alone.
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            )
            with opener.open(request, timeout=timeout_seconds) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            wants = "; give its --user and --password-file" if error.code == 401 else ""
            raise NoAnswer(f"{error}{wants}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise NoAnswer(f"{reason}{_wanted(reason)}") from None

    @cached_property
    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise UserError(
                self.ca_file or "TLS", "--ca-file", f"cannot be loaded ({error}); give a PEM file"
            ) from None
        if self.pinned:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self.certificate is not None:
            check_pem(self.certificate, "--cert")
            if self.private_key is not None:
                check_pem(self.private_key, "--key")
            try:
                # An empty password makes an encrypted key fail; else OpenSSL asks the terminal.
                context.load_cert_chain(self.certificate, self.private_key, password=lambda: "")
            except OSError as error:
                raise UserError(
                    self.certificate,
                    "--cert",
                    f"cannot be loaded with {self.private_key or 'no --key'} ({error}); "
                    "give a PEM pair without password",
                ) from None
        return context


def access_of_run(given: Access, run_dir: Path) -> tuple[str, Access]:
    """The scheme of a run's exporters, and `given` filled up by what its run.yaml tells.

    The certificate that it serves is trusted as it is there; a client's own is reported nowhere.
    """
    try:
        telemetry = load_run_config(RunLayout(run_dir).config).telemetry
    except SgtError:  # not written yet, or of another version: the files show what they can
        return "https" if given.is_tls else "http", given
    filled, served = given, telemetry.certificate
    if served is not None and served.is_file() and given.ca_file is None:
        filled = replace(filled, ca_file=served, pinned=True)
    if telemetry.username is not None and given.username is None:
        file, password = telemetry.password_file, None
        with suppress(OSError, ValueError):  # not this viewer's to read: exporters will say so
            password = None if file is None else read_password(file)
        filled = replace(filled, username=telemetry.username, password=password or given.password)
    return "http" if served is None else "https", filled


def _wanted(reason: object) -> str:
    """The flag that answers what TLS complained about."""
    text = str(reason).lower()
    if "certificate_verify_failed" in text or "certificate verify failed" in text:
        return "; give the authority that signed it as --ca-file"
    if "certificate required" in text or "certificate_required" in text:
        return "; give a client certificate with --cert and --key"
    if "eof occurred" in text or "connection reset" in text:
        # A server that wants one closes after the handshake; its alert may be lost in that.
        return "; if the exporter requires a client certificate, give --cert and --key"
    return ""
