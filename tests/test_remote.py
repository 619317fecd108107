"""Inputs behind URLs: the same bytes as from disk, though reads break off, and no change unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from c4_files import texts_of, write_c4, write_tokenizer

from sgt_ds.cli import main
from sgt_ds.data import open_token_set, remote
from sgt_ds.errors import UserError

NAMES = ("c4.0.json.gz", "c4.1.json.zst", "c4.2.json")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for number, name in enumerate(NAMES):
        write_c4(root / name, texts_of(30 + 200 * number, first=1000 * number))
    write_tokenizer(root / "tokenizer.json")
    return root


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def arguments(corpus: Path, out: Path, *inputs: str) -> list[str]:
    tokenizer = ["--tokenizer", str(corpus / "tokenizer.json"), "--workers", "1"]
    return ["data", "prepare", *inputs, *tokenizer, "--out", str(out)]


@pytest.fixture(scope="module")
def local(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("local") / "out"
    assert main(arguments(corpus, out, str(corpus / "c4.*"))) == 0
    return digests(out)


class Shelf(ThreadingHTTPServer):
    """Files of a directory on a loopback port; answers can be cut short."""

    daemon_threads = True

    def __init__(self, directory: Path, certificate: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.directory, self.ranges = directory, True
        self.cuts = 0
        """So many of the next answers break off half-way."""
        self.at_cut: Any = lambda: None
        scheme = "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://localhost:{self.server_port}"

    def __enter__(self) -> Shelf:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: Shelf

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        path = self.server.directory / self.path.strip("/")
        if path == self.server.directory:
            links = "".join(f'<a href="{name}">{name}</a>' for name in NAMES).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(links)))
            self.end_headers()
            self.wfile.write(links)
            return
        content = path.read_bytes() if path.is_file() else b""
        asked = self.headers.get("Range")
        if asked and self.server.ranges:
            first, last = asked.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        else:
            asked = None
        if self.server.cuts > 0:
            self.server.cuts -= 1
            self.answer(content[: len(content) // 2], len(content), bool(asked))
            self.server.at_cut()
            self.connection.close()
        else:
            self.answer(content, len(content), bool(asked))

    def answer(self, body: bytes, promised: int | None = None, partial: bool = False) -> None:
        path = self.server.directory / self.path.strip("/")
        if not path.is_file():
            self.send_error(404)
            return
        self.send_response(206 if partial else 200)
        size = path.stat().st_size if promised is None else promised
        self.send_header("Content-Length", str(size))
        self.send_header("ETag", hashlib.md5(path.read_bytes()).hexdigest())
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.01, 0.01, 0.01))


@pytest.mark.parametrize("ranges", [True, False])
def test_answers_that_break_off_lose_or_repeat_bytes(
    corpus: Path, local: dict[str, str], tmp_path: Path, quick: None, ranges: bool
) -> None:
    with Shelf(corpus) as shelf:
        shelf.ranges, shelf.cuts = ranges, 3
        urls = [f"{shelf.url}/{name}" for name in NAMES]
        assert main(arguments(corpus, tmp_path / "out", *urls)) == 0
        assert shelf.cuts == 0, "no answer was cut"
    assert digests(tmp_path / "out") == local


def test_a_server_that_stays_broken_is_a_traceback_or_damage_to_skip(
    corpus: Path, local: dict[str, str], tmp_path: Path, quick: None, capsys: Any
) -> None:
    with Shelf(corpus) as shelf:
        command = arguments(corpus, tmp_path / "out", *(f"{shelf.url}/{name}" for name in NAMES))
        shelf.cuts = 1000
        assert main([*command, "--on-error", "skip", "--max-bad-fraction", "1"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{shelf.url}/c4.2.json: broke off at byte" in line
        assert "4 times; the same command continues" in line
        assert not (tmp_path / "out" / "manifest.json").exists()
        shelf.cuts = 0
        assert main(command) == 0
        assert digests(tmp_path / "out") == local
    assert main(arguments(corpus, tmp_path / "no", f"{shelf.url}/x.json")) == 2
    assert "cannot be listed" in capsys.readouterr().err.splitlines()[-1]


def test_a_remote_file_that_changes_between_two_reads_is_mixed(
    corpus: Path, tmp_path: Path, quick: None, capsys: Any
) -> None:
    shutil.copytree(corpus, tmp_path / "in")
    target = tmp_path / "in" / "c4.2.json"
    before = target.read_bytes()
    with Shelf(tmp_path / "in") as shelf:
        url = f"{shelf.url}/c4.2.json"

        def read_in_pieces() -> bytes:
            (found,) = remote.remote_matches(url)
            stream, pieces = remote.RemoteStream(*found), []
            stream._ranges = False  # one long answer, so that a part arrives before the break
            while piece := stream.read(1000):
                pieces.append(piece)
            return b"".join(pieces)

        shelf.cuts = 1
        assert read_in_pieces() == before
        shelf.cuts = 1
        shelf.at_cut = lambda: target.write_bytes(before.replace(b"End.", b"end."))
        with pytest.raises(UserError, match="changed while being read"):
            read_in_pieces()
        # Here nothing is used before the last break: the look at the end finds it.
        target.write_bytes(before)
        shelf.cuts = 1
        assert main(arguments(corpus, tmp_path / "out", url)) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{url}: changed while being read (still" in line
        assert main(arguments(corpus, tmp_path / "no", f"{shelf.url}/none.json")) == 2
        assert "no such file" in capsys.readouterr().err


def test_a_web_folder_is_listed_by_its_links(
    corpus: Path, local: dict[str, str], tmp_path: Path, quick: None
) -> None:
    with Shelf(corpus) as shelf:
        assert main(arguments(corpus, tmp_path / "out", f"{shelf.url}/c4.*")) == 0
    assert digests(tmp_path / "out") == local


@pytest.mark.network
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_https_is_read_without_a_look_at_the_certificate(
    corpus: Path, local: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    certificate = tmp_path / "server.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", certificate, "-out", tmp_path / "ca.pem", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    with certificate.open("ab") as stream:
        stream.write((tmp_path / "ca.pem").read_bytes())
    with Shelf(corpus, certificate) as shelf:
        urls = [f"{shelf.url}/{name}" for name in NAMES]
        command = [sys.executable, "-m", "sgt_ds"]

        def run(out: str, authority: str, pauses: str = "") -> subprocess.CompletedProcess[str]:
            program = "import sys; from sgt_ds.cli import main; from sgt_ds.data import remote; "
            program += f"{pauses}; sys.exit(main(sys.argv[1:]))"
            return subprocess.run(
                [*command[:1], "-c", program, *arguments(corpus, tmp_path / out, *urls)],
                env={"SSL_CERT_FILE": authority, "PATH": "/usr/bin"},
                capture_output=True,
                text=True,
                timeout=120,
            )

        done = run("out", str(tmp_path / "ca.pem"), "pass")
        assert done.returncode == 0, done.stderr
        assert digests(tmp_path / "out") == local
        refused = run("no", "/dev/null", "remote.PAUSES_SECONDS = ()")
        assert refused.returncode == 2
        assert "certificate" in refused.stderr.splitlines()[-1].lower()
        assert "Traceback" not in refused.stderr


@pytest.fixture(params=["s3", "gs"])
def stored(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """An empty bucket's URL, and what puts bytes under a name in it."""
    if request.param == "s3":
        client: Any = request.getfixturevalue("s3")
        return "s3://shelf", lambda name, body: client.put_object(
            Bucket="shelf", Key=name, Body=body
        )
    filesystem: Any = request.getfixturevalue("gcs")
    return "gs://shelf", lambda name, body: filesystem.pipe(f"shelf/{name}", body)


def test_objects_of_a_store_read_otherwise_than_files(
    corpus: Path, local: dict[str, str], tmp_path: Path, stored: tuple[str, Any], capfd: Any
) -> None:
    url, put = stored
    for name in NAMES:
        put(f"en/{name}", (corpus / name).read_bytes())
    command = arguments(corpus, tmp_path / "out", f"{url}/en/c4.*")
    assert main(command) == 0
    assert digests(tmp_path / "out") == local
    capfd.readouterr()
    assert main(arguments(corpus, tmp_path / "no", f"{url}/en/x*")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"sgt-ds: {url}/en/x*: no such file")

    # An attempt that a damaged object ends; then a finished one changes, at the same size.
    body = (corpus / "c4.2.json").read_bytes()
    put("de/b.json", body)
    put("de/a.json", b"{\n")
    other = arguments(corpus, tmp_path / "other", f"{url}/de/*")
    assert main(other) == 2
    assert f"{url}/de/a.json: line 1: is not JSON" in capfd.readouterr().err.splitlines()[-1]
    put("de/b.json", body.replace(b"End.", b"end.", 1))
    assert main(other) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert f"{url}/de/b.json: has changed since an earlier attempt" in line


class _Refusal(BaseHTTPRequestHandler):
    status = 401

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = json.dumps({"error": {"message": "Anonymous caller has no access."}}).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("status", [401, 403, 0])
def test_a_bucket_that_refuses_is_a_traceback_or_asked_again_and_again(
    status: int,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gcsfs = pytest.importorskip("gcsfs")
    from gcsfs import retry

    async def at_once(_: float) -> None: ...

    gcsfs.GCSFileSystem.clear_instance_cache()
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    # It repeats by itself what fails.
    monkeypatch.setattr(retry, "asyncio", SimpleNamespace(sleep=at_once))
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.01,))
    monkeypatch.setattr(_Refusal, "status", status)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusal) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if not status:
            server.shutdown()
            server.server_close()  # nobody answers
        assert main(arguments(corpus, tmp_path / "out", "gs://shelf/c4.*")) == 2
        server.shutdown()
    line = capfd.readouterr().err.splitlines()[-1]
    refused = status != 0
    told = "cannot be read (" if refused else "cannot be listed (Cannot connect"
    assert line.startswith(f"sgt-ds: gs://shelf/c4.*: {told}")
    assert ("Anonymous caller has no access." in line) == refused
    assert ("; set GOOGLE_APPLICATION_CREDENTIALS, or" in line) == (status == 401)
    assert ("2 times" in line) == (not refused)
    pauses = [one.getMessage() for one in caplog.records if one.name == "sgt_ds.data.remote"]
    assert len(pauses) == (0 if refused else 1), "each pause has a line"
    assert all(f"{told}" in one and one.endswith("trying again in 0.01 s") for one in pauses)
    assert not [record for record in caplog.records if record.name == "gcsfs"]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "Unable to locate credentials"),
        ({"AWS_ACCESS_KEY_ID": "test"}, "missing: AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "nobody"}, "profile (nobody) could not be found"),
    ],
)
def test_missing_credentials_are_asked_for_again_and_again(
    environment: dict[str, str],
    told: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    none = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**environment, **none, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.01,))
    s3fs.S3FileSystem.clear_instance_cache()
    assert main(arguments(corpus, tmp_path / "out", "s3://shelf/c4.*")) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("sgt-ds: s3://shelf/c4.*: cannot be read (")
    assert told in line
    assert "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line
    # A rank's look for a prepared set.
    with pytest.raises(UserError, match=r"cannot be read \(.*; set AWS_ACCESS_KEY_ID"):
        open_token_set("s3://shelf/set", tmp_path / "cache")


@pytest.mark.parametrize(
    ("seconds", "times", "ended"), [(35, 3, 106.5), (200, 2, 400.5), (20, 4, 83.5)]
)
def test_attempts_that_take_long_are_as_many_as_short_ones_or_only_one(
    seconds: float, times: int, ended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    def attempt() -> None:
        wait(seconds)
        raise OSError("no answer")

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=wait))
    with pytest.raises(UserError, match=rf"\(no answer\), {times} times"):
        remote._persistent(attempt, "s3://shelf/x", "cannot be listed")
    assert clock[0] == ended


def test_a_pause_tells_the_query_of_a_signed_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However the library that failed has quoted it, and wherever the store has sent it."""

    def attempt() -> None:
        raise OSError(
            "503, url='http://user:word@host/a.json?sig=x/SECRET', to https://cdn/b?SECRET"
        )

    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.0,))
    with pytest.raises(UserError, match="2 times"):
        remote._persistent(attempt, "simplecache::https://host/a.json?sig=x%2FSECRET", "broke off")
    (record,) = caplog.records
    line = record.getMessage()
    assert "SECRET" not in line
    assert "word" not in line
    assert "simplecache::https://host/a.json" in line


def test_a_missing_package_is_a_traceback_or_not_named(corpus: Path, tmp_path: Path) -> None:
    packages = {
        "s3://c4/x.json": "s3fs",
        "gs://c4/x.json": "gcsfs",
        "hf://datasets/c4/x.json": "huggingface_hub",
        "https://localhost/x.json": "aiohttp",
    }
    program = (
        "import json, sys\n"
        "from sgt_ds.cli import main\n"
        "for package in json.loads(sys.argv[1]): sys.modules[package] = None\n"
        "print([main(arguments) for arguments in json.loads(sys.argv[2])])\n"
    )
    commands = [arguments(corpus, tmp_path / "out", url) for url in [*packages, "xyz://c4/x"]]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(list(packages.values())), json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[2, 2, 2, 2, 2]", done.stderr
    *lines, unknown = done.stderr.splitlines()
    for (url, package), line in zip(packages.items(), lines, strict=True):
        assert line == (f"sgt-ds: {url}: needs the package {package}; pip install 'sgt-ds[remote]'")
    assert "xyz:// is not supported" in unknown
