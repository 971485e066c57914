from __future__ import annotations

import numpy as np
import pytest

from block_manager_svc.core.prefix_index import NO_NODE, PrefixIndex

SIZE = 2


def content(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(32, SIZE)


def chain(index: PrefixIndex, tokens: bytes, *blocks: int, namespace: bytes = b"") -> list[int]:
    """Inserts one chain from the root; gives which of the blocks are indexed."""
    return index.insert([index.root(namespace)], [len(blocks)], tokens, list(blocks))[1]


def found(index: PrefixIndex, tokens: bytes, namespace: bytes = b"") -> list[int]:
    return index.find(index.root(namespace), tokens)[1].tolist()


def test_whole_blocks_are_found_up_to_the_first_that_differs(index: PrefixIndex) -> None:
    assert chain(index, content(1, 2, 3, 4, 5, 6), 7, 8, 9) == [7, 8, 9]
    assert len(index) == 3
    assert found(index, content(1, 2, 3, 4, 5, 6)) == [7, 8, 9]
    assert found(index, content(1, 2, 3, 4, 5, 7)) == [7, 8]
    assert found(index, content(1, 2)) == [7]
    assert found(index, content(3, 4)) == []
    assert found(index, b"") == []
    assert index.check() == []


def test_equal_tokens_behind_another_prefix_are_another_block(index: PrefixIndex) -> None:
    chain(index, content(1, 1, 9, 9), 3, 4)
    chain(index, content(2, 2, 9, 9), 5, 6)
    assert found(index, content(1, 1, 9, 9)) == [3, 4]
    assert found(index, content(2, 2, 9, 9)) == [5, 6]


def test_a_key_holds_the_tokens_themselves(index: PrefixIndex) -> None:
    """So there is no hash that two contents could share: a hit is equality."""
    chain(index, content(1, 2, 3, 4), 7, 8)
    parent, tokens = index.content(8) or (0, b"")
    assert tokens == content(3, 4)
    assert parent == index.serial(index.node(7))
    assert index.content(7) == (index.serial(index.root(b"")), content(1, 2))
    assert index.content(9) is None
    assert index.node(9) == NO_NODE
    # Tokens that agree in all bits but one, and tokens that would agree in a sum or an exclusive or.
    chain(index, content(0x10000, 1), 9)
    assert found(index, content(1, 0x10000)) == []
    assert found(index, content(0x10000, 0)) == []
    assert found(index, content(0x10001, 0)) == []


def test_namespaces_do_not_meet(index: PrefixIndex) -> None:
    chain(index, content(1, 2), 3, namespace=b"a")
    assert found(index, content(1, 2), b"b") == []
    assert found(index, content(1, 2), b"") == []
    assert chain(index, content(1, 2), 4, namespace=b"b") == [4]
    assert found(index, content(1, 2), b"a") == [3]
    assert found(index, content(1, 2), b"b") == [4]


def test_of_equal_content_the_first_stays_canonical_and_children_chain_from_it(index: PrefixIndex) -> None:
    chain(index, content(1, 2), 3)
    assert chain(index, content(1, 2, 5, 6), 4, 5) == [5]
    assert found(index, content(1, 2, 5, 6)) == [3, 5]
    assert index.node(4) == NO_NODE


def test_a_removed_block_is_not_found_nor_what_was_behind_it_whatever_it_holds_next(index: PrefixIndex) -> None:
    chain(index, content(1, 2, 3, 4), 7, 8)
    index.remove([7])
    assert found(index, content(1, 2, 3, 4)) == []
    chain(index, content(9, 9), 7)
    assert found(index, content(9, 9, 3, 4)) == [7]  # block 8 is behind what block 7 held before
    chain(index, content(1, 2), 5)
    assert found(index, content(1, 2, 3, 4)) == [5]
    assert index.check() == []


def test_several_chains_are_inserted_at_once(index: PrefixIndex) -> None:
    root = index.root(b"")
    (first,), _ = index.insert([root], [1], content(1, 2), [3])
    ends, indexed = index.insert([first, root], [2, 1], content(3, 4, 5, 6, 7, 8), [4, 5, 6])
    assert indexed == [4, 5, 6]
    assert ends == [index.node(5), index.node(6)]
    assert found(index, content(1, 2, 3, 4, 5, 6)) == [3, 4, 5]
    assert found(index, content(7, 8)) == [6]


def test_nodes_are_never_used_again(index: PrefixIndex) -> None:
    seen = {index.root(b"")}
    for _ in range(20):
        chain(index, content(1, 2), 3)
        node = index.node(3)
        assert node != NO_NODE
        assert node not in seen
        seen.add(node)
        index.remove([3])


def test_a_block_that_moves_takes_along_what_is_chained_behind_it(index: PrefixIndex) -> None:
    chain(index, content(1, 2, 3, 4, 5, 6), 7, 8, 9)
    serial = index.serial(index.node(8))
    index.move([8], [20])
    assert found(index, content(1, 2, 3, 4, 5, 6)) == [7, 20, 9]
    assert index.node(8) == NO_NODE
    assert index.serial(index.node(20)) == serial
    assert index.check() == []
    index.move([7, 20], [20, 7])  # each into the place of the other
    assert found(index, content(1, 2, 3, 4, 5, 6)) == [20, 7, 9]
    assert index.check() == []


def test_a_node_is_alive_while_its_block_is_found_where_it_was(index: PrefixIndex) -> None:
    chain(index, content(1, 2), 7)
    node = index.node(7)
    assert index.is_alive(index.root(b""))
    assert index.is_alive(node)
    index.remove([7])
    assert not index.is_alive(node)
    chain(index, content(1, 2), 7)
    assert not index.is_alive(node)
    assert not index.is_alive(NO_NODE)


def test_behind_no_node_nothing_is_indexed(index: PrefixIndex) -> None:
    ends, indexed = index.insert([NO_NODE, index.root(b"")], [2, 1], content(1, 2, 3, 4, 5, 6), [3, 4, 5])
    assert indexed == [5]
    assert ends == [NO_NODE, index.node(5)]
    assert found(index, content(1, 2)) == []


def test_an_indexed_block_tells_its_tokens(index: PrefixIndex) -> None:
    chain(index, content(1, 2, 257, 4), 7, 8)
    assert (index.held(7), index.held(8)) == (content(1, 2), content(257, 4))
