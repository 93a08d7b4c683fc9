"""One rank reads and quantizes for all (loading_ranks.py, faults.py): results, failures, deaths."""

from __future__ import annotations

from pathlib import Path

import faults
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from halfbyte.checkpoint.sources import Entry
from halfbyte.distributed.loading import plan_buckets
from halfbyte.ops.broadcast import shard_rows

RANKS = Path(__file__).with_name("loading_ranks.py")


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    outputs = run_ranks(RANKS, "loads", str(tmp_path))
    assert all("DONE" in output for output in outputs)


@pytest.mark.slow
def test_hybrid_sharding_on_four_ranks(tmp_path: Path) -> None:
    assert all("DONE" in output for output in run_ranks(RANKS, "hybrid", str(tmp_path), world=4))


def test_every_fault_that_all_ranks_survive(tmp_path: Path) -> None:
    """faults.run checks what each rank saw, when, and the disk afterwards."""
    cases = {**faults.FAULTS, **faults.ARGUMENTS}
    names = [name for name, fault in cases.items() if not fault.killed and name not in faults.CHANGING]
    outcomes = faults.run(names, tmp_path)
    assert len(outcomes) == 14 and all(outcome.usable and outcome.unharmed for outcome in outcomes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.CHANGING)
def test_a_source_that_changes_while_it_is_read(tmp_path: Path, name: str) -> None:
    assert faults.run([name], tmp_path)[name].unharmed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("source dies before", marks=pytest.mark.slow),
        "source dies during",
        pytest.param("source dies after", marks=pytest.mark.slow),
        pytest.param("source dies in the cache", marks=pytest.mark.slow),
        "receiver dies",
        "receiver hangs",
    ],
)
def test_the_survivors_of_a_death_raise_within_ten_seconds(tmp_path: Path, name: str) -> None:
    assert faults.run([name], tmp_path)[name].seconds[0] < 10


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(64, 600),
)
def test_buckets_bring_every_rank_exactly_its_rows(tensors, world: int, bucket_bytes: int) -> None:
    entries = [Entry(str(i), (rows, width), torch.uint8) for i, (rows, width, _) in enumerate(tensors)]
    spans = [
        [shard_rows(rows, world, rank) if shard else (0, rows) for rows, _, shard in tensors] for rank in range(world)
    ]
    buckets = plan_buckets(entries, spans, bucket_bytes)
    for rank in range(world):
        for index, entry in enumerate(entries):
            start, stop = spans[rank][index]
            got = []
            for bucket in buckets:
                for piece in bucket.pieces:
                    if piece.entry == index:
                        first = min(start + piece.first, stop)
                        got += range(first, min(first + piece.count, stop))
            assert got == list(range(start, stop)), (rank, entry)
    for bucket in buckets:
        ends = 0
        for piece in bucket.pieces:  # one after the other, aligned
            assert piece.offset >= ends and piece.offset % 64 == 0
            ends = piece.offset + piece.count * entries[piece.entry].row_nbytes
        assert ends <= bucket.nbytes
        limit = bucket_bytes // world if bucket.scatter else bucket_bytes
        assert bucket.nbytes <= max(limit, 64) + 64 or sum(p.count for p in bucket.pieces) == 1
