"""The global order: nothing repeated, nothing dropped, whatever the ranks do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_sets import numbered_set, write_token_set

from sgt_ds.config import DataSource
from sgt_ds.data import GlobalOrder, Loader, Permutation, open_token_set, validation_batches
from sgt_ds.data.mixture import PERIOD
from sgt_ds.errors import UserError

LENGTH = 8


@given(st.integers(1, 20_000), st.integers(0, 2**63), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    images = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))


def test_permutation_of_a_trillion_needs_no_table_and_no_order_of_asking() -> None:
    permutation = Permutation(10**12, 7)
    indices = np.random.default_rng(0).integers(0, 10**12, 100_000)
    images = permutation(indices)
    assert 0 <= images.min() <= images.max() < 10**12
    assert len(np.unique(images)) == len(np.unique(indices))
    assert permutation(indices[77:78])[0] == images[77]
    # Uniform: mean of n uniform values lies within 5 standard errors.
    assert abs(images.mean() / 10**12 - 0.5) < 5 / np.sqrt(12 * len(images))
    # No serial correlation between neighbours.
    neighbours = permutation(np.arange(100_000)) / 10**12
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 5 / np.sqrt(100_000)


def test_permutation_of_few_reaches_all_orders_evenly() -> None:
    orders = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(4800))
    assert len(orders) == 24
    # Each of 24 is expected 200 times; 6 standard deviations.
    assert max(abs(count - 200) for count in orders.values()) < 6 * 200**0.5


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(0, 10**9),
)
@settings(max_examples=60, deadline=None)
def test_mixture_is_exact_in_every_window_of_1000(weights: list[float], start: int) -> None:
    order = GlobalOrder([10**9] * len(weights), weights, seed=0)
    sources, _ = order.mixture.locate(np.arange(start, start + PERIOD))
    counts = np.bincount(sources, minlength=len(weights))
    assert counts.tolist() == order.mixture.quotas
    exact = np.array(weights) / sum(weights) * PERIOD
    assert (abs(counts - exact) < 1).all()
    drawn = np.subtract(order.mixture.drawn(start + 137), order.mixture.drawn(start))
    assert drawn.tolist() == np.bincount(sources[:137], minlength=len(weights)).tolist()


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory: pytest.TempPathFactory) -> list[DataSource]:
    root = tmp_path_factory.mktemp("sets")
    return [
        DataSource(path=numbered_set(root / "a", [7, 30, 1, 0, 12], LENGTH, first=0), weight=3),
        DataSource(path=numbered_set(root / "b", [25], LENGTH, first=1000), weight=1),
    ]


@pytest.fixture(scope="module")
def three_sets(tmp_path_factory: pytest.TempPathFactory) -> list[DataSource]:
    root = tmp_path_factory.mktemp("sets")
    sets = {"a": ([20, 30], 0, 5), "b": ([25], 1000, 4), "c": ([1, 2], 2000, 0.5)}
    return [
        DataSource(path=numbered_set(root / name, counts, LENGTH, first=first), weight=weight)
        for name, (counts, first, weight) in sets.items()
    ]


def loader_of(
    sources: list[DataSource], batch: int, micro: int, rank: int, world: int, seed: int = 0
) -> Loader:
    return Loader(sources, LENGTH, batch, micro, rank, world, seed, pin_memory=False)


def global_batch(
    sources: list[DataSource], number: int, batch: int, micro: int, world: int, seed: int = 0
) -> list[int]:
    """Identities of the batch's sequences in global order, put together from all ranks."""
    shares = [
        [
            rows[:, 1].tolist()
            for rows, _ in loader_of(sources, batch, micro, rank, world, seed).read(number)
        ]
        for rank in range(world)
    ]
    return [
        sequence
        for step in range(batch // (micro * world))
        for rank in range(world)
        for sequence in shares[rank][step]
    ]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_changing_ranks_in_mid_epoch_repeats_nothing_and_drops_nothing(
    two_sets: list[DataSource], data: st.DataObject
) -> None:
    """Any cut of a batch into ranks and micro-batches, changed between any two batches."""
    batch = data.draw(st.sampled_from([4, 6, 12]))
    seed = data.draw(st.integers(0, 3))
    seen: list[int] = []
    number = 0
    while len(seen) < 200:
        world = data.draw(st.sampled_from([w for w in range(1, batch + 1) if batch % w == 0]))
        share = batch // world
        micro = data.draw(st.sampled_from([m for m in range(1, share + 1) if share % m == 0]))
        rows = global_batch(two_sets, number, batch, micro, world, seed)
        assert rows == global_batch(two_sets, number, batch, batch, 1, seed)
        seen += rows
        number += 1
    # Source a holds sequences 0 … 49, b 1000 … 1024: each epoch holds each once, reshuffled.
    for first, size in ((0, 50), (1000, 25)):
        own = [value for value in seen if first <= value < first + size]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert epochs
        for epoch in epochs:
            assert sorted(epoch) == list(range(first, first + size))
        if len(epochs) > 1:
            assert epochs[0] != epochs[1]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_an_epochs_end_or_another_share_of_ranks_shifts_a_mixture(
    three_sets: list[DataSource], data: st.DataObject
) -> None:
    """Sources of unlike size and weight pass the ends of their epochs at unlike places, at any cut."""
    batch = data.draw(st.sampled_from([6, 10, 16]))
    seed = data.draw(st.integers(0, 3))
    number = data.draw(st.integers(0, 60))
    order = loader_of(three_sets, batch, 1, 0, 1, seed).order
    drawn_before = order.mixture.drawn(number * batch)
    seen: list[int] = []
    for later in range(data.draw(st.integers(2, 12))):
        world = data.draw(st.sampled_from([w for w in range(1, batch + 1) if batch % w == 0]))
        share = batch // world
        micro = data.draw(st.sampled_from([m for m in range(1, share + 1) if share % m == 0]))
        seen += global_batch(three_sets, number + later, batch, micro, world, seed)
    for source, (first, size) in enumerate(((0, 50), (1000, 25), (2000, 3))):
        own = [value - first for value in seen if first <= value < first + 1000]
        begin = drawn_before[source]
        quota = order.mixture.quotas[source]
        assert abs(len(own) - len(seen) * quota / PERIOD) < 2
        # Turn k of a source is place k mod size of epoch k // size: whole epochs hold each once.
        for epoch in range(begin // size, (begin + len(own)) // size + 1):
            low, high = max(begin, epoch * size), min(begin + len(own), (epoch + 1) * size)
            part = own[low - begin : max(high - begin, low - begin)]
            assert len(set(part)) == len(part)
            if len(part) == size:
                assert sorted(part) == list(range(size))


def test_stopping_when_a_source_is_exhausted_repeats_or_leaves_out_more_than_a_batch(
    three_sets: list[DataSource],
) -> None:
    for batch in (4, 12):
        loader = Loader(three_sets, LENGTH, batch, 2, 0, 1, 5, exhausted="stop", pin_memory=False)
        end = loader.last_batches
        assert end is not None
        sizes = np.array([50, 25, 3])
        assert (np.array(loader.order.mixture.drawn(end * batch)) <= sizes).all()
        assert (np.array(loader.order.mixture.drawn((end + 1) * batch)) > sizes).any()
        with loader:
            seen: list[int] = []
            while not loader.is_exhausted:
                seen += [v for part in loader.next_step() for v in part.tokens[:, 1].tolist()]
            assert len(set(seen)) == len(seen) == end * batch
            with pytest.raises(ValueError, match="exhausted"):
                loader.next_step()
        name = loader.exhausted_source
        assert name in {str(source.path) for source in three_sets}
    assert loader_of(three_sets, 4, 2, 0, 1).last_batches is None


def test_a_document_start_is_told_at_another_place(tmp_path: Path) -> None:
    """Against each token's document, written into the token itself."""
    generator = np.random.default_rng(3)
    shards = []
    for shard in range(3):
        lengths = generator.choice([0, 1, 2, 5, 40], 60)
        lengths[:3] = 1
        numbers = np.repeat(np.arange(len(lengths)), lengths) + 100 * shard
        shards.append(np.split(numbers, np.cumsum(lengths)[:-1]))
    source = DataSource(path=write_token_set(tmp_path / "set", shards))
    with Loader([source], LENGTH, 12, 3, 1, 2, 0, document_starts=True, pin_memory=False) as loader:
        read = [part for _ in range(6) for part in loader.next_step()]
    token_set = open_token_set(source.path)
    read += list(validation_batches(token_set, LENGTH, 99, 4, 0, 1, document_starts=True))
    assert len(read) > 12
    for tokens, starts in read:
        assert starts is not None
        assert starts.shape == (len(tokens), LENGTH)
        for row, told in zip(tokens[:, :-1].tolist(), starts.tolist(), strict=True):
            assert told == [row.index(document) for document in row]


def test_what_differs_from_a_checkpoint_is_not_named(tmp_path: Path) -> None:
    sources = [
        DataSource(path=numbered_set(tmp_path / "a", [10], LENGTH)),
        DataSource(path=numbered_set(tmp_path / "b", [11], LENGTH)),
    ]
    before = loader_of(sources, 4, 1, 0, 1)
    assert before.differences(before.identity) == []
    other = DataSource(path=numbered_set(tmp_path / "c", [10], LENGTH, first=500))
    (told,) = loader_of([other, sources[1]], 4, 1, 0, 1).differences(before.identity)
    assert told.startswith(f"data.train.0 ({tmp_path / 'c'}): contents ")
    heavy = DataSource(path=sources[1].path, weight=3)
    told = "; ".join(loader_of([sources[0], heavy], 4, 1, 0, 1).differences(before.identity))
    assert f"data.train.1 ({tmp_path / 'b'}): per_thousand 500 -> 750" in told
    assert "data.train.0" in told
    told = "; ".join(loader_of(sources[:1], 4, 1, 0, 1).differences(before.identity))
    assert "data.train.1 was removed" in told
    short = Loader(sources, 4, 4, 1, 0, 1, 0, pin_memory=False).differences(before.identity)
    assert short == ["sequence_length 8 -> 4"]


def test_seeds_give_different_orders(two_sets: list[DataSource]) -> None:
    assert global_batch(two_sets, 0, 12, 12, 1, 0) != global_batch(two_sets, 0, 12, 12, 1, 1)


def test_prefetched_steps_equal_direct_reads_after_any_seek(two_sets: list[DataSource]) -> None:
    with loader_of(two_sets, 8, 2, 1, 2) as loader:
        for batch in (0, 1, 2, 40, 41, 3, 3, 4):
            if loader.batches != batch:
                loader.seek(batch)
            direct = [rows for rows, _ in loader.read(batch)]
            step = [micro_batch.tokens.numpy() for micro_batch in loader.next_step()]
            assert loader.batches == batch + 1
            assert np.array_equal(step, direct)
        # An iterator that was left half-way doesn't shift what follows.
        half = loader.next_step()
        next(half)
        step = [micro_batch.tokens.numpy() for micro_batch in loader.next_step()]
        assert np.array_equal(step, [rows for rows, _ in loader.read(6)])
        assert loader.wait_seconds > 0
        assert sum(loader.source_tokens.values()) == loader.batches * 8 * LENGTH


def test_an_error_of_the_prefetching_thread_reaches_the_trainer(tmp_path: Path) -> None:
    path = numbered_set(tmp_path / "a", [10], LENGTH)
    loader = loader_of([DataSource(path=path)], 2, 1, 0, 1)
    (path / "00000-000.tokens").unlink()
    for _ in range(2):  # the second time too: it must not wait for a dead thread
        with pytest.raises(UserError, match=r"00000-000\.tokens: is missing"):
            next(loader.next_step())


@pytest.mark.parametrize("damaged", [0, 1])
def test_an_id_that_no_tokenizer_has_goes_to_the_model_unnamed(
    tmp_path: Path, damaged: int
) -> None:
    sets = [
        write_token_set(
            tmp_path / name, [np.arange(2 * LENGTH + 1) for _ in range(3)], vocab_size=100
        )
        for name in "ab"
    ]
    shard = sets[damaged] / "00001-000.tokens"
    content = bytearray(shard.read_bytes())
    content[128 + 2 * LENGTH : 130 + 2 * LENGTH] = (100).to_bytes(2, "little")
    shard.write_bytes(content)
    said = rf"{shard}: tokens: holds id 100, .* has 100 ids: .*`sgt-ds data verify {sets[damaged]}`"
    loader = loader_of([DataSource(path=path) for path in sets], 12, 2, 0, 1)
    with loader, pytest.raises(UserError, match=said):
        list(loader.next_step())
    broken = open_token_set(sets[damaged])
    with pytest.raises(UserError, match=said):
        list(validation_batches(broken, LENGTH, 6, 2, 0, 1))


def test_a_damaged_index_of_documents_is_a_traceback(tmp_path: Path) -> None:
    path = write_token_set(tmp_path / "a", [[np.arange(2) for _ in range(40)]])
    shard = path / "00000-000.tokens"
    content = bytearray(shard.read_bytes())
    content[-8 * 37 + 5] = 1  # the fifth document begins far behind the end
    shard.write_bytes(content)
    token_set = open_token_set(path)
    with pytest.raises(UserError, match=f"{shard}: index: is damaged"):
        list(validation_batches(token_set, 16, 4, 1, 0, 1, document_starts=True))


def test_fingerprint_tells_other_data_from_other_ranks(tmp_path: Path) -> None:
    first = DataSource(path=numbered_set(tmp_path / "a", [10], LENGTH))
    moved = DataSource(path=numbered_set(tmp_path / "b", [10], LENGTH))
    other = DataSource(path=numbered_set(tmp_path / "c", [11], LENGTH))
    base = loader_of([first, other], 4, 1, 0, 1).fingerprint
    assert base == loader_of([moved, other], 4, 2, 1, 2).fingerprint
    assert base != loader_of([other, first], 4, 1, 0, 1).fingerprint
    heavier = DataSource(path=first.path, weight=2)
    assert base != loader_of([heavier, other], 4, 1, 0, 1).fingerprint


def test_a_weight_too_small_to_draw_is_refused(two_sets: list[DataSource]) -> None:
    light = DataSource(path=two_sets[1].path, weight=0.001)
    with pytest.raises(UserError, match="less than one sequence in 1000"):
        loader_of([two_sets[0], light], 4, 1, 0, 1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_reads_the_same_sequences_at_every_world_size(
    two_sets: list[DataSource], world: int
) -> None:
    token_set = open_token_set(two_sets[0].path)
    for wanted, expected in ((23, 23), (500, 50)):
        seen = [
            value
            for rank in range(world)
            for rows in validation_batches(token_set, LENGTH, wanted, 4, rank, world)
            for value in rows.tokens[:, 1].tolist()
        ]
        assert sorted(seen) == list(range(expected))
