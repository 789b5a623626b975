"""Host files are read or refused with the line; ranks are placed workers first, servers apart where they can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.hosts import Host, HostError, RankBlock, parse, place, read


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (
            "# a cluster\nnode1 slots=4 max_slots=8\nnode2:2   # MPICH's way\n\nnode1:1\nnode3\n",
            (Host("node1", 5), Host("node2", 2), Host("node3", None)),
        ),
        ("n1\nn1\nn2\nn1\n", (Host("n1", 3), Host("n2", 1))),  # a line a slot, as PBS writes it
        ("node_1 slots=2\nroot@gpu-3.lab:4", (Host("node_1", 2), Host("root@gpu-3.lab", 4))),
    ],
)
def test_a_host_file_is_read_in_every_spelling(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse(text) == hosts


def test_a_file_from_another_system_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + b"node1 slots=2\r\nnode2:2\r\n")
        assert read(file) == (Host("node1", 2), Host("node2", 2))
    file.write_bytes("node1\n".encode("utf-16"))
    with pytest.raises(HostError, match="hosts is not UTF-8 text"):
        read(file)
    with pytest.raises(HostError, match=r"none\.txt"):
        read(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("node1 slots=x", "line 1: slots of node1"),
        ("node1\nnode2:0", "line 2: slots of node2"),
        ("node1 cpu=4", "cannot read 'cpu=4'"),
        ("node1:4 slots=4", "given twice"),
        ("-node", "'-node' is not a host name"),
        ("node1:2\nfe80::1", "line 2: 'fe80::1' is an IPv6 address"),
        ("[fe80::1]:4", "IPv6 address"),
    ],
)
def test_what_cannot_be_read_names_the_line(text: str, words: str) -> None:
    with pytest.raises(HostError, match=words):
        parse(text)


FOUR = [Host(name, 4) for name in "abcd"]


@pytest.mark.parametrize(
    ("hosts", "workers", "servers", "placed"),
    [
        (FOUR, 8, 2, "a4 b4 c1 d1"),
        (FOUR, 12, 2, "a4 b4 c4 d2"),  # servers have hosts of their own, and share where
        (FOUR[:2], 6, 2, "a4 b4"),
        ([Host("a")], 3, 2, "a5"),  # there are few
        ([Host("a"), Host("b"), Host("c")], 5, 1, "a2 b3 c1"),
    ],
)
def test_ranks_fill_hosts_workers_first(hosts: list[Host], workers: int, servers: int, placed: str) -> None:
    assert place(hosts, workers, servers) == tuple(RankBlock(word[0], int(word[1:])) for word in placed.split())


hosts_strategy = st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=6)


@pytest.mark.slow
@given(hosts_strategy, st.integers(1, 20), st.integers(0, 5))
def test_every_rank_is_placed_and_no_host_overflows(slots: list[int | None], workers: int, servers: int) -> None:
    hosts = [Host(f"h{i}", count) for i, count in enumerate(slots)]
    fits = any(s is None for s in slots) or sum(s or 0 for s in slots) >= workers + servers
    if not fits:
        with pytest.raises(HostError, match=f"slots, the job needs {workers + servers} ranks"):
            place(hosts, workers, servers)
        return
    placed = place(hosts, workers, servers)
    assert sum(block.ranks for block in placed) == workers + servers
    for host in hosts:
        used = sum(block.ranks for block in placed if block.host == host.name)
        assert host.slots is None or used <= host.slots
