"""`data verify` and `data inspect`: what is wrong with a prepared set, and what it holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sgt_ds.data.manifest import read_manifest
from sgt_ds.data.shards import REMEDY, Shard
from sgt_ds.data.token_set import TokenSet, open_token_set
from sgt_ds.data.tokenizers import Tokenizer
from sgt_ds.errors import ALLOW_ACCESS, UserError, refusal
from sgt_ds.files import sha256_of
from sgt_ds.progress import Progress


def verify(directory: Path) -> list[str]:
    """Read all of a set. Returns its faults, `file: fault`; empty for a good one.

    Finds any flipped byte, and any missing, foreign or truncated file.
    Raises: UserError where `directory` holds no finished set, or its manifest is damaged.
    """
    manifest = read_manifest(directory)
    faults: list[str] = []
    expected = manifest.files()
    for path in sorted(directory.iterdir()):
        if path.name not in expected:
            faults.append(f"{path}: is not part of this set; remove it")
    digests = {manifest.tokenizer.file: manifest.tokenizer.sha256}
    if manifest.skipped_list is not None:
        digests[manifest.skipped_list.file] = manifest.skipped_list.sha256
    faults += _digest_faults(directory, digests)
    with Progress("verify", sum(shard.bytes for shard in manifest.shards), "B") as progress:
        for entry in manifest.shards:
            faults += _shard_faults(directory / entry.file, entry.xxh3_128)
            progress.advance(entry.bytes)
    return faults


def check_first(token_set: TokenSet, tokens: int) -> None:
    """Read the shards of a local set that hold its first `tokens` tokens; remote ones were read.

    Raises: UserError of the first file whose checksum differs, the tokenizer's too.
    """
    if token_set.is_remote:
        return
    entries, manifest = [], token_set.manifest
    for entry in manifest.shards:
        entries.append(entry)
        tokens -= entry.tokens
        if tokens <= 0:
            break
    faults = _digest_faults(token_set.path, {manifest.tokenizer.file: manifest.tokenizer.sha256})
    with Progress("verify", sum(entry.bytes for entry in entries), "B") as progress:
        for entry in entries:
            faults = faults or _shard_faults(token_set.path / entry.file, entry.xxh3_128)
            progress.advance(entry.bytes)
    if faults:
        file, _, fault = faults[0].partition(": ")
        if fault.endswith(ALLOW_ACCESS):
            raise UserError(file, None, fault)
        raise UserError(
            file,
            None,
            f"{fault}; `sgt-ds data verify {token_set.path}` lists all damaged files: {REMEDY}",
        )


def _digest_faults(directory: Path, digests: dict[str, str]) -> list[str]:
    faults = []
    for name, digest in digests.items():
        path = directory / name
        if not path.is_file():
            faults.append(f"{path}: is missing")
        elif sha256_of(path) != digest:
            faults.append(f"{path}: does not match its checksum in the manifest")
    return faults


def _shard_faults(path: Path, checksum: str) -> list[str]:
    try:
        digest = xxhash.xxh3_128()
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        if digest.hexdigest() == checksum:
            return []
        found = [f"{path}: {fault}" for fault in Shard(path).faults()]
        return [fault.removesuffix(f"; {REMEDY}") for fault in found] or [
            f"{path}: is a valid shard, but not the one in the manifest"
        ]
    except FileNotFoundError:
        return [f"{path}: is missing"]
    except OSError as error:
        return [f"{path}: {refusal(error, 'read', REMEDY)}".removesuffix(f"; {REMEDY}")]
    except UserError as error:
        return [str(error).removesuffix(f"; {REMEDY}")]


def inspect(directory: Path, *, sample: int = 0, sample_tokens: int = 200) -> dict[str, Any]:
    """Counts, a histogram of document lengths, and a decoded document.

    `sample`: number of the document that is decoded, over all shards; `sample_tokens`: how much of
    it, at most.
    Raises: UserError where the set is unfinished or damaged, or has no such document.
    """
    token_set = open_token_set(directory)
    manifest = token_set.manifest
    lengths: Counter[int] = Counter()
    decoded = None
    before = 0
    tokenizer = Tokenizer(token_set.tokenizer_file, eos=manifest.tokenizer.eos_id)
    for place, entry in enumerate(manifest.shards):
        shard = token_set.shard(place)
        sizes = np.diff(shard.starts.astype(np.int64))
        powers, counts = np.unique(
            np.log2(np.maximum(sizes, 1)).astype(np.int64), return_counts=True
        )
        lengths.update(dict(zip(powers.tolist(), counts.tolist(), strict=True)))
        if before <= sample < before + entry.documents:
            document = shard.document(sample - before)[:sample_tokens]
            token_set.check_ids(place, document)
            decoded = tokenizer.decode(document.tolist())
        before += entry.documents
    if decoded is None:
        raise UserError(
            directory, "--sample", f"{sample} is out of range; the last document is {before - 1}"
        )
    return {
        "path": str(directory),
        "fingerprint": token_set.fingerprint,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "characters": manifest.characters,
        "characters_per_token": manifest.characters / max(manifest.tokens, 1),
        "dtype": manifest.dtype,
        "shards": len(manifest.shards),
        "tokenizer": manifest.tokenizer.model_dump(),
        "settings": manifest.settings.model_dump(),
        "document_lengths": [
            {"from": 2**power, "to": 2 ** (power + 1) - 1, "documents": lengths[power]}
            for power in sorted(lengths)
        ],
        "sample": {"document": sample, "text": decoded},
    }
