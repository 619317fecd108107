"""What somebody has who installs a built wheel, and has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "sgt_ds", "ds_configs", "hostfiles")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix into which a wheel of this tree was installed, without what it depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*BUILT_FROM, "monitoring"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    apart = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *apart, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("sgt_ds-*.whl")
    prefix = folder / "prefix"
    subprocess.run(
        [*pip, "install", *apart, "--ignore-installed", "--prefix", prefix, wheel], check=True
    )
    shutil.rmtree(source)
    return prefix


def test_a_wheel_leaves_out_what_runs_name(installed: Path, tmp_path: Path) -> None:
    share = installed / "share" / "sgt-ds"
    for folder in ("ds_configs", "hostfiles", "monitoring"):
        ours = {
            file.relative_to(ROOT)
            for file in (ROOT / folder).rglob("*")
            if file.is_file() and file.name != ".gitignore" and "tests" not in file.parts
        }
        theirs = {file.relative_to(share) for file in (share / folder).rglob("*") if file.is_file()}
        assert theirs >= ours, folder
    places = {name: str(installed) for name in ("base", "platbase")}
    library = sysconfig.get_path("purelib", "posix_prefix", vars=places)
    asked = """
import json, sys
from pathlib import Path
import sgt_ds
from sgt_ds.config import load_run_config, read_deepspeed_json
from sgt_ds.errors import UserError
from sgt_ds.launch import parse_hostfile
print(sgt_ds.__file__)
print(read_deepspeed_json(Path("ds_configs/zero2_bf16.json"))["zero_optimization"]["stage"])
try:
    read_deepspeed_json(Path("ds_configs/zero9.json"))
except UserError as error:
    print(error)
path = Path("ds_configs/573m_one_gpu.yaml")
print(path.exists(), load_run_config(path).preset)
for name in ("hostfiles/cluster", "hostfiles/clusters"):
    try:
        parse_hostfile(Path(name))
    except UserError as error:
        print(error)
"""
    answer = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": library},
        capture_output=True,
        text=True,
        check=True,
    )
    module, stage, refused, preset, example, no_example = answer.stdout.splitlines()
    assert Path(module).is_relative_to(installed)
    assert stage == "2"
    assert "ds_configs/zero9.json: no such DeepSpeed file" in refused
    assert "sgt-ds ships ds_configs/zero2_bf16.json" in refused
    assert preset == "False 573m"
    copy = share / "hostfiles" / "cluster"
    assert "hostfiles/cluster: no such hostfile" in example
    assert f"or copy the example {copy} and edit it" in example
    assert "or write one" in no_example
