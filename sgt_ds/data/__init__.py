"""Data: C4 files to token shards, and shards to global batches. Imports config only."""

from sgt_ds.data.loader import GlobalOrder, Loader, validation_batches
from sgt_ds.data.permutation import Permutation
from sgt_ds.data.token_set import (
    TokenSet,
    check_data,
    check_tokenizer_file,
    open_token_set,
)

__all__ = [
    "GlobalOrder",
    "Loader",
    "Permutation",
    "TokenSet",
    "check_data",
    "check_tokenizer_file",
    "open_token_set",
    "validation_batches",
]
