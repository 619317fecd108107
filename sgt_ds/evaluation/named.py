"""What a run's configuration evaluates: checked before anything starts. No torch."""

from __future__ import annotations

from pathlib import Path

from sgt_ds.config import EvaluationConfig, TaskSource
from sgt_ds.data import check_remote, check_set, is_remote, open_token_set, read_texts
from sgt_ds.errors import UserError, in_field
from sgt_ds.evaluation.sources import check_package, is_local, load_questions
from sgt_ds.evaluation.tasks import Task, find_tasks


def named_tasks(settings: EvaluationConfig, config_file: str) -> list[tuple[str, TaskSource, Task]]:
    """The key of each entry of `evaluation.tasks`, the entry, and a task that it names.

    `config_file`: for messages. Raises: UserError where a task is unknown, or a name stands twice:
    scores, those of texts too, are told apart by it.
    """
    found: list[tuple[str, TaskSource, Task]] = []
    names: set[str] = set()

    def take(name: str, key: str) -> None:
        if name in names:
            message = f"'{name}' appears twice in evaluation; name each task and text once"
            raise UserError(config_file, f"{key}.name", message)
        names.add(name)

    for index, source in enumerate(settings.tasks):
        key = f"evaluation.tasks.{index}"
        for task in find_tasks(source.name, file=config_file, field=f"{key}.name"):
            take(task.name, key)
            found.append((key, source, task))
    for index, text in enumerate(settings.perplexity):
        take(text.name, f"evaluation.perplexity.{index}")
    return found


def check_evaluation(settings: EvaluationConfig, config_file: str) -> None:
    """Look at what lies on this machine: whether it is there, and the form of its first row.

    Of what does not, only whether the package that reads it is installed.
    Raises: UserError as `named_tasks`, and where a file or a shard is missing or of another form.
    """
    for key, source, task in named_tasks(settings, config_file):
        with in_field(f"{key}.path"):
            if not is_local(source.path):
                check_package(task, source.path, source.split)
            else:
                load_questions(task, settings.rule, source.path, split=source.split, limit=1)
    for index, text in enumerate(settings.perplexity):
        with in_field(f"evaluation.perplexity.{index}.path"):
            if is_remote(text.path):
                check_remote(text.path)
            elif Path(text.path).is_dir():
                check_set(open_token_set(Path(text.path)))
            else:
                next(read_texts(text.path), None)
