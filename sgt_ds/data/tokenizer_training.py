"""`tokenizer train`: a SentencePiece model (BPE, byte fallback) from a sample of C4 files.

Deterministic: the sample is chosen and ordered by a hash of each document, so neither the order of
the inputs nor how they are cut into files changes the model; only the set of documents does.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from sgt_ds.data.decompress import Damage
from sgt_ds.data.file_work import fault_error
from sgt_ds.data.inputs import HashingReader, InputFile, expand_inputs
from sgt_ds.data.readers import MAX_DOCUMENT_BYTES, Document, read_documents
from sgt_ds.errors import UserError, refusal
from sgt_ds.files import output_writer
from sgt_ds.progress import Progress

SAMPLE_BYTES = 100_000_000
# SentencePiece's own limit on a sentence; longer lines are cut at a space.
_SENTENCE_BYTES = 4000
UNKNOWN_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3
_SPECIAL_IDS = 4
_LEAVE_OUT = "leave it out of the inputs"
# What SentencePiece says of a vocabulary that does not fit, with the number that would.
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
_TOO_LARGE = re.compile(r"too high \(\d+\)\. Please set it to a value <= (\d+)")


@dataclass(frozen=True)
class TrainedTokenizer:
    """What was trained, and on what."""

    path: str
    vocab_size: int
    sha256: str
    documents: int
    """Documents of the inputs."""
    sampled_documents: int
    sampled_bytes: int


def train_tokenizer(
    inputs: Sequence[str], vocab_size: int, out: Path, *, sample_bytes: int = SAMPLE_BYTES
) -> TrainedTokenizer:
    """Train on at most `sample_bytes` of text and write the model to `out`.

    Text is kept as it is: no normalisation, no added space, unknown characters as bytes; so that
    decoding gives it back. Ids: unknown 0, BOS 1, EOS 2, padding 3.
    Raises: UserError where an input is damaged, or the vocabulary does not fit the text.
    """
    import sentencepiece

    if out.is_dir():
        raise UserError(out, "--out", "is a directory; give a file, e.g. tokenizer.model")
    documents, sample = _sample(inputs, sample_bytes)
    if not sample:
        raise UserError(inputs[0], None, "contains no documents; give more input")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_sentences(sample)),
            model_writer=model,
            model_type="bpe",
            vocab_size=max(vocab_size, _SPECIAL_IDS),  # with fewer it tells no number
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=UNKNOWN_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
            max_sentence_length=2 * _SENTENCE_BYTES,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError("--vocab-size", None, _vocabulary_fault(vocab_size, str(error))) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with output_writer(out) as stream:
            stream.write(model.getvalue())
    except OSError as error:
        raise UserError(out, "--out", refusal(error, "written", instead="give another")) from None
    return TrainedTokenizer(
        path=str(out),
        vocab_size=vocab_size,
        sha256=hashlib.sha256(model.getvalue()).hexdigest(),
        documents=documents,
        sampled_documents=len(sample),
        sampled_bytes=sum(len(content) for content in sample),
    )


def _vocabulary_fault(vocab_size: int, said: str) -> str:
    if found := _TOO_SMALL.search(said):
        return (
            f"{vocab_size} is too small: 256 bytes, {_SPECIAL_IDS} special ids and the characters "
            f"of this text need {found[1]}; give {found[1]} or more"
        )
    if found := _TOO_LARGE.search(said):
        return (
            f"{vocab_size} is more than this text yields; give {found[1]} or less, or more text "
            "(inputs, --sample-bytes)"
        )
    return f"{vocab_size} does not fit this text: {' '.join(said.split())[-200:]}"


def _sample(inputs: Sequence[str], limit: int) -> tuple[int, list[bytes]]:
    """Number of documents read, and those of lowest hash that fit in `limit` bytes, by hash."""
    files = expand_inputs(inputs)
    # A heap with the highest hash on top: that document goes when the sample is too large.
    heap: list[tuple[int, bytes]] = []
    size = documents = 0
    bound = 1 << 64
    with Progress("read", sum(file.bytes for file in files), "B") as progress:
        for file in files:
            read = 0
            for document, position in _documents(file):
                documents += 1
                progress.advance(position - read)
                read = position
                key = xxhash.xxh3_64_intdigest(document.content)
                if key >= bound:
                    continue
                heapq.heappush(heap, (-key, document.content))
                size += len(document.content)
                while size > limit and len(heap) > 1:
                    key_out, content = heapq.heappop(heap)
                    size -= len(content)
                    bound = min(bound, -key_out)
            progress.advance(file.bytes - read)
    return documents, [content for _, content in sorted(heap, reverse=True)]


def _documents(file: InputFile) -> Iterator[tuple[Document, int]]:
    """Documents of a file, each with the bytes of the file read so far."""
    try:
        reader = HashingReader(file)
    except Damage as damage:
        raise fault_error(file.location, 0, damage.reason, damage.detail, _LEAVE_OUT) from None
    try:
        for found in read_documents(reader, MAX_DOCUMENT_BYTES):
            if not isinstance(found, Document):
                raise fault_error(file.location, found.line, found.reason, found.detail, _LEAVE_OUT)
            yield found, reader.bytes
    finally:
        reader.close()


def _sentences(sample: Sequence[bytes]) -> Iterator[str]:
    for content in sample:
        for line in content.decode().splitlines():
            rest = line
            while len(rest) > _SENTENCE_BYTES // 4 and len(rest.encode()) > _SENTENCE_BYTES:
                cut = rest.rfind(" ", 1, _SENTENCE_BYTES // 4)
                cut = cut if cut > 0 else _SENTENCE_BYTES // 4
                yield rest[:cut]
                rest = rest[cut:]
            if rest:
                yield rest
