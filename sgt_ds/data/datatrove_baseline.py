"""The same work done by datatrove, for `bench prepare`: C4 files to tokens on disk.

datatrove need not be there; nothing but the bench asks for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from sgt_ds.data.file_work import Task
from sgt_ds.data.tokenizers import Tokenizer

NAME = "datatrove"
# Its reader of JSON asks for orjson when it begins.
_PACKAGES = (NAME, "orjson")


def datatrove_preparation(tokenizer: Tokenizer, out: Path) -> Callable[[Task], None] | None:
    """What prepares one file with datatrove's reader and tokenizer, EOS after each document.

    None where datatrove is not installed, or does not know that kind of tokenizer.
    """
    if tokenizer.kind != "huggingface" or not all(map(importlib.util.find_spec, _PACKAGES)):
        return None
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.disable("datatrove")
    # One for all files, as ours: loading the vocabulary is not what is timed.
    writer = DocumentTokenizer(
        str(out),
        str(tokenizer.path),
        eos_token=tokenizer.decode([tokenizer.eos_id]),
        shuffle_documents=False,
        save_final_metadata=False,
    )
    writer.tokenizer  # noqa: B018  # a cached property: loads it

    def prepare(task: Task) -> None:
        path = Path(task.file.location)
        documents = JsonlReader(str(path.parent), glob_pattern=path.name).run()
        writer.run(documents, rank=task.number)

    return prepare
