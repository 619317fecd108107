"""Rows of a task's data set, from files or through `datasets`, as items. Knows no model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgt_ds.data import check_remote, is_remote, read_rows
from sgt_ds.errors import UserError
from sgt_ds.evaluation.items import Item, Rule
from sgt_ds.evaluation.tasks import Row, Task
from sgt_ds.lazy import is_installed

HUB = "datasets"
"""In place of a path: the public data set, through the package of that name."""


def is_local(location: str) -> bool:
    """Whether a task's rows are in files of this machine."""
    return not is_remote(location) and not _is_on_hub(location)


def check_package(task: Task, location: str, split: str) -> None:
    """Look for what reads rows that are not in files of this machine; `location` says where they are.

    Raises: UserError where it is not installed. Asks no server.
    """
    if not _is_on_hub(location):
        check_remote(location)
    elif not is_installed(HUB):
        raise _without_package(location, _in_files(task, split, "path:"))


@dataclass(frozen=True)
class Questions:
    """A task's items under one rule."""

    task: Task
    rule: Rule
    items: list[Item]


def load_questions(
    task: Task, rule: Rule, location: str, *, split: str = "validation", limit: int | None = None
) -> Questions:
    """Read a task's rows and ask them under a rule.

    `location`: a file of JSON Lines; a folder with `SPLIT.jsonl`, or with a folder of the task's
    name that holds it, plain, gzip or zstd; a URL of either; `datasets` for the public set of the
    task, or `datasets:NAME[:CONFIG]`. `limit`: the first so many items.
    Raises: UserError where nothing is there, or a row is not of the task's form.
    """
    items = list(itertools.islice(_items(task, rule, location, split), limit))
    if not items:
        raise UserError(
            location, task.name, f"has no rows of split {split}; check the path and the split"
        )
    return Questions(task, rule, items)


def _items(task: Task, rule: Rule, location: str, split: str) -> Iterator[Item]:
    for index, (file, place, row) in enumerate(_rows(task, location, split)):
        try:
            item = task.ask[rule](row, str(index))
        except KeyError as error:
            raise UserError(
                file, place, f"has no {error} that {task.name} can use; {_remedy(task)}"
            ) from None
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise UserError(
                file, place, f"is not a row of {task.name} ({error}); {_remedy(task)}"
            ) from None
        if item is None:
            continue
        fault = _fault(item)
        if fault:
            raise UserError(file, place, f"{fault}; correct the row")
        yield item


def _remedy(task: Task) -> str:
    return f"give rows in the format of {task.dataset}, or name the task they belong to"


def _fault(item: Item) -> str | None:
    if not 0 <= item.answer < len(item.continuations):
        return f"its answer {item.answer} is not one of its {len(item.continuations)} choices"
    if not all(isinstance(text, str) for text in (*item.contexts, *item.continuations)):
        return "a text is not a string"
    if not all(text.strip() for text in item.continuations):
        return "a choice is empty"
    return None


def _rows(task: Task, location: str, split: str) -> Iterator[tuple[str, str, Row]]:
    if _is_on_hub(location):
        yield from _hub_rows(task, location, split)
        return
    for file, line, row in read_rows(_pattern(task, location, split)):
        yield file, f"line {line}", row


def _is_on_hub(location: str) -> bool:
    return location.partition(":")[0] == HUB


def _pattern(task: Task, location: str, split: str) -> str:
    if any(mark in location.rsplit("/", 1)[-1] for mark in (".json", "*")):
        return location
    own = location.rstrip("/").rsplit("/", 1)[-1] == task.folder
    if is_remote(location):
        base = location.rstrip("/") + ("" if own else f"/{task.folder}")
        return f"{base}/{split}.json*"
    folders = (Path(location), Path(location) / task.folder)
    for folder in folders:
        found = sorted(folder.glob(f"{split}.json*"))
        if len(found) > 1:
            raise UserError(folder, split, f"exists as {len(found)} files; name one of them")
        if found:
            return str(found[0])
    if Path(location).is_dir():
        fault = f"holds neither {split}.jsonl nor {task.folder}/{split}.jsonl, plain, .gz or .zst"
    elif not Path(location).exists():
        fault = "does not exist"
    else:
        fault = "is neither a folder nor a .json or .jsonl file"
    raise UserError(location, None, f"{fault}; check the path and the split")


def _hub_rows(task: Task, location: str, split: str) -> Iterator[tuple[str, str, Row]]:
    remedy = _in_files(task, split, "--data")
    try:
        import datasets
    except ImportError:
        raise _without_package(location, remedy) from None
    _, _, given = location.partition(":")
    name, _, config = given.partition(":") if given else (task.dataset, "", task.config)
    try:
        with _without_warnings("huggingface_hub"):  # which tells of each of its retries
            rows: Any = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the package lets through what its many readers raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            name, split, f"cannot be loaded by `datasets` ({reason}); without a network, {remedy}"
        ) from None
    for number, row in enumerate(rows):
        yield name, f"row {number}", row


def _in_files(task: Task, split: str, key: str) -> str:
    """What to do without the public set. `key`: the flag or key that says where rows are."""
    return f"give {key} FOLDER containing {task.folder}/{split}.jsonl (docs/evaluation.md)"


def _without_package(location: str, remedy: str) -> UserError:
    return UserError(location, None, f"needs a package; pip install 'sgt-ds[eval]', or {remedy}")


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Let a library log errors alone."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
