"""Data: C4 files to token shards, and shards to global batches. Imports config only."""

from sgt_ds.data.bench import PrepareBench, bench_prepare
from sgt_ds.data.checks import check_data, check_data_here, check_set, check_shards
from sgt_ds.data.loader import Loader, validation_batches
from sgt_ds.data.loader_bench import DataBench, bench_data
from sgt_ds.data.manifest import NAME as SET_MANIFEST
from sgt_ds.data.manifest import is_set
from sgt_ds.data.order import GlobalOrder
from sgt_ds.data.permutation import Permutation
from sgt_ds.data.prefetch import MicroBatch
from sgt_ds.data.preparation import Preparation, Report
from sgt_ds.data.prepare import prepare
from sgt_ds.data.remote import check_remote, is_remote, is_remote_set
from sgt_ds.data.rows import read_rows, read_texts
from sgt_ds.data.token_set import TokenSet, open_token_set
from sgt_ds.data.tokenizer_training import TrainedTokenizer, train_tokenizer
from sgt_ds.data.tokenizers import Tokenizer
from sgt_ds.data.verification import check_first, inspect, verify

__all__ = [
    "SET_MANIFEST",
    "DataBench",
    "GlobalOrder",
    "Loader",
    "MicroBatch",
    "Permutation",
    "Preparation",
    "PrepareBench",
    "Report",
    "TokenSet",
    "Tokenizer",
    "TrainedTokenizer",
    "bench_data",
    "bench_prepare",
    "check_data",
    "check_data_here",
    "check_first",
    "check_remote",
    "check_set",
    "check_shards",
    "inspect",
    "is_remote",
    "is_remote_set",
    "is_set",
    "open_token_set",
    "prepare",
    "read_rows",
    "read_texts",
    "train_tokenizer",
    "validation_batches",
    "verify",
]
