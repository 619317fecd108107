"""What tests fetch: a fault of what is asked for is no skip, and nothing is left behind.

Against an index of its own, of folders: `tqdm` as a wheel, and a package as source.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pip_fetches import PROBE, pip_or_skip, run_whole
from source_code import source_of

from sgt_ds.ports import free_ports

PACKAGE = "some-source"
NAME = "some_source-1.0"
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"
# It needs nothing to be built, and tells pip its version.
BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder, "{NAME}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text({METADATA.format(PACKAGE)!r})
    return info.name
"""
FILES = {
    "PKG-INFO": METADATA.format(PACKAGE),
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": BACKEND,
    "tests/one.py": "one",
    "tests/two.py": "two",
    "left/out.py": "",
}


def write_wheel(path: Path, package: str) -> None:
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", METADATA.format(package))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def write_source(path: Path) -> None:
    with tarfile.open(path, "w:gz") as packed:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"{NAME}/{name}")
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index that pip asks, whatever this machine's pip is set to."""
    simple = tmp_path / "simple"
    for package, file in ((PROBE, f"{PROBE}-1.0-py3-none-any.whl"), (PACKAGE, f"{NAME}.tar.gz")):
        folder = simple / package
        folder.mkdir(parents=True)
        (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{file}">{file}</a>')
    write_wheel(simple / PROBE / f"{PROBE}-1.0-py3-none-any.whl", PROBE)
    write_source(simple / PACKAGE / f"{NAME}.tar.gz")
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", simple.as_uri())
    return simple


class Config:
    """What is asked of pytest's: a cache, or none under `-p no:cacheprovider`."""

    def __init__(self, folder: Path | None) -> None:
        self.cleanups: list[Any] = []
        self.add_cleanup = self.cleanups.append
        if folder is not None:
            self.cache, self._folder = self, folder

    def mkdir(self, name: str) -> Path:
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        return self._folder / name


def fetch(parts: tuple[str, ...], config: Any, version: str = "1.0") -> Path:
    return source_of(PACKAGE, version, parts, config)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([f"{PROBE}==999"], "No matching distribution found for tqdm==999"),
        ([f"{PROBE}==1.0", f"{PROBE}==2.0"], "(?i)no matching|resolution"),
        (["--no-such-option"], "no such option"),
    ],
)
def test_a_fault_of_what_is_asked_for_is_skipped(
    asked: list[str], said: str, tmp_path: Path
) -> None:
    arguments = ["download", "--quiet", "--no-deps", "-d", str(tmp_path / "out"), *asked]
    with pytest.raises(pytest.fail.Exception, match=said):
        pip_or_skip(arguments, "it")


def test_an_index_that_cannot_be_reached_fails_a_test(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a folder beside it holds what the probe asks for."""
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_ports()}/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / PROBE))
    monkeypatch.setenv("PIP_RETRIES", "0")
    arguments = ["download", "--quiet", "--no-deps", "-d", str(tmp_path / "out"), f"{PROBE}==999"]
    with pytest.raises(pytest.skip.Exception, match=r"No matching.*no package index"):
        pip_or_skip(arguments, "it")
    pip_or_skip([*arguments[:-1], PROBE], "it")


@pytest.mark.usefixtures("index")
def test_a_fetch_over_its_time_is_an_error_of_python() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"took more than 0\.01 s"):
        pip_or_skip(["--version"], "it", timeout=0.01)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_command_over_its_time_leaves_what_it_started(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sh` that waits for another process, as fresh_venv.sh for pip."""
    script = 'echo one; sleep 60 & echo $! >"$1"; wait'
    if interrupted:

        def communicate(self: object, **_: object) -> tuple[str, str]:
            time.sleep(0.5)
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
        with pytest.raises(KeyboardInterrupt):
            run_whole(["sh", "-c", script, "sh", str(tmp_path / "pid")], timeout=0.5)
    else:
        done = run_whole(["sh", "-c", script, "sh", str(tmp_path / "pid")], timeout=0.5)
        assert (done.returncode, done.stdout) == (-9, "one\n")
        assert done.stderr.splitlines()[-1] == "ERROR: took more than 0.5 s"
    pid = (tmp_path / "pid").read_text().strip()
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: str) -> bool:
    """Not so where it has ended and nobody has asked for its exit status yet."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("index")
def test_two_that_fetch_the_same_source_disturb_each_other(tmp_path: Path) -> None:
    config = Config(tmp_path / "cache")
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: fetch(("/tests/",), config), range(3)))
    (folder,) = folders
    assert [path.name for path in folder.parent.iterdir()] == [NAME]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"tests/one.py", "tests/two.py"}


def test_source_that_is_there_is_fetched_again(index: Path, tmp_path: Path) -> None:
    config = Config(tmp_path / "cache")
    folder = fetch(("/tests/one", "/left/"), config)
    (index / PACKAGE / f"{NAME}.tar.gz").unlink()
    assert fetch(("/tests/one", "/left/"), config) == folder
    assert {path.name for path in folder.rglob("*.py")} == {"one.py", "out.py"}


@pytest.mark.usefixtures("index")
def test_source_without_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    config = Config(tmp_path / "cache")
    with pytest.raises(pytest.fail.Exception, match=rf"nothing in {NAME}\.tar\.gz has /docs/ in"):
        fetch(("/tests/", "/docs/"), config)
    assert not list((tmp_path / "cache" / f"{PACKAGE}-1.0").iterdir())
    with pytest.raises(pytest.fail.Exception, match=r"the source of some-source 2\.0: .*==2\.0"):
        fetch(("/tests/",), config, "2.0")


@pytest.mark.usefixtures("index")
def test_source_where_pytest_keeps_nothing_is_left_behind() -> None:
    config = Config(None)
    folder = fetch(("/tests/",), config)
    assert (folder / "tests" / "one.py").read_text() == "one"
    for cleanup in config.cleanups:
        cleanup()
    assert not folder.parent.exists()
