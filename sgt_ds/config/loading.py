"""RUN.yaml and `key=value` overrides in, a `RunConfig` or one clear line out. Knows no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sgt_ds.config.messages import in_plain_words, suggestion_for
from sgt_ds.config.model import PRESETS
from sgt_ds.config.run import RunConfig
from sgt_ds.config.sections import fields_at, info_at, is_secret, section_at, section_of
from sgt_ds.config.shipped import shipped_config, shipped_names
from sgt_ds.config.suggestions import hint, nearest
from sgt_ds.errors import HERE, UserError, refusal

# What may differ between a run and its resumption: where it writes and reports, how it is cut into
# micro-batches and executed. Everything else is the run's identity.
NOT_IDENTITY = frozenset(
    {
        "preset",
        "run_dir",
        "resume",
        "fork",
        "init",
        "deepspeed",
        "telemetry",
        "checkpoint",
        "evaluation",
        "growth.layers.chosen",  # follows from what stands beside it
        "training.micro_batch_size",
        "training.validate_every",
        "training.validation_sequences",
        "training.log_every",
        "training.activation_checkpointing",
        "training.fp8",
        "training.compile",
        "training.compile_ahead",
        "training.compile_cache",
        "training.max_skipped_steps",
        "training.compare_ranks_every",
        "training.collective_timeout_seconds",
        "training.hang_seconds",
        # What is read, wherever it lies, is told by each checkpoint: the loader compares it.
        "data.train",
        "data.validation",
        "data.exhausted",
        "data.cache_dir",
        "data.cache_bytes",
        "data.accept_changed",
    }
)


# Of a DeepSpeed file, none of which a run has.
_DEEPSPEED_KEYS = frozenset(
    {"zero_optimization", "bf16", "fp16", "train_batch_size", "train_micro_batch_size_per_gpu"}
)
# Of a run, none of which a DeepSpeed file has.
_RUN_KEYS = frozenset({"preset", "model", "data", "training", "run_dir"})


class _StrictLoader(yaml.SafeLoader):
    """YAML as PyYAML reads it, but a key that stands twice is an error, not a silent override."""


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key '{key}' is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run configuration, apply `key=value` overrides, and check all of it.

    `path`: from the current directory, or `ds_configs/NAME.yaml` as the package brings it.
    `overrides`: dotted keys with YAML values, as `growth.k_max=2`; `deepspeed=F` included.
    Raises: UserError naming the file, the full path of the key and the remedy.
    """
    values = _read_yaml(path)
    for override in overrides:
        _apply_override(values, override)
    try:
        return _checked(path, values)
    except UserError as error:
        if overrides and _is_sound(path):
            raise UserError(HERE, error.field, error.message) from None
        raise


def _checked(path: Path, values: dict[str, Any]) -> RunConfig:
    """Raises: UserError of `path`."""
    _check_preset(path, values)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise _as_user_error(path, error) from None
    _check_paths(path, config)
    return config


def _check_paths(file: Path, config: RunConfig) -> None:
    """Raises: UserError of `file` where a path, or another text, is none that a system takes."""
    for key, value in _texts(config.model_dump(), ()):
        if "\0" in str(value):
            raise UserError(file, key, "contains a NUL character; remove it")
        if isinstance(value, Path):
            try:
                value.stat()
            except OSError as error:  # whether it may be missing is known elsewhere
                if error.errno == errno.ELOOP:
                    message = (
                        f"{value} is a link that leads back to itself; name what it stands for"
                    )
                    raise UserError(file, key, message) from None


def _texts(value: object, key: tuple[str, ...]) -> Iterator[tuple[str, str | Path]]:
    """Every path and text of a configuration, under its dotted key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, (*key, str(name)))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, (*key, str(number)))
    elif isinstance(value, str | Path):
        yield ".".join(key), value


def key_of_path(path: Path, run: Path, overrides: Sequence[str]) -> str | None:
    """The key of a run that names `path`, or the nearest folder around it; None without one."""
    try:
        texts = _texts(load_run_config(run, overrides).model_dump(), ())
        named = {
            Path(value).absolute(): key
            for key, value in texts
            if isinstance(value, Path) or key.endswith(".path")
        }
    except (UserError, OSError):
        return None
    whole = path.absolute()
    return next((named[each] for each in (whole, *whole.parents) if each in named), None)


def _is_sound(path: Path) -> bool:
    """Whether the file alone is a configuration: what is wrong was then said beside it."""
    try:
        _checked(path, _read_yaml(path))
    except UserError:
        return False
    return True


def at_fault(error: UserError, run: Path, overrides: Sequence[str]) -> UserError:
    """The error as it is told: a fault of a key that an override gives is none of the YAML's.

    Where it lies between the YAML and keys of overrides that its message names, those are told.
    """
    if error.file != str(run):
        return error
    keys = [override.partition("=")[0] for override in overrides]
    file, message = HERE, error.message
    if not any(f"{error.field or ''}.".startswith(f"{key}.") for key in keys):
        named = [key for key in keys if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", message)]
        if not named:
            return error
        file, message = error.file, f"{message} (the command line sets {', '.join(named)})"
    return UserError(file, error.field, message, everywhere=error.everywhere)


def config_differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys of the run's identity in which two configurations differ, as `key: old -> new`."""
    before, after = dict(_identity(old)), dict(_identity(new))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the run's identity, in hex: the same at every world size and micro-batch."""
    text = json.dumps(dict(_identity(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def dump_run_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, each key under the text that documents it."""
    return "\n".join(_commented_lines(config, indent=0)) + "\n"


def _read_yaml(path: Path) -> dict[str, Any]:
    found = path if path.exists() else shipped_config(path) or path
    try:
        text = found.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            path,
            None,
            "no such configuration file; check the path, relative to the current directory, or "
            f"use one that sgt-ds ships: {shipped_names('.yaml')}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, None, refusal(error, "read", "give a UTF-8 YAML file")) from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise UserError(
            path, None, "is nested too deeply; a run configuration has two levels"
        ) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else None
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(path, where, f"is not valid YAML: {problem}; correct it") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(path, None, "must hold keys and values, e.g. `preset: 573m`")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(
            f"override '{override}'", None, "must have the form key=value, e.g. growth.k_max=2"
        )
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        # Without the value: it may be a secret.
        raise UserError(HERE, key, f"value is not valid YAML: {problem}") from None
    *parents, leaf = key.split(".")
    place = values
    for parent in parents:
        child = place.setdefault(parent, {})
        if child is None:
            child = place[parent] = {}
        if isinstance(child, list):
            raise UserError(HERE, key, _as_whole_list(key, parent, value))
        if not isinstance(child, dict):
            raise UserError(HERE, key, f"'{parent}' is a value, not a section; shorten the path")
        place = child
    place[leaf] = value


def _as_whole_list(key: str, parent: str, value: Any) -> str:
    """How to say an override that reaches into a list, whose entries have no keys of their own."""
    *path, leaf = key.split(".")
    at = path.index(parent)
    inner = {leaf: value} if len(path) > at + 1 else value
    info = info_at(path[: at + 1])
    form = _list_form(info, inner) if info else "[…]"
    return f"'{parent}' is a list; give all of it, e.g. {'.'.join(path[: at + 1])}={form}"


def _list_form(info: FieldInfo, value: Any) -> str:
    """What a list of that key looks like, with `value` as one entry where it can be one."""
    section = section_of(info)
    if section is None:
        example = list(info.get_default() or [])
        is_one = not isinstance(value, dict | list | tuple) and value is not None
        return _flow([value] if is_one and len(example) < 2 else example or ["…"])
    needed = [name for name, field in section.model_fields.items() if field.is_required()]
    entry = dict.fromkeys(needed, "…")
    if isinstance(value, dict):
        entry |= {name: inner for name, inner in value.items() if name in section.model_fields}
    elif isinstance(value, str) and len(needed) == 1:
        entry[needed[0]] = value
    return _flow([entry])


def _form(info: FieldInfo) -> str:
    """How to write a key that holds only a list or a section; '' where it may be more."""
    section, kinds = section_of(info), {*get_args(info.annotation), NoneType}
    if get_origin(info.annotation) in (list, tuple):
        return f"; give a list, e.g. {_list_form(info, None)}"
    if section is None or (info.annotation is not section and kinds != {section, NoneType}):
        return ""
    needed = {name: "…" for name, inner in section.model_fields.items() if inner.is_required()}
    if needed:
        return f"; give its keys, e.g. {_flow(needed)}"
    return f"; set keys in it: {', '.join(section.model_fields)}"


def _default_hint(info: FieldInfo) -> str:
    """What a key is set to where nobody sets it, as a hint; or just that it is to be set right."""
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    return "; correct it" if default in (None, "") else f"; correct it (default: {default})"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, sort_keys=False, default_flow_style=True, width=1000, allow_unicode=True
    )
    return text.strip()


def _check_preset(path: Path, values: Mapping[str, Any]) -> None:
    if (mine := _DEEPSPEED_KEYS & values.keys()) and not _RUN_KEYS & values.keys():
        message = f"is a DeepSpeed file (it has {', '.join(sorted(mine))})"
        raise UserError(path, None, f"{message}; give a RUN.yaml whose `deepspeed` names it")
    name = values.get("preset")
    if name is None:
        if "model" not in values:
            raise UserError(
                path, "preset", f"is missing; name one of {', '.join(PRESETS)}, or give `model`"
            )
        return
    if not isinstance(name, str) or name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(
            path, "preset", f"'{name}' is unknown{nearest(str(name), PRESETS)}; known: {known}"
        )


def _as_user_error(path: Path, error: ValidationError) -> UserError:
    detail = _cause(error)
    # pydantic adds the tried union member (a type's name) to the location: not a key of the user's.
    location = _keys_of(detail["loc"])
    field = ".".join(location) or None
    if detail["type"] == "extra_forbidden":
        return UserError(path, field, f"unknown key{hint(location[-1], location[:-1])}")
    if detail["type"] == "missing":
        lacking = _lacking_beside(error, detail)
        if len(lacking) > 1:
            keys = ", ".join(lacking)
            return UserError(path, ".".join(location[:-1]) or None, f"lacks {keys}; add them")
        return UserError(path, field, "is missing; add it")
    if detail["type"] == "invalid_key":
        message = f"{location[-1]} is not a key; in {{…}}, write 5035 rather than 5,035"
        return UserError(path, ".".join(location[:-1]) or None, message)
    info = info_at(location)
    message = in_plain_words(detail, info.get_default() if info else None)
    if detail["type"] == "value_error":
        if info is not None and isinstance(detail.get("input"), bool):
            return UserError(path, field, f"{message}{_form(info) or _default_hint(info)}")
        key, separator, rest = message.partition(": ")
        if separator and field is None and " " not in key:  # a check across sections names its key
            return UserError(path, key, rest)
        return UserError(path, field, message)
    if detail.get("input") is None:
        return UserError(path, field, "is empty; give a value")
    if detail["type"] == "model_type":
        keys = ", ".join(fields_at(location))
        return UserError(path, field, f"is a section, not a value; set keys in it: {keys}")
    if detail["type"] in ("list_type", "tuple_type") and info is not None:
        message = f"must be a list, e.g. {_list_form(info, detail.get('input'))}"
    got = "" if is_secret(location) else f" (got {detail.get('input')!r})"
    return UserError(path, field, f"{message}{got}{suggestion_for(detail)}")


def _cause(error: ValidationError) -> ErrorDetails:
    """The one of several faults that explains the others."""

    def rank(detail: ErrorDetails) -> tuple[bool, bool]:
        # A misspelt key often leaves the right one missing. Of a value that may be one of several
        # kinds, keys were meant for a section: what that one lacks tells more than that it is one.
        inside = detail["type"] == "missing" and len(detail["loc"]) > 1
        return detail["type"] != "extra_forbidden", not inside

    return min(error.errors(), key=rank)


def _lacking_beside(error: ValidationError, detail: ErrorDetails) -> list[str]:
    """All keys that the section lacks in which `detail` misses one."""
    section = detail["loc"][:-1]
    return [
        str(one["loc"][-1])
        for one in error.errors()
        if one["type"] == "missing" and one["loc"][:-1] == section
    ]


def _keys_of(location: Sequence[str | int]) -> list[str]:
    """The keys of a pydantic location, without the names of the union members that it tried."""
    keys: list[str] = []
    for part in location:
        section = section_at(keys)
        if isinstance(part, str) and keys and (section is None or part == section.__name__):
            continue
        if isinstance(part, str) and ("[" in part or part.startswith("constrained-")):
            continue
        keys.append(str(part))
    return keys


def _identity(config: RunConfig) -> Iterator[tuple[str, Any]]:
    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if prefix in NOT_IDENTITY:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            yield prefix, value

    yield from walk("", config.model_dump(mode="json"))


def _commented_lines(section: BaseModel, indent: int) -> Iterator[str]:
    pad = "  " * indent
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if info.description:
            yield f"{pad}# {' '.join(info.description.split())}"
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _commented_lines(value, indent + 1)
        else:
            plain = section.model_dump(mode="json", include={name})
            text = yaml.safe_dump(plain[name], sort_keys=False, default_flow_style=True, width=1000)
            yield f"{pad}{name}: {text.removesuffix('...' + chr(10)).strip()}"
