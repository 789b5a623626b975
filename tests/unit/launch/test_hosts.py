"""Host files are read or refused with the line; ranks are placed workers first, servers apart where they can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.hosts import Host, HostError, Placed, parse, place, read


def test_both_spellings_comments_and_repeats() -> None:
    text = "# a cluster\nnode1 slots=4 max_slots=8\nnode2:2   # MPICH's way\n\nnode1:1\nnode3\n"
    assert parse(text) == (Host("node1", 5), Host("node2", 2), Host("node3", None))


def test_a_line_a_slot_as_pbs_writes_it() -> None:
    assert parse("n1\nn1\nn2\nn1\n") == (Host("n1", 3), Host("n2", 1))


def test_names_as_administrators_give_them() -> None:
    assert parse("node_1 slots=2\nroot@gpu-3.lab:4") == (Host("node_1", 2), Host("root@gpu-3.lab", 4))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_file_from_another_system_is_read(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "hosts").write_bytes(mark + b"node1 slots=2\r\nnode2:2\r\n")
    assert read(tmp_path / "hosts") == (Host("node1", 2), Host("node2", 2))


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("node1\n".encode("utf-16"))
    with pytest.raises(HostError, match="hosts is no text in UTF-8"):
        read(tmp_path / "hosts")


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"none\.txt"):
        read(tmp_path / "none.txt")


def test_servers_get_hosts_of_their_own() -> None:
    hosts = [Host("a", 4), Host("b", 4), Host("c", 4), Host("d", 4)]
    assert place(hosts, 8, 2) == (Placed("a", 4), Placed("b", 4), Placed("c", 1), Placed("d", 1))
    assert place(hosts, 12, 2) == (Placed("a", 4), Placed("b", 4), Placed("c", 4), Placed("d", 2))


def test_servers_share_where_hosts_are_few() -> None:
    assert place([Host("a", 4), Host("b", 4)], 6, 2) == (Placed("a", 4), Placed("b", 4))
    assert place([Host("a")], 3, 2) == (Placed("a", 5),)


def test_hosts_without_slots_share_evenly() -> None:
    assert place([Host("a"), Host("b"), Host("c")], 5, 1) == (Placed("a", 2), Placed("b", 3), Placed("c", 1))


def test_too_few_slots() -> None:
    with pytest.raises(HostError, match="3 slots, the job needs 5 ranks"):
        place([Host("a", 3)], 4, 1)


hosts_strategy = st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=6)


@given(hosts_strategy, st.integers(1, 20), st.integers(0, 5))
def test_every_rank_is_placed_and_no_host_overflows(slots: list[int | None], workers: int, servers: int) -> None:
    hosts = [Host(f"h{i}", count) for i, count in enumerate(slots)]
    fits = any(s is None for s in slots) or sum(s or 0 for s in slots) >= workers + servers
    if not fits:
        with pytest.raises(HostError):
            place(hosts, workers, servers)
        return
    placed = place(hosts, workers, servers)
    assert sum(block.ranks for block in placed) == workers + servers
    for host in hosts:
        used = sum(block.ranks for block in placed if block.host == host.name)
        assert host.slots is None or used <= host.slots
