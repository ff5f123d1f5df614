"""Tests of the token trie against brute force: every node, every pop count, and both layouts."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.aici.runtime.trie import NO_TOKEN, TokenTrie, build_trie
from bridle.errors import UnsupportedModel
from tests.conftest import examples

vocabularies = st.lists(
    st.one_of(st.binary(max_size=4), st.text("abc", max_size=6).map(str.encode)), min_size=1, max_size=40
)


def naive_blob(tokens: list[bytes], eos: int, bits: int) -> bytes:
    """Return the trie's bytes, written recursively as the specification describes them."""
    root: dict[int, dict] = {}
    ends: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        node = root
        for byte in token:
            node = node.setdefault(byte, {})
        if token:
            ends[token] = index
    nodes: list[tuple[int, int]] = []

    def emit(byte: int, node: dict[int, dict], path: bytes, pops: int) -> None:
        if len(node) > 250:
            for missing in range(256):
                node.setdefault(missing, {})
        place = len(nodes)
        nodes.append((0, 0))
        children = sorted(node)
        for child in children:
            emit(child, node[child], path + bytes([child]), pops + 1 if child == children[-1] else 1)
        size = len(nodes) - place
        token = ends.get(path, NO_TOKEN) if path else NO_TOKEN
        nodes[place] = (token << 8 | byte, size << 8 | pops)

    emit(0xFF, root, b"", 0)
    body = b"".join(struct.pack("<2I", *node) for node in nodes)
    offsets, start = b"", 0
    for token in tokens:
        offsets += struct.pack("<I", start << bits | len(token))
        start += len(token)
    header = struct.pack("<7I", 0x558B6FD3, 28, len(body), len(offsets), len(body), len(tokens), eos)
    return header + body + offsets + b"".join(tokens)


@settings(max_examples=examples(150), deadline=None)
@given(vocabularies, st.sampled_from([1, 2]))
def test_blob_equals_the_naive_one(tokens: list[bytes], dialect: int) -> None:
    assert build_trie(tokens, 0, dialect) == naive_blob(tokens, 0, {1: 8, 2: 10}[dialect])


def test_nodes_with_many_children_get_all_256() -> None:
    tokens = [bytes([i]) for i in range(252)] + [b"a" + bytes([i]) for i in range(3, 256)] + [b"", b"zz"]
    assert build_trie(tokens, 1, 2) == naive_blob(tokens, 1, 10)


@settings(max_examples=examples(100), deadline=None)
@given(vocabularies, st.sets(st.integers(0, 255)))
def test_mask_walk_equals_brute_force(tokens: list[bytes], alphabet: set[int]) -> None:
    """The test walks the trie like guest libraries, with a recognizer that accepts at most three bytes of an
    alphabet."""
    blob = build_trie(tokens, 0, 2)
    _, _, size, _, _, _, _ = struct.unpack_from("<7I", blob)
    nodes = list(struct.iter_unpack("<2I", blob[28 : 28 + size]))
    allowed: set[int] = set()
    depth, index = 0, 1
    while index < len(nodes):
        head, tail = nodes[index]
        byte, token, subtree, pops = head & 0xFF, head >> 8, tail >> 8, tail & 0xFF
        if byte in alphabet and depth < 3:
            depth += 1
            if token != NO_TOKEN:
                allowed.add(token)
            if subtree == 1:
                depth -= pops
            index += 1
        else:
            index += subtree
            depth -= pops - 1
    last = {token: i for i, token in enumerate(tokens)}
    fits = {i for token, i in last.items() if 0 < len(token) <= 3 and set(token) <= alphabet}
    assert allowed == fits


@settings(max_examples=examples(60), deadline=None)
@given(vocabularies, st.binary(max_size=12), st.sampled_from([1, 2]))
def test_a_trie_gives_back_its_tokens(tokens: list[bytes], data: bytes, dialect: int) -> None:
    trie = TokenTrie(build_trie(tokens, 0, dialect), dialect)
    assert [trie.token_bytes(i) for i in range(len(tokens))] == tokens
    spelled = b"".join(trie.token_bytes(token) for token in trie.tokenize(data))
    known = {token[0] for token in tokens if token}
    if all(bytes([byte]) in tokens for byte in data):
        assert spelled == data
    assert set(spelled) <= known | {byte for token in tokens for byte in token}


def test_long_tokens_are_not_reachable_but_keep_their_place() -> None:
    tokens = [b"x" * 300, b"x", b"y" * 1100]
    trie = TokenTrie(build_trie(tokens, 0, 2), 2)
    assert [len(trie.token_bytes(i)) for i in range(3)] == [300, 1, 0]
    assert trie.tokenize(b"xx") == [1, 1]
    assert len(TokenTrie(build_trie(tokens, 0, 1), 1).token_bytes(0)) == 0


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="4194304"):
        build_trie([b"x" * 1000] * 4200, 0, 2)
    with pytest.raises(UnsupportedModel, match="0 tokens"):
        build_trie([], 0, 2)
