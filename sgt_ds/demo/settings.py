"""What one run of the demo works with: folders, ports, the command lines' fixed parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sgt_ds.config import RunConfig, load_run_config, shipped_config
from sgt_ds.errors import UserError

RANKS = 2
STORIES_SEED = 0
STORIES_BYTES = 6_000_000
SAMPLE_BYTES = 6_000_000
DEFAULT_WORK_DIR = Path(".demo")
MASTER_PORT = 29500
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Settings:
    """Folders of one demo. `data`: the user's own shards, None for the stories."""

    work_dir: Path
    data: str | None

    @property
    def corpus(self) -> Path:
        """Shards in C4's schema."""
        return self.work_dir / "corpus"

    @property
    def tokenizer(self) -> Path:
        """SentencePiece model."""
        return self.work_dir / "tokenizer.model"

    @property
    def shards(self) -> Path:
        """Token shards: `train` and `validation`."""
        return self.work_dir / "shards"

    @property
    def run_dir(self) -> Path:
        """The training run."""
        return self.work_dir / "run"

    @property
    def export(self) -> Path:
        """The converted model."""
        return self.work_dir / "export"

    @property
    def logs(self) -> Path:
        """Output of each command."""
        return self.work_dir / "logs"

    @property
    def run_yaml(self) -> Path:
        """The run's configuration, as short a path as leads there."""
        return _shortest(_HERE / "demo.yaml")

    def overrides(self) -> list[str]:
        """What run.yaml cannot know: other folders than its own, where they differ.

        Raises: UserError where the DeepSpeed file is not there.
        """
        config = load_run_config(self.run_yaml)
        given = {"run_dir": self.run_dir, "data.validation": self.shards / "validation"}
        stands = {"run_dir": config.run_dir, "data.validation": config.data.validation}
        changes = [f"{key}={path}" for key, path in given.items() if path != stands[key]]
        train = self.shards / "train"
        if train != config.data.train[0].path:
            changes.append(f"data.train=[{{path: {train}}}]")
        if not config.deepspeed.exists():
            found = shipped_config(config.deepspeed)
            if found is None:
                raise UserError(config.deepspeed, None, "is missing; reinstall sgt-ds")
            changes.append(f"deepspeed={_shortest(found)}")
        return changes

    def config(self) -> RunConfig:
        """The run's configuration with the overrides."""
        return load_run_config(self.run_yaml, self.overrides())


def _shortest(path: Path) -> Path:
    relative = Path(os.path.relpath(path))
    return path if relative.parts[0] == ".." else relative
