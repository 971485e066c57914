from __future__ import annotations

import numpy as np
import pytest

from block_manager_svc.core.errors import InvalidArgument, SequenceNotFound
from block_manager_svc.core.sequences import Sequences


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_ids_rise_from_1() -> None:
    sequences = Sequences()
    assert [sequences.add() for _ in range(200)] == list(range(1, 201))
    assert len(sequences) == 200
    assert sequences.id.size == 512  # at least twice as many rows, so that a free one is near
    assert sequences.check() == []


def test_an_id_is_never_given_twice_while_rows_are() -> None:
    sequences = Sequences(8)
    keep = sequences.add()
    seen = {keep}
    for _ in range(100):
        sequence = sequences.add()
        assert sequence not in seen
        assert sequence > max(seen)
        seen.add(sequence)
        sequences.remove(sequences.rows(array(sequence)))
        assert sequences.check() == []
    assert sequences.id.size == 8
    assert sequences.row(keep) >= 0
    assert sequences.next == max(seen) + 1


def test_ids_skip_those_whose_row_is_taken() -> None:
    sequences = Sequences(8)
    ids = [sequences.add() for _ in range(3)]
    sequences.remove(sequences.rows(np.array(ids)))
    for _ in range(2):
        sequences.remove(sequences.rows(array(sequences.add())))
    assert [sequences.add(), sequences.add()] == [6, 7]
    seen = []
    for _ in range(8):
        seen.append(sequences.add())
        sequences.remove(sequences.rows(array(seen[-1])))
    assert seen == [8, 9, 10, 11, 12, 13, 16, 17]  # 14 and 15 would be in the rows of 6 and 7
    assert sequences.check() == []


def test_columns_follow_their_sequences_when_the_rows_double() -> None:
    sequences = Sequences(4)
    ids = []
    for i in range(50):
        ids.append(sequences.add())
        row = sequences.row(ids[-1])
        sequences.length[row] = i
        sequences.tokens.open(row, np.array([i], np.int32))
    rows = sequences.rows(np.array(ids))
    assert sequences.length[rows].tolist() == list(range(50))
    assert [int(sequences.tokens.values(row, 1)[0]) for row in rows.tolist()] == list(range(50))
    assert sequences.id[sequences.alive()].tolist() == ids
    assert sequences.check() == []


def test_a_new_sequence_does_not_inherit_from_the_one_before_in_its_row() -> None:
    sequences = Sequences(4)
    first = sequences.add()
    sequences.length[sequences.row(first)] = 9
    sequences.remove(sequences.rows(array(first)))
    for _ in range(5):
        sequence = sequences.add()
        assert sequences.length[sequences.row(sequence)] == 0
        sequences.remove(sequences.rows(array(sequence)))


@pytest.mark.parametrize("missing", [0, -1, 3, 64, 65, 2**62, -(2**63)])
def test_an_id_that_is_not_alive_is_not_found(missing: int) -> None:
    sequences = Sequences()
    alive = sequences.add()
    with pytest.raises(SequenceNotFound, match=str(missing)):
        sequences.row(missing)
    with pytest.raises(SequenceNotFound, match=str(missing)) as refusal:
        sequences.rows(array(alive, missing))
    assert refusal.value.numbers == {"sequence": missing}


def test_a_batch_that_names_a_sequence_twice_is_refused() -> None:
    sequences = Sequences()
    first, second = sequences.add(), sequences.add()
    assert sequences.rows(array(second, first)).size == 2
    with pytest.raises(InvalidArgument, match=f"sequence {second} is named twice") as refusal:
        sequences.rows(array(second, first, second))
    assert refusal.value.reason == "DUPLICATE_SEQUENCE"


def test_the_batch_resolved_last_is_not_trusted_after_a_change() -> None:
    sequences = Sequences(4)
    batch = array(sequences.add())
    before = sequences.rows(batch)
    others = [sequences.add() for _ in range(20)]
    assert sequences.rows(batch).tolist() == [sequences.row(int(batch[0]))]
    assert sequences.rows(np.array(others)).size == 20
    sequences.remove(sequences.rows(batch))
    with pytest.raises(SequenceNotFound):
        sequences.rows(batch)
    assert before.size == 1
    assert sequences.rows(array()).size == 0
