"""Which steps of the demo are done, each keyed by a hash of its inputs. Knows no step's content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sgt_ds.files import sha256_of, write_text_atomically


def key_of(*inputs: object) -> str:
    """SHA-256 of the inputs' JSON, in hex."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


class Ledger:
    """`steps.json` in the work directory: of each finished step its key, files and facts."""

    def __init__(self, work_dir: Path) -> None:
        self._path = work_dir / "steps.json"
        try:
            self._steps: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            self._steps = {}

    def holds(self, step: str, key: str) -> bool:
        """Whether the step was finished with this key and its files are as it left them."""
        entry = self._steps.get(step)
        return (
            entry is not None
            and entry["key"] == key
            and all(
                Path(name).is_file() and sha256_of(Path(name)) == digest
                for name, digest in entry["files"].items()
            )
        )

    def started_with(self, step: str) -> str | None:
        """Key with which the step was begun or finished last."""
        entry = self._steps.get(step)
        return None if entry is None else str(entry["key"])

    def begin(self, step: str, key: str) -> None:
        """Note that the step is under way: a later start knows whose files lie there."""
        self._steps[step] = {"key": key, "files": {"": ""}, "facts": {}}
        self._save()

    def finish(self, step: str, key: str, files: Iterable[Path], **facts: Any) -> None:
        """Note that the step is done, with a digest of each of its files."""
        digests = {str(path): sha256_of(path) for path in files}
        self._steps[step] = {"key": key, "files": digests, "facts": facts}
        self._save()

    def fact(self, step: str, name: str) -> Any:
        """A fact of a finished step. Raises: KeyError."""
        return self._steps[step]["facts"][name]

    def digests(self, step: str) -> dict[str, str]:
        """Digest of each file of a finished step."""
        return dict(self._steps[step]["files"])

    def _save(self) -> None:
        write_text_atomically(self._path, json.dumps(self._steps, indent=1) + "\n")
