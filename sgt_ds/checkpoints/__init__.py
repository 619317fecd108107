"""Atomic checkpoints: saved by all ranks, verified before use, rotated.

`Saver`, `save`, `load`, `load_weights_only`, `newest_good_for_all` and `from_first` are collective
and need torch; the others read a folder and do not, so that commands start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgt_ds.checkpoints.manifest import MANIFEST_NAME, STATE_NAME, Manifest, read_manifest
from sgt_ds.checkpoints.reading import being_read
from sgt_ds.checkpoints.retention import Retention, settle
from sgt_ds.checkpoints.rollback import checkpoint_until, newer_than, set_aside
from sgt_ds.checkpoints.start import Start, read_start, seal_start
from sgt_ds.checkpoints.store import (
    LATEST_NAME,
    CheckpointInfo,
    bytes_to_verify,
    folder_name,
    list_checkpoints,
    newest_good,
    pointer_fault,
    read_latest,
    read_state,
    remove_leftovers,
    resolve,
    verify,
)
from sgt_ds.lazy import lazy_exports

if TYPE_CHECKING:
    from sgt_ds.checkpoints.agreement import SaveFailed, agree_on_input, from_first
    from sgt_ds.checkpoints.loading import load, load_weights_only, newest_good_for_all
    from sgt_ds.checkpoints.payload import load_payload
    from sgt_ds.checkpoints.saving import Saved, Saver, save

__all__ = [
    "LATEST_NAME",
    "MANIFEST_NAME",
    "STATE_NAME",
    "CheckpointInfo",
    "Manifest",
    "Retention",
    "SaveFailed",
    "Saved",
    "Saver",
    "Start",
    "agree_on_input",
    "being_read",
    "bytes_to_verify",
    "checkpoint_until",
    "folder_name",
    "from_first",
    "list_checkpoints",
    "load",
    "load_payload",
    "load_weights_only",
    "newer_than",
    "newest_good",
    "newest_good_for_all",
    "pointer_fault",
    "read_latest",
    "read_manifest",
    "read_start",
    "read_state",
    "remove_leftovers",
    "resolve",
    "save",
    "seal_start",
    "set_aside",
    "settle",
    "verify",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "agreement": ("SaveFailed", "agree_on_input", "from_first"),
        "loading": ("load", "load_weights_only", "newest_good_for_all"),
        "payload": ("load_payload",),
        "saving": ("Saved", "Saver", "save"),
    },
)
