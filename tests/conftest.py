"""What several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sgt_ds.ports import free_ports

if TYPE_CHECKING:
    from forked import Nursery

# One test process on a small machine: leave a core to the processes that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start training runs come first, so that none is left alone at the end."""

    def starts_runs(item: pytest.Item) -> bool:
        launched = item.get_closest_marker("launcher") is not None
        return launched or "nursery" in getattr(item, "fixturenames", ())

    long_files = {item.path for item in items if starts_runs(item)}
    items.sort(key=lambda item: item.path not in long_files)


@pytest.fixture(autouse=True)
def every_run_replays(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Whatever a test does to a run: its journal leads to its own decisions."""
    yield
    if request.node.get_closest_marker("launcher") is None:
        return
    from runs import check_replay

    for journal in tmp_path.rglob("growth.jsonl"):
        check_replay(journal.parent, ended=False)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks ranks of real runs, for tests that start many."""
    from forked import Nursery

    with Nursery() as started:
        yield started


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A boto3 client of moto's server, which speaks S3 over HTTP, with a bucket `shelf`."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("flask_cors")
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # A file system that an earlier test has used would still ask that test's server.
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="shelf")
    yield client
    server.stop()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A gcsfs on an emulator that speaks Google's API over HTTP, with a bucket `shelf`."""
    gcsfs = pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    port = free_ports()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # no look for a cloud's metadata
    gcsfs.GCSFileSystem.clear_instance_cache()
    with emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="shelf"):
        yield gcsfs.GCSFileSystem()
