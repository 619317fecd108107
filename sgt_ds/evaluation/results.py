"""Log-likelihoods to choices and scores; items as JSON Lines and back. Knows no model."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sgt_ds.errors import UserError, refusal
from sgt_ds.evaluation.items import METRICS, Item, Metric, Rule
from sgt_ds.evaluation.sources import Questions
from sgt_ds.files import output_writer


@dataclass(frozen=True, slots=True)
class ItemResult:
    """How a model answered one item."""

    task: str
    rule: Rule
    index: int
    """Place among the task's items."""
    id: str
    sha256: str
    """Of the item's texts, first 16 hex digits: what two models must share to be compared."""
    answer: int
    """The right choice."""
    log_likelihoods: tuple[float, ...]
    """One a choice, nats."""
    characters: tuple[int, ...]
    """Of each choice, without its leading space."""
    bytes: int
    """Of the right choice, UTF-8, without its leading space."""

    def choice(self, metric: Metric) -> int:
        """The choice taken: the likeliest, or the likeliest per character; the first of equals."""
        values = self.log_likelihoods
        if metric == "acc_norm":
            values = tuple(v / n for v, n in zip(values, self.characters, strict=True))
        return max(range(len(values)), key=values.__getitem__)

    def score(self, metric: Metric) -> float:
        """1 or 0 for right or wrong; bits per byte of the right choice for `bpb`."""
        if metric == "bpb":
            return -self.log_likelihoods[self.answer] / math.log(2) / self.bytes
        return float(self.choice(metric) == self.answer)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the choices and the scores for a reader."""
        return {
            **asdict(self),
            "choice": {name: self.choice(name) for name in METRICS if name != "bpb"},
            "scores": {name: self.score(name) for name in METRICS},
        }


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over items and its standard error (sample deviation over √n; NaN for one item)."""

    value: float
    stderr: float


@dataclass(frozen=True)
class TaskResult:
    """A task's scores under one rule."""

    task: str
    rule: Rule
    items: tuple[ItemResult, ...]
    metric: Metric
    """The one that the rule reports."""
    chance: float
    """Accuracy of a guess."""

    def score(self, metric: Metric | None = None) -> Score:
        """Mean and standard error of a metric; of the rule's own where none is named."""
        return mean_of([item.score(metric or self.metric) for item in self.items])

    def as_json(self) -> dict[str, Any]:
        """Plain values, without the items."""
        scores = {name: self.score(name) for name in METRICS}
        return {
            "task": self.task,
            "rule": self.rule,
            "items": len(self.items),
            "metric": self.metric,
            "chance": self.chance,
            **{name: score.value for name, score in scores.items()},
            **{f"{name}_stderr": _finite(score.stderr) for name, score in scores.items()},
        }


def mean_of(values: Sequence[float]) -> Score:
    """Mean and standard error."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Score(mean, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Score(mean, math.sqrt(variance / count))


def task_result(questions: Questions, log_likelihoods: Sequence[float]) -> TaskResult:
    """A task's result from the log-likelihood of each choice of each item, in order."""
    results: list[ItemResult] = []
    start = 0
    for index, item in enumerate(questions.items):
        end = start + len(item.continuations)
        results.append(_item_result(questions, index, item, log_likelihoods[start:end]))
        start = end
    task, rule = questions.task, questions.rule
    return TaskResult(task.name, rule, tuple(results), task.metric[rule], task.chance)


def _item_result(
    questions: Questions, index: int, item: Item, log_likelihoods: Sequence[float]
) -> ItemResult:
    bare = [text[1:] for text in item.continuations]
    texts = json.dumps([item.contexts, item.continuations, item.answer])
    return ItemResult(
        task=questions.task.name,
        rule=questions.rule,
        index=index,
        id=item.id,
        sha256=hashlib.sha256(texts.encode()).hexdigest()[:16],
        answer=item.answer,
        log_likelihoods=tuple(log_likelihoods),
        characters=tuple(map(len, bare)),
        bytes=len(bare[item.answer].encode()),
    )


_ITEM = TypeAdapter(ItemResult)


def check_writable(path: Path) -> None:
    """See that `write_items` can write `path`, which is left as it is.

    Raises: UserError of `--out` where it cannot.
    """
    try:
        target = Path(os.path.realpath(path))
        if path.is_dir():
            fault = f"{path} is not a file name; name a file in a folder"
        elif path.exists() and not path.is_file():  # a pipe or a device is written into
            if os.access(path, os.W_OK):
                return
            denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            fault = f"{path} {refusal(denied, 'written', instead='name another file')}"
        elif not target.parent.is_dir():
            fault = f"{target.parent} is not a folder; create it, or name another one"
        else:
            # The writer makes a file beside it, too, with a longer name.
            prefix = f".{target.name}."
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=prefix, suffix=".tmp"):
                return
    except OSError as error:
        fault = f"{path} {refusal(error, 'written', instead='name another file')}"
    raise UserError("--out", None, fault)


def write_items(path: Path, results: Iterable[TaskResult]) -> None:
    """Write one line of JSON an item: a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with output_writer(path) as stream:
        for result in results:
            for item in result.items:
                stream.write(json.dumps(item.as_json()).encode() + b"\n")


def read_items(path: Path) -> list[ItemResult]:
    """Items that `write_items` wrote. Raises: UserError where the file is none of its."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = refusal(error, "read", "give a file written by --out")
        raise UserError(path, None, message) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            item = _ITEM.validate_python(json.loads(line))
        except ValidationError as error:
            detail = error.errors()[0]
            field, fault = ".".join(map(str, detail["loc"])), detail["msg"]
        except (ValueError, RecursionError):
            field, fault = "", "is not JSON"
        else:
            field, fault = _contradiction(item)
        if fault:
            where = f"line {number}, {field}" if field else f"line {number}"
            raise UserError(path, where, f"{fault}; give a file written by `eval tasks --out`")
        found.append(item)
    if not found:
        raise UserError(path, None, "contains no items; give a file written by `eval tasks --out`")
    return found


def _contradiction(item: ItemResult) -> tuple[str, str]:
    """The field that keeps an item from being scored, and why; empty where none does."""
    choices = len(item.log_likelihoods)
    if not 0 <= item.answer < choices:
        return "answer", f"{item.answer} is not one of the {choices} choices"
    if len(item.characters) != choices or min(item.characters) < 1:
        return "characters", f"must be {choices} counts, one for each choice"
    if item.bytes < 1:
        return "bytes", f"{item.bytes} is not a count"
    return "", ""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
