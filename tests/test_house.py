"""The house keeps its plan: which room knows which, what README says, what every verb answers."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgt_ds
from sgt_ds import cli

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sgt_ds"

GROUND_FLOOR = {"errors", "files", "lazy", "memory", "ports", "progress", "terminal"}
BELOW_TRAINING = {
    *("config", "growth", "flops", "model", "data", "telemetry", "checkpoints", "evaluation"),
}
# What each room may import beside the ground floor.
ROOMS: dict[str, set[str]] = {
    "config": set(),
    "growth": {"config"},
    "flops": {"config", "growth"},
    "model": {"config", "growth"},
    "data": {"config"},
    "telemetry": {"growth"},
    "checkpoints": {"config", "growth"},
    "evaluation": {"config", "data", "model"},
    "training": BELOW_TRAINING,
    "launch": {"config", "telemetry", "checkpoints"},
    "inference": {"config", "growth", "flops", "model", "checkpoints", "evaluation"},
    "report": {"config", "growth", "flops", "telemetry"},
}
EVERYTHING = {*ROOMS, "cli", "demo"}
ALLOWED = {
    **{module: set[str]() for module in GROUND_FLOOR},
    **ROOMS,
    "cli": EVERYTHING - {"demo"},
    "demo": EVERYTHING,
    "train": EVERYTHING - {"demo", "cli"},
    "__main__": {"cli"},
    "__init__": set(),
}
# Rooms that know Θ and what follows from it, and nothing else of growth.
KNOW_STATE_ONLY = {"model", "telemetry", "checkpoints"}
STATE_NAMES = {"State", "Loop", "Scope", "Passes", "passes_at", "is_narrow", "VANILLA"}
IGNORED = {"build", "dist", "runs", "__pycache__"}


class Arrow:
    """One import of the package's own: `names` of `target` (dotted, without `sgt_ds.`)."""

    def __init__(self, file: Path, line: int, target: str, names: set[str]) -> None:
        self.target, self.names = target, names
        self.place = f"{file.relative_to(ROOT)}:{line}"
        self.room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        self.to = target.split(".")[0]


def arrows() -> list[Arrow]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("sgt_ds."):
                        found.append(Arrow(file, node.lineno, alias.name[7:], set()))
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import; name the room"
                names = {alias.name for alias in node.names}
                if node.module == "sgt_ds":
                    found += [Arrow(file, node.lineno, name, set()) for name in names]
                elif (node.module or "").startswith("sgt_ds."):
                    assert node.module is not None
                    found.append(Arrow(file, node.lineno, node.module[7:], names))
    return [arrow for arrow in found if arrow.to != "__version__"]


def test_a_room_imports_one_that_the_table_does_not_allow() -> None:
    faults = [
        f"{arrow.place}: {arrow.room} must not know {arrow.target}"
        for arrow in arrows()
        if arrow.to != arrow.room and arrow.to not in ALLOWED[arrow.room] | GROUND_FLOOR
    ]
    assert not faults, "\n".join(faults)
    assert {arrow.room for arrow in arrows()} >= {"growth", "model", "training"}, "read nothing"


def test_a_room_reaches_behind_another_ones_face() -> None:
    faults = [
        f"{arrow.place}: imports {arrow.target}; the face is sgt_ds.{arrow.to}"
        for arrow in arrows()
        if arrow.to != arrow.room and "." in arrow.target
    ]
    faults += [
        f"{arrow.place}: {arrow.room} knows Θ only, not {sorted(arrow.names - STATE_NAMES)}"
        for arrow in arrows()
        if arrow.to == "growth" and arrow.room in KNOW_STATE_ONLY and arrow.names - STATE_NAMES
    ]
    faults += [
        f"{arrow.place}: flops is arithmetic and knows no controller"
        for arrow in arrows()
        if arrow.room == "flops" and "GrowthController" in arrow.names
    ]
    assert not faults, "\n".join(faults)


def test_growth_touches_torch_outside_the_controller() -> None:
    for file in (PACKAGE / "growth").glob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
        assert ("torch" in modules) == (file.name == "controller.py"), file.name


def test_a_message_leaves_it_to_the_reader_whether_there_is_one_or_more() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "(s)" not in node.value, f"{file}:{node.lineno}: see progress.counted"


def test_a_drawer_for_leftovers_appears() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"util", "utils", "helper", "helpers", "common", "misc"}


def test_a_face_promises_a_name_that_is_not_there() -> None:
    for room in sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")):
        face = importlib.import_module(f"sgt_ds.{room}")
        for name in face.__all__:
            assert hasattr(face, name), f"sgt_ds.{room}.{name}"


def readme_tree() -> set[str]:
    """Paths of the tree under README's map: the block that begins with `sgt_ds/`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\w*\n(sgt_ds/.*?)```", readme, re.DOTALL)
    assert block, "README.md has no tree that begins with sgt_ds/"
    paths, parents = set(), [""]
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        assert indent % 2 == 0, line
        parents = [*parents[: indent // 2 + 1], name]
        paths.add("".join(parents))
    return paths


def test_the_map_in_readme_misses_a_room_or_names_one_that_is_gone() -> None:
    def visible(folder: Path) -> Iterator[Path]:
        for path in folder.iterdir():
            hidden = path.name.startswith((".", "_")) or path.name.endswith((".egg-info", "-run"))
            if not hidden and path.name not in IGNORED and path.name != "py.typed":
                yield path

    here = {
        f"{path.relative_to(ROOT)}/"
        for folder in (ROOT, PACKAGE)
        for path in visible(folder)
        if path.is_dir() and any(file.is_file() for file in path.rglob("*"))
    }
    here |= {str(path.relative_to(ROOT)) for path in visible(PACKAGE) if path.is_file()}
    assert readme_tree() == here


def test_version_and_newest_changelog_heading_part() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert headings[:1] == [sgt_ds.__version__]


def parsers_of(
    parser: argparse.ArgumentParser, path: list[str]
) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Every command's words, and its parser; of groups of commands too."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub_parser in action.choices.items():
                yield from parsers_of(sub_parser, [*path, name])


def verbs(parser: argparse.ArgumentParser) -> list[tuple[list[str], bool]]:
    """Every command's words, and whether it is one that does something."""
    return [
        (words, not any(isinstance(action, argparse._SubParsersAction) for action in each._actions))
        for words, each in parsers_of(parser, [])
    ]


ASK_EVERY_VERB = """
import contextlib, io, json, sys
from sgt_ds.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            status = main([*words, "--help"])
        except SystemExit as end:
            status = end.code
    answers.append((words, status, out.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""


def test_a_verb_helps_without_an_example_or_loads_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(cli, "run_command", lambda parser, _: parsers.append(parser) or 0)
    cli.main([])
    commands = verbs(parsers[0])
    assert len(commands) > 5
    answer = subprocess.run(
        [sys.executable, "-c", ASK_EVERY_VERB, json.dumps([words for words, _ in commands])],
        capture_output=True,
        text=True,
        check=True,
    )
    acts = {" ".join(words): does for words, does in commands}
    for words, status, text, torch_is_loaded in json.loads(answer.stdout):
        name = " ".join(words)
        assert status == 0, name
        assert not torch_is_loaded, f"sgt-ds {name} --help imports torch"
        if acts[name]:
            example = text.partition("example")[2]
            assert f"sgt-ds {name}" in example, f"sgt-ds {name} --help shows no example"


def test_a_default_that_help_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(cli, "run_command", lambda parser, _: parsers.append(parser) or 0)
    cli.main([])
    told = 0
    for words, parser in parsers_of(parsers[0], []):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, f"sgt-ds {' '.join(words)}: {action.dest}"
            if action.default not in (None, False, "", [], argparse.SUPPRESS):
                text = parser._get_formatter()._expand_help(action)
                assert text.count("default") == 1, f"sgt-ds {' '.join(words)}: {text}"
                told += 1
    assert told > 50


# A command in a span or block of code: to the end of its line, or to what a shell would take.
COMMAND = re.compile(r"\bsgt-ds ((?:\\\n|[^\n`#|;&>])+)")


def commands_of(text: str) -> Iterator[list[str]]:
    blocks = re.findall(r"^ *```.*?^ *```|^    .*?$", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    # Within a paragraph a span may go on in the next line.
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", rest)]
    for piece in (*blocks, *spans):
        for found in COMMAND.findall(piece):
            yield found.replace("\\\n", " ").split()


def test_a_command_in_the_docs_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(cli, "run_command", lambda parser, _: parsers.append(parser) or 0)
    cli.main([])
    known = {tuple(words): parser for words, parser in parsers_of(parsers[0], [])}
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("monitoring/**/*.md")]
    files += [*ROOT.glob("ds_configs/*"), *ROOT.glob("hostfiles/*")]
    seen = 0
    for file in files:
        text = file.read_text()
        if file.suffix != ".md":
            text = re.sub("^#", "    ", text, flags=re.MULTILINE)
        if file.name == "CHANGELOG.md":
            continue  # names what is gone
        for words in commands_of(text):
            verb: tuple[str, ...] = ()
            while len(verb) < len(words) and (*verb, words[len(verb)]) in known:
                verb = (*verb, words[len(verb)])
            options = known[verb]._option_string_actions
            for word in words:
                flag = word.partition("=")[0].rstrip(",.:)")
                if re.fullmatch("--[a-z].*", flag):
                    assert flag in options, f"{file.name}: sgt-ds {' '.join(words)}"
                    seen += 1
    assert seen > 100


def test_bad_usage_is_more_than_one_line_or_not_status_2() -> None:
    for name, words in (
        ("", ["--nonsense"]),
        ("", ["no-such-verb"]),
        (" config", []),
        (" plan", ["--k-max", "many"]),
        (" growth show", ["run", "--nonsense"]),
        (" train", ["run.yaml", "--nonsense"]),
    ):
        words = [*name.split(), *words]
        answer = subprocess.run(
            [sys.executable, "-m", "sgt_ds", *words], capture_output=True, text=True, check=False
        )
        assert answer.returncode == 2, words
        assert len(answer.stderr.splitlines()) == 1, answer.stderr
        assert answer.stderr.endswith(f"; see sgt-ds{name} --help\n")
        assert not answer.stdout, words
