"""Whether a run directory belongs to a run: checked before launch and by the ranks. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sgt_ds.config.layout import RunLayout
from sgt_ds.config.loading import config_differences, dump_run_config, load_run_config
from sgt_ds.config.run import RunConfig
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import write_text_atomically, writing

# Keys that name what a run starts from; `resume` may hold a word instead.
_STARTS = ("init", "fork", "resume")


def check_run_directory(config: RunConfig) -> bool:
    """Whether `run_dir` already holds this run.

    Raises: UserError where it holds another run, or checkpoints without the run.yaml that says
    whose they are, where `resume: never` meets an existing one, or where `resume` names a
    checkpoint from which this run can't continue.
    """
    layout = RunLayout(config.run_dir)
    _check_named(config)
    saved = layout.config
    if not saved.exists() and (newest := layout.newest_checkpoint()):
        raise UserError(
            saved,
            None,
            f"is missing, but checkpoints are there, up to {newest.name}; put the file back, or "
            f"continue in another run_dir with `resume: {newest}`",
        )
    # What a refused start left behind is no one's run.
    if not saved.exists() or not layout.has_begun():
        if config.run_dir.exists() and not config.run_dir.is_dir():
            raise UserError(config.run_dir, "run_dir", "is a file; choose another run_dir")
        return False
    differences = config_differences(load_run_config(saved), config)
    if [key.partition(":")[0] for key in differences] == ["training.steps"]:
        raise UserError(
            saved,
            differences[0],
            "the cosine schedule was computed for the first number; keep it (`sgt-ds stop` ends "
            "the run early), or take the weights, without their loops, to another run_dir with "
            f"`fork: {layout.checkpoints}/step-…`",
        )
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise UserError(
            saved,
            differences[0],
            f"run_dir holds another run{more}; keep its settings, or choose another run_dir "
            "(`fork: CHECKPOINT` starts from its weights, without its loops)",
        )
    if config.resume == "never":
        raise UserError(
            saved,
            "resume",
            "is never, but run_dir holds this run; leave `resume` out to continue it, or choose "
            "another run_dir",
        )
    return True


def start_warnings(config: RunConfig) -> list[str]:
    """Starts that the run in `run_dir` did not have, and won't get: it has checkpoints of its own.

    For a run that `check_run_directory` accepts. Raises: UserError where its run.yaml is damaged.
    """
    begun = _begun(RunLayout(config.run_dir))
    if begun is None:
        return []
    had = {path.resolve() for _, path in _starts(begun)}
    own = RunLayout(config.run_dir).checkpoints.resolve()
    return [
        f"{key}: {path} is ignored: {config.run_dir} continues from its own checkpoints; choose "
        "another run_dir to start from it"
        for key, path in _starts(config)
        if path.resolve() not in had and (key != "resume" or path.resolve().parent != own)
    ]


def _begun(layout: RunLayout) -> RunConfig | None:
    """How the run began that has checkpoints here; None where none has."""
    if not layout.has_checkpoints() or not layout.config.exists():
        return None
    return load_run_config(layout.config)


def _starts(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """What the run starts from, by key, where that is not itself."""
    for key in _STARTS:
        if isinstance(path := getattr(config, key), Path):
            yield key, path


def _check_named(config: RunConfig) -> None:
    """Raises: UserError where `resume` names a checkpoint others follow, or one of another run."""
    path = config.resume
    if not isinstance(path, Path) or not path.is_dir():  # what is not there is reported elsewhere
        return
    newest = RunLayout(config.run_dir).newest_checkpoint()
    parent = RunLayout(path.resolve().parent.parent)
    if parent.run_dir == config.run_dir.resolve():
        if newest is not None and path.resolve() != newest.resolve():
            message = (
                f"is followed by {newest.name}; `resume: auto` continues from the newest good one, "
                "`sgt-ds growth rollback RUN --to STEP` sets later ones aside"
            )
            raise UserError(path, "resume", message)
    elif newest is None and (saved := _config_of(path)) is not None:
        differences = config_differences(saved, config)
        if differences:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            message = (
                f"resume continues the same run{more}; keep its settings, or use `fork: {path}`"
            )
            raise UserError(path, differences[0], message)


def _config_of(checkpoint: Path) -> RunConfig | None:
    """The configuration of a checkpoint; None where it can't be read, which loading tells."""
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        return RunConfig.model_validate(state["config"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def check_only_run(
    config: RunConfig,
    config_file: str | Path,
    *given: Path | None,
    is_given: Callable[[Path], bool] = lambda _: False,
) -> None:
    """Raises: UserError where `run_dir` holds what no run wrote; then it is someone else's folder.

    `config_file`, `given`: files of the user's for this run, which may be there, as may whatever
    the configuration names, and what `is_given` says is such a file.
    """
    layout = RunLayout(config.run_dir)
    named = (Path(config_file), *given, *_paths_in(config.model_dump(exclude={"run_dir"})))
    mine = [path.resolve() for path in named if path is not None]
    try:
        strangers = [
            entry
            for entry in layout.strangers()
            # A start writes its own run.yaml.
            if entry == layout.config
            or not (any(own.is_relative_to(entry.resolve()) for own in mine) or is_given(entry))
        ]
    except OSError as error:
        message = refusal(error, "read", instead="choose another")
        raise UserError(error.filename or config.run_dir, "run_dir", message) from None
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise UserError(
            config.run_dir,
            "run_dir",
            f"holds {strangers[0].name}{more}, which is not part of an sgt-ds run; give a new or "
            "empty folder",
        )


def _paths_in(values: Any) -> Iterator[Path]:
    """Every path that a configuration names."""
    if isinstance(values, Path):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _paths_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _paths_in(value)


def prepare_run_directory(config: RunConfig, *, resuming: bool) -> None:
    """Make the run directory; for a run that is new there, save the resolved configuration.

    `resuming`: whether it holds this run, which may still turn out to read other data. Otherwise a
    journal that a refused start left goes, and what came before a checkpoint of another directory
    that `resume` names is brought along.

    Raises: UserError where it cannot be written.
    """
    layout = RunLayout(config.run_dir)
    with writing(config.run_dir, "run_dir"):
        for folder in (layout.checkpoints, layout.logs, layout.control):
            folder.mkdir(parents=True, exist_ok=True)
        if not resuming:
            layout.journal.unlink(missing_ok=True)
            if isinstance(config.resume, Path):
                _bring_history(RunLayout(config.resume.resolve().parent.parent), layout)
    if not resuming:
        save_run_config(config)


def save_run_config(config: RunConfig) -> None:
    """Write the resolved configuration, with the start that the run had.

    Raises: UserError where it cannot be written.
    """
    begun = _begun(RunLayout(config.run_dir))
    # Absolute: a later resume may be called from another working directory.
    starts: dict[str, object] = {key: at.absolute() for key, at in _starts(begun or config)}
    if begun is not None:
        given = "auto" if isinstance(config.resume, Path) else config.resume
        starts = {"init": None, "fork": None, "resume": given, **starts}
    config = config.model_copy(update=starts)
    with writing(config.run_dir, "run_dir"):
        write_text_atomically(RunLayout(config.run_dir).config, dump_run_config(config))


def _bring_history(parent: RunLayout, own: RunLayout) -> None:
    """Copy journal and metrics; what lies past the checkpoint is cut off when it is loaded."""
    if parent.run_dir != own.run_dir.resolve():
        for there, here in ((parent.journal, own.journal), (parent.metrics, own.metrics)):
            if there.is_file():
                shutil.copyfile(there, here)
