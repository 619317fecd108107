"""Exporters over TLS: who is served, and `sgt-ds top` among them."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
import yaml
from exporters import Start, exporters, record, scrape

from sgt_ds.cli import main
from sgt_ds.config import RunConfig, TelemetryConfig, dump_run_config
from sgt_ds.errors import UserError
from sgt_ds.ports import free_ports
from sgt_ds.telemetry import Exporter, own_target


@pytest.fixture
def start() -> Iterator[Start]:
    with exporters() as start_one:
        yield start_one


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, a server's and a client's certificate, and a stranger's."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is missing; run tests/install_services.sh")
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    def authority_of(name: str) -> None:
        run(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}-key.pem", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,digitalSignature"),
        )

    authority_of("ca")
    authority_of("stranger")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "renewed", "client"):
        run(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}-key.pem", "-out", f"{name}.csr"),
        )
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem"),
            *("-CAcreateserial", "-days", "2", "-extfile", "san", "-out", f"{name}.pem"),
        )
    return folder


def tls_subject(exporter: Exporter, folder: Path, client: str | None) -> str:
    """Scrape over TLS; returns the common name of the server's certificate."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}-key.pem")
    with (
        socket.create_connection(("127.0.0.1", exporter.port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as tls,
    ):
        subject = tls.getpeercert()
        tls.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b""
        while piece := tls.recv(65536):
            answer += piece
        assert b"sgt_run_info" in answer
    assert subject is not None
    return str(dict(pair for (pair,) in subject["subject"])["commonName"])  # type: ignore[misc]


def test_tls_serves_only_clients_that_the_ca_signed(start: Start, authority: Path) -> None:
    own = shutil.copy(authority / "server.pem", authority / "current.pem")
    key = shutil.copy(authority / "server-key.pem", authority / "current-key.pem")
    config = TelemetryConfig(
        port=free_ports(), certificate=own, private_key=key, client_ca=authority / "ca.pem"
    )
    exporter = start(config)
    # One that connects and never shakes hands must not keep the others out.
    with socket.create_connection(("127.0.0.1", exporter.port)):
        assert tls_subject(exporter, authority, "client") == "server"
        for stranger in (None, "stranger"):
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
                tls_subject(exporter, authority, stranger)
        with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
            scrape(exporter)  # plain HTTP
        # A certificate that is renewed on disk is served without a restart.
        shutil.copy(authority / "renewed.pem", own)
        shutil.copy(authority / "renewed-key.pem", key)
        assert tls_subject(exporter, authority, "client") == "renewed"


def test_a_certificate_that_does_not_load_is_one_clear_error(
    start: Start, authority: Path, tmp_path: Path
) -> None:
    wrong_key = authority / "client-key.pem"
    config = TelemetryConfig(
        port=free_ports(), certificate=authority / "server.pem", private_key=wrong_key
    )
    with pytest.raises(UserError, match=r"telemetry\.certificate"):
        start(config)
    whole = config.model_copy(update={"private_key": authority / "server-key.pem"})
    gone = tmp_path / "absent"
    with pytest.raises(UserError, match=r"telemetry\.client_ca"):
        start(whole.model_copy(update={"client_ca": gone}))
    for key in ("certificate", "private_key"):
        with pytest.raises(UserError) as caught:
            start(whole.model_copy(update={key: gone}))
        told = str(caught.value)
        assert (
            told
            == f"{gone}: telemetry.{key}: cannot be read (No such file or directory); give a PEM file"
        )


@pytest.fixture
def guarded(start: Start, authority: Path, tmp_path: Path) -> TelemetryConfig:
    """A rank 0 that serves only clients with a certificate, a name and a password."""
    (tmp_path / "password").write_text("correct horse\n")
    config = TelemetryConfig(
        port=free_ports(),
        certificate=authority / "server.pem",
        private_key=authority / "server-key.pem",
        client_ca=authority / "ca.pem",
        username="prometheus",
        password_file=tmp_path / "password",
    )
    exporter = start(config)
    exporter.publish(record(7))
    exporter.observe_step(7, 0.1)
    exporter.serve_targets([own_target("127.0.0.1", config.port, run="r", rank=0)])
    return config


def test_top_cannot_read_what_prometheus_can(
    guarded: TelemetryConfig, authority: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--cert", str(authority / "client.pem"), "--key", str(authority / "client-key.pem")]
    name = ["--user", "prometheus", "--password-file", str(guarded.password_file)]
    ca = ["--ca-file", str(authority / "ca.pem")]
    where = f"127.0.0.1:{guarded.port}"
    assert main(["top", where, "--once", *ca, *own, *name]) == 0
    out = capsys.readouterr().out
    assert out.startswith("r  sgt  growing  (running)\nstep 7")
    assert "ranks 1  1 answer  step 7" in out
    for flags, told in (
        ([*ca, *own], "give its --user and --password-file"),
        ([*own, *name], "give the authority that signed it as --ca-file"),
        ([*ca, *name], "a client certificate"),
        ([*ca, *own[:2], *name], "--cert: cannot be loaded with no --key"),
        ([*ca, *own[:3], "gone", *name], "gone: --key: cannot be read (No such file"),
        (["--ca-file", str(guarded.password_file)], "--ca-file: cannot be loaded"),
        (["--user", "prometheus"], "--user: requires --password-file"),
    ):
        assert main(["top", f"https://{where}", "--once", *flags]) == 2
        err = capsys.readouterr().err
        assert told in err, (flags, err)
        assert err.count("\n") == 1


def test_top_on_a_run_directory_is_not_told_how_its_own_exporters_are_asked(
    guarded: TelemetryConfig,
    authority: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = yaml.safe_load(runs.write_run(tmp_path / "run.yaml", tmp_path).read_text())
    folder = tmp_path / "run"
    folder.mkdir()
    config = RunConfig.model_validate({**values, "run_dir": folder, "telemetry": guarded})
    (folder / "run.yaml").write_text(dump_run_config(config))
    (folder / "metrics.jsonl").write_text(json.dumps(record(7).as_metrics_row()) + "\n")
    group = own_target("localhost", guarded.port, run="r", rank=0)  # no name of the certificate's
    (folder / "targets.json").write_text(json.dumps([group]))
    own = ["--cert", str(authority / "client.pem"), "--key", str(authority / "client-key.pem")]
    assert main(["top", str(folder), "--once", *own]) == 0
    assert "ranks 1  1 answer  step 7" in capsys.readouterr().out
    assert main(["top", str(folder), "--once"]) == 0
    assert "ranks 1  0 answer" in capsys.readouterr().out
