"""The tasks: where their rows come from and how each rule turns a row into a question. No model.

Sources, read as facts and written anew: ai2-olmo 0.6.0 `olmo/eval/downstream.py`, lm-eval 0.4.13
`lm_eval/tasks/`. docs/evaluation.md shows both rules side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgt_ds.config import nearest
from sgt_ds.errors import UserError
from sgt_ds.evaluation.items import Item, Metric, Rule, asked
from sgt_ds.evaluation.mmlu import GROUPS, LM_EVAL_GROUP, OLMO_GROUP

Row = Mapping[str, Any]
Ask = Callable[[Row, str], Item | None]
"""A row and its number to an item; None where the row belongs to another task."""

LETTERS = "ABCDE"


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    folder: str
    """Folder of its rows below a directory of tasks."""
    dataset: str
    """Name on the Hugging Face hub."""
    config: str | None
    """Configuration of that data set, None for its only one."""
    chance: float
    """Accuracy of a guess."""
    ask: Mapping[Rule, Ask]
    metric: Mapping[Rule, Metric]
    """What each rule reports; the others are reported beside it."""


def _letter_answer(row: Row) -> int:
    labels = [str(label) for label in row["choices"]["label"]]
    return labels.index(str(row["answerKey"]).strip())


def _question(row: Row, number: str) -> Item:
    """ARC's form, shared by several tasks of both harnesses."""
    return asked(
        str(row.get("id", number)),
        f"Question: {row['question']}\nAnswer:",
        list(row["choices"]["text"]),
        _letter_answer(row),
    )


def _winogrande(row: Row, number: str) -> Item:
    """What follows the gap is scored after either name: contexts differ, continuations don't."""
    head, gap, tail = row["sentence"].partition("_")
    if not gap:
        raise ValueError("sentence has no blank `_`")
    contexts = (head + row["option1"], head + row["option2"])
    return Item(number, contexts, (f" {tail.strip()}",) * 2, int(row["answer"]) - 1)


def _social_iqa(question: str, answer: str) -> Ask:
    def ask(row: Row, number: str) -> Item:
        context = f"{question} {row['context']} {row['question']}\n{answer}"
        choices = [row[f"answer{letter}"] for letter in "ABC"]
        return asked(number, context, choices, int(row["label"]) - 1)

    return ask


def _openbookqa(row: Row, number: str) -> Item:
    return asked(
        str(row.get("id", number)),
        row["question_stem"],
        list(row["choices"]["text"]),
        _letter_answer(row),
    )


def _commonsense_letters(row: Row, number: str) -> Item:
    """Choices are listed, and the letters are scored."""
    texts = row["choices"]["text"]
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True))
    return asked(
        str(row.get("id", number)),
        f"Question: {row['question'].strip()}\n{listed}\nAnswer:",
        list(LETTERS),
        LETTERS.index(row["answerKey"].strip()),
    )


def _sciq(strip: Callable[[str], str]) -> Ask:
    def ask(row: Row, number: str) -> Item:
        names = ("distractor1", "distractor2", "distractor3", "correct_answer")
        context = f"{strip(row['support'])}\nQuestion: {row['question']}\nAnswer:"
        return asked(number, context, [row[name] for name in names], 3)

    return ask


def _hellaswag(row: Row, number: str) -> Item:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [_without_wikihow_marks(ending) for ending in row["endings"]]
    return asked(
        str(row.get("ind", number)), _without_wikihow_marks(context), endings, int(row["label"])
    )


def _without_wikihow_marks(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _mmlu(group: str, groups: Mapping[str, str], letters: bool) -> Ask:
    def ask(row: Row, number: str) -> Item | None:
        subject, choices = row["subject"], [str(choice) for choice in row["choices"]]
        if groups[subject] != group:
            return None
        question, answer = row["question"].strip(), int(row["answer"])
        if not letters:
            return asked(number, f"Question: {question}\nAnswer:", choices, answer)
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, choices))  # noqa: B905
        about = subject.replace("_", " ")
        opening = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        return asked(number, f"{opening}{question}\n{listed}\nAnswer:", list(LETTERS[:4]), answer)

    return ask


def _both(ask: Ask) -> Mapping[Rule, Ask]:
    return {"olmo": ask, "lm_eval": ask}


def _reported(olmo: Metric, lm_eval: Metric) -> Mapping[Rule, Metric]:
    return {"olmo": olmo, "lm_eval": lm_eval}


_ALL = (
    Task(
        "arc_easy",
        "arc_easy",
        "allenai/ai2_arc",
        "ARC-Easy",
        0.25,
        _both(_question),
        _reported("acc", "acc_norm"),
    ),
    Task(
        "winogrande",
        "winogrande",
        "allenai/winogrande",
        "winogrande_xl",
        0.5,
        _both(_winogrande),
        _reported("acc", "acc"),
    ),
    Task(
        "social_iqa",
        "social_iqa",
        "lighteval/siqa",
        None,
        1 / 3,
        {"olmo": _social_iqa("Question:", "Answer:"), "lm_eval": _social_iqa("Q:", "A:")},
        _reported("acc_norm", "acc"),
    ),
    Task(
        "openbookqa",
        "openbookqa",
        "allenai/openbookqa",
        "main",
        0.25,
        _both(_openbookqa),
        _reported("acc_norm", "acc_norm"),
    ),
    Task(
        "commonsense_qa",
        "commonsense_qa",
        "tau/commonsense_qa",
        None,
        0.2,
        {"olmo": _question, "lm_eval": _commonsense_letters},
        _reported("acc_norm", "acc"),
    ),
    Task(
        "sciq",
        "sciq",
        "allenai/sciq",
        None,
        0.25,
        {"olmo": _sciq(str.strip), "lm_eval": _sciq(str.lstrip)},
        _reported("acc", "acc_norm"),
    ),
    Task(
        "hellaswag",
        "hellaswag",
        "Rowan/hellaswag",
        None,
        0.25,
        _both(_hellaswag),
        _reported("acc_norm", "acc_norm"),
    ),
    Task(
        "basic_arithmetic",
        "basic_arithmetic",
        "allenai/basic_arithmetic",
        None,
        0.25,
        _both(_question),
        _reported("acc", "acc"),
    ),
    *(
        Task(
            f"mmlu_{group}",
            "mmlu",
            "cais/mmlu",
            "all",
            0.25,
            {
                "olmo": _mmlu(group, OLMO_GROUP, letters=False),
                "lm_eval": _mmlu(group, LM_EVAL_GROUP, letters=True),
            },
            _reported("acc_norm", "acc"),
        )
        for group in GROUPS
    ),
)
TASKS = {task.name: task for task in _ALL}
_SEVERAL = {"all": tuple(TASKS), "mmlu": tuple(f"mmlu_{group}" for group in GROUPS)}


def find_tasks(names: str, *, file: str = "--tasks", field: str | None = None) -> list[Task]:
    """Tasks named by commas; `all`, and `mmlu` for its four groups.

    `file`, `field`: where they stand. Raises: UserError where one is unknown or stands twice.
    """
    found: list[Task] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        for one in _SEVERAL.get(name, (name,)):
            if one not in TASKS:
                known = [*_SEVERAL, *TASKS]
                hint = f"{nearest(one, known)}; known: {', '.join(known)}"
                raise UserError(file, field, f"'{one}' is unknown{hint}")
            if TASKS[one] in found:
                raise UserError(file, field, f"'{one}' is listed twice; name it once")
            found.append(TASKS[one])
    if not found:
        raise UserError(file, field, "names no task; try arc_easy")
    return found
