"""The checkpoint of a conversion: found, its state read into types, verified."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sgt_ds import checkpoints
from sgt_ds.config import ModelConfig
from sgt_ds.errors import ALLOW_ACCESS, UserError
from sgt_ds.growth import Passes, State, passes_at
from sgt_ds.progress import Progress


@dataclass(frozen=True)
class Source:
    """A verified checkpoint and what its state says."""

    path: Path
    model: ModelConfig
    method: str
    state: State
    step: int
    passes: dict[int, Passes]
    """What each looping layer runs in the update after `step`."""
    tokenizer: Path | None
    tokenizer_sha256: str | None
    """Of the file that training read, in hex; None where an older version wrote the checkpoint."""
    tokenizer_ids: int | None
    """How many ids that one has; None as above."""
    sequence_length: int | None
    tokens: int | None
    flops: dict[str, int]
    versions: str


def find_checkpoint(given: Path, tag: str | None) -> Path:
    """The checkpoint folder that `given` and `tag` mean.

    `given`: a run, its folder of checkpoints, or one checkpoint; the newest one without a tag. An
    older one is never taken in silence because the newest is damaged.
    Raises: UserError where there is none.
    """
    folders = [folder for folder in (given / "checkpoints", given) if folder.is_dir()]
    if not folders:
        raise UserError(
            given,
            None,
            "no such run or checkpoint; give a run directory, its checkpoints/, or one of them",
        )
    found = next(filter(None, map(checkpoints.list_checkpoints, folders)), [])
    files = (checkpoints.MANIFEST_NAME, checkpoints.STATE_NAME)
    is_one = any((given / name).exists() for name in files)
    if tag is not None:
        wanted = checkpoints.folder_name(int(tag)) if tag.isdecimal() else tag
        for info in found:
            if info.path.name == wanted:
                return info.path
        if is_one and given.resolve().name == wanted:
            return given
        names = ", ".join(info.path.name for info in found) or "none"
        raise UserError(given, "--tag", f"'{tag}' is not a checkpoint here; available: {names}")
    if found:
        return found[0].path
    if is_one:
        return given
    raise UserError(given, None, "holds no checkpoints; name a run, or one of its checkpoints")


def verify_source(path: Path) -> None:
    """Read every file of the checkpoint. Raises: UserError where one is damaged or missing."""
    with Progress("verify", checkpoints.bytes_to_verify(path), "B") as progress:
        faults = checkpoints.verify(path, progress.advance)
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            remedy = "" if faults[0].endswith(ALLOW_ACCESS) else f"; {_another(path)}"
            raise UserError(path, None, f"{faults[0]}{more}{remedy}")


def _another(path: Path) -> str:
    """What to take in place of a damaged checkpoint."""
    folder = path.parent
    whole = [info for info in checkpoints.list_checkpoints(folder) if info.fault is None]
    if any(info.path.name != path.name for info in whole):
        return f"use one that `sgt-ds checkpoint verify {folder}` reports as good"
    return "no other one here is complete; restore it from a copy, or retrain"


def read_source(path: Path) -> Source:
    """What the state of the checkpoint `path` says. Raises: UserError where no run wrote it."""
    file, values = path / checkpoints.STATE_NAME, checkpoints.read_state(path)
    key = "model"
    try:
        model = ModelConfig.model_validate(values["model"])
        key = "state"
        state = State.from_json(values["state"])
        key = "step"
        step, method = int(values["step"]), str(values["method"])
        key = "interval"
        passes = passes_at(
            state,
            step,
            entry=values["entry"],
            interval=int(values["interval"]),
            num_heads=model.num_heads,
        )
        key = "flops"
        flops = {str(name): int(value) for name, value in values["flops"].items()}
    except KeyError as error:
        raise UserError(file, str(error).strip("'"), "is missing; not the state of a run") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (key, *first["loc"])))
        raise UserError(file, where, f"{first['msg']}; use another checkpoint") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(file, key, f"is not as written by a run ({error})") from None
    for layer, loop in state.loops.items():
        if not 0 <= layer < model.num_layers or not _heads_exist(loop.heads, model.num_heads):
            raise UserError(file, f"state.loops.{layer}", "does not match the model's shape")
    tokenizer, tokens, length = (values.get(k) for k in ("tokenizer", "tokens", "sequence_length"))
    versions = ", ".join(
        f"{name} {values[key]}"
        for name, key in (("sgt-ds", "version"), ("torch", "torch"), ("DeepSpeed", "deepspeed"))
        if key in values
    )
    sha256, ids = values.get("tokenizer_sha256"), values.get("tokenizer_ids")
    return Source(
        path=path,
        model=model,
        method=method,
        state=state,
        step=step,
        passes=passes,
        tokenizer=None if tokenizer is None else Path(tokenizer),
        tokenizer_sha256=sha256 if isinstance(sha256, str) else None,
        tokenizer_ids=ids if type(ids) is int else None,
        sequence_length=length,
        tokens=tokens,
        flops=flops,
        versions=versions,
    )


def _heads_exist(heads: tuple[int, ...] | None, num_heads: int) -> bool:
    return heads is None or all(0 <= head < num_heads for head in heads)


def exported_loops(source: Source) -> dict[str, dict[str, Any]]:
    """`loops` of the export's config.json: Θ, and this step's factors where a loop is entering.

    `scale` maps each head that is computed to its factors, one a pass; heads whose factor is 0 in
    every pass, and which do not stay, are left out.
    """
    loops: dict[str, dict[str, Any]] = {}
    for layer, loop in source.state.loops.items():
        entry: dict[str, Any] = {
            "depth": loop.depth,
            "heads": None if loop.heads is None else list(loop.heads),
            "scope": loop.scope,
        }
        run = source.passes[layer]
        computed = tuple(range(source.model.num_heads)) if run.heads is None else run.heads
        # At the first step of a window the leaving heads still have the factor 1.
        if run.scale is not None and (
            computed != loop.heads or any(factor != 1.0 for row in run.scale for factor in row)
        ):
            columns = dict(zip(computed, zip(*run.scale, strict=True), strict=True))
            entry["scale"] = {
                str(head): list(column)
                for head, column in columns.items()
                if any(column) or head in (loop.heads or ())
            }
        loops[str(layer)] = entry
    return loops
