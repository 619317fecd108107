"""Keys and types of the run configuration, by section. Reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from sgt_ds.config.run import RunConfig


def fields_at(path: Sequence[str]) -> list[str]:
    """Names of the keys that the section at `path` knows; empty where no section is there."""
    section = section_at(path)
    return list(section.model_fields) if section else []


def section_at(path: Sequence[str]) -> type[BaseModel] | None:
    """The section at `path`, in which a number counts the entries of a list."""
    section: type[BaseModel] | None = RunConfig
    for part in path:
        if section is None:
            return None
        if not part.isdigit():
            info = section.model_fields.get(part)
            section = section_of(info) if info else None
    return section


def info_at(path: Sequence[str]) -> FieldInfo | None:
    """What is known of the key at `path`."""
    section = section_at(path[:-1]) if path else None
    return section.model_fields.get(path[-1]) if section else None


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, in a list or beside other kinds as well."""
    candidates = [info.annotation, *get_args(info.annotation)]
    for candidate in list(candidates):
        candidates.extend(get_args(candidate))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def is_secret(location: Sequence[str]) -> bool:
    """Whether the key holds a secret, by its type; the section that holds one counts as well."""
    info = info_at(location)
    holds = [info, *(_section_fields(info) if info else ())]
    return any(SecretStr in get_args(field.annotation) for field in holds if field)


def _section_fields(info: FieldInfo) -> Iterable[FieldInfo]:
    section = section_of(info)
    return section.model_fields.values() if section else ()
