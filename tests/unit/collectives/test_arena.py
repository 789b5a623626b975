"""Node-shared arrays: layout, freeing, finding, and mapping from another process."""

import errno
import gc
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveError
from collectives.fabric import arena


@pytest.mark.parametrize("shape", [(), 0, np.int64(1), (3, 5), [0, 7], 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_empty_gives_an_aligned_writable_array(shape, dtype):
    array = arena.empty(shape, dtype)
    assert array.shape == np.empty(shape).shape and array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous and array.flags.writeable
    assert array.ctypes.data % arena.ALIGNMENT == 0
    array[...] = 3
    assert (array == 3).all()


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, 256 << 20, (4 << 30) - 1, 4 << 30, (4 << 30) + 1, (12 << 30) + 5])
def test_a_segment_holds_its_array_and_is_no_multiple_of_4_gib(nbytes):
    size = arena.segment_bytes(nbytes)
    assert size >= nbytes
    assert size % arena.HUGE_PAGE == 0
    assert 64 <= size % (4 << 30) <= (4 << 30) - 64


@pytest.mark.slow
def test_a_process_begins_with_few_addresses():
    """A limit of 3 GiB has room for the arrays of several ranks. The sentence names it where it has not."""
    code = (
        "import resource, sys; from collectives.fabric import arena\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30),) * 2)\n"
        "arrays = [arena.empty(10 << 20, 'u1') for _ in range(8)]\nprint('made')\n"
        "arena.empty(4 << 30, 'u1')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "made\n", done.stderr
    assert "or raise ulimit -v, which is" in done.stderr.splitlines()[-1]


def test_live_arrays_never_overlap():
    arrays = [arena.empty(n, np.uint8) for n in (1, 63, 64, 65, 4096, 1 << 20, 0, 5)]
    for i, array in enumerate(arrays):
        array.fill(i)
    assert all((array == i).all() for i, array in enumerate(arrays))


def test_memory_is_reused_after_the_last_view_is_gone():
    array = arena.empty(3 << 20, np.uint8)
    where = arena.locate(array)
    view = array[100:]
    del array
    gc.collect()
    other = arena.empty(3 << 20, np.uint8)
    assert arena.locate(other) != where
    del view
    gc.collect()
    assert arena.locate(arena.empty(3 << 20, np.uint8)) == where


def test_an_interrupt_while_memory_is_given_back_does_not_keep_the_lock():
    """As signals come, when a function of C has returned."""

    def interrupt(frame, event, argument):
        if event == "c_return" and argument.__name__ == "acquire":
            raise KeyboardInterrupt

    arrays = [arena.empty(10, np.uint8)]
    sys.setprofile(interrupt)
    try:
        arrays.clear()
    finally:
        sys.setprofile(None)
    assert not arena._arena._lock.locked()


def test_locate_knows_views_and_refuses_others():
    array = arena.empty((4, 6), np.float64)
    whole, row = arena.locate(array), arena.locate(array[2])
    assert whole is not None and row is not None
    assert row.offset - whole.offset == 2 * 6 * 8 and row.nbytes == 6 * 8 and whole.nbytes == 4 * 6 * 8
    assert row.pid == os.getpid()
    assert arena.locate(array[:, 1]) is None
    assert arena.locate(np.empty(4)) is None


def test_attach_is_the_same_memory():
    array = arena.empty(1000, np.float32)
    array[:] = np.arange(1000)
    there = arena.attach(arena.locate(array)).view(np.float32)
    there[7] = -1
    assert array[7] == -1 and (there[8:] == array[8:]).all()


def _double(region, answer):
    there = arena.attach(arena.Region(*region)).view(np.float32)
    there *= 2
    answer.put(float(there.sum()))


@pytest.mark.slow
def test_another_process_can_attach():
    array = arena.empty(1 << 16, np.float32)
    array[:] = 1
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=_double, args=(tuple(arena.locate(array)), answer))
    child.start()
    total = answer.get(timeout=60)
    child.join(60)
    assert total == 2 * (1 << 16) and (array == 2).all()


def test_attach_names_what_it_cannot_reach():
    region = arena.locate(arena.empty(10, np.float32))
    with pytest.raises(CollectiveError, match=str(region.pid)):
        arena.attach(region._replace(inode=region.inode + 1))
    with pytest.raises(CollectiveError, match="cannot map"):
        arena.attach(region._replace(fd=1_000_000))
    with pytest.raises(CollectiveError, match="past the end"):
        arena.attach(region._replace(offset=1 << 50))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((-4,), ValueError, r"shape=-4 is not a shape .*: pass a number of elements of at least 0"),
        (("x",), TypeError, "shape='x' is not a shape .*or a tuple of such"),
        ((3, "floot"), TypeError, "dtype='floot' is not a NumPy type .*: pass a numeric type, such as numpy.float32"),
        ((3, object), TypeError, "dtype=object holds Python objects.*: pass a numeric type"),
    ],
)
@pytest.mark.parametrize("comm", [None, MPI.COMM_SELF])
def test_what_cannot_be_an_array_is_told_with_what_to_do(arguments, error, words, comm):
    with pytest.raises(error, match=words) as told:
        arena.empty(*arguments, comm=comm)
    assert told.value.of_caller


def test_more_than_there_is_is_told_with_what_to_do():
    with pytest.raises(MemoryError, match=r"no memory for 1125899906842624 bytes .*: ask for less"):
        arena.empty(1 << 50, "int8")


@pytest.fixture
def node(monkeypatch):
    """Of a node whose `free` bytes are what this process, and others `beside` it, leave; none is really touched."""
    made = SimpleNamespace(free=1 << 30, touched=0, beside=lambda nbytes: None)

    def populate(mapping, offset, nbytes):
        made.free -= nbytes
        made.touched += nbytes
        made.beside(nbytes)

    monkeypatch.setattr(arena, "_arena", arena._Arena())
    monkeypatch.setattr(arena, "_touch_pages", populate)
    monkeypatch.setattr(arena, "free_memory", lambda: made.free)
    monkeypatch.setattr(arena, "free_room", lambda fd: made.free)
    monkeypatch.setattr(arena, "free_swap", lambda: 0)
    return made


def test_what_is_larger_than_what_is_free_takes_nothing(node):
    kept = arena.empty(1000)
    before = node.touched
    for nbytes in (10**12, (1 << 30) + 64, 1000 << 20):  # of the last one others might leave too little
        with pytest.raises(MemoryError, match=rf"no memory for {nbytes} bytes .*1,024 MiB are free.*: ask for less"):
            arena.empty(nbytes, np.uint8)
    assert node.touched == before and kept.size
    assert arena.empty(900 << 20, np.uint8).size


def test_ranks_that_take_memory_at_once_see_what_others_have_taken(node, monkeypatch):
    """Each of four asks for a third of it: all have seen that it is there. None goes on until nothing is left."""
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    least = []

    def others_take(nbytes):
        node.free -= 3 * nbytes
        least.append(node.free)

    node.beside = others_take
    with pytest.raises(MemoryError, match="are free here"):
        arena.empty(350 << 20, np.uint8)
    assert len(least) > 4 and min(least) > 0


def test_small_arrays_fill_the_memory_no_further_either(node):
    arrays = []

    def fill():
        while True:
            arrays.append(arena.empty(1 << 20, np.uint8))

    with pytest.raises(MemoryError, match=r"\([01] MiB are free here"):
        fill()
    assert 1000 < len(arrays) <= 1 << 10 and node.free >= 0


def test_memory_that_was_given_back_is_no_new_memory(node):
    arena.empty(400 << 20, np.uint8)
    gc.collect()
    node.free = 10 << 20
    assert arena.empty(400 << 20, np.uint8).size


def _deny(number, monkeypatch):
    def memfd_create(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    monkeypatch.setattr(arena, "_arena", arena._Arena())


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_machine_that_denies_memory_files_shares_others(monkeypatch, number):
    _deny(number, monkeypatch)
    test_another_process_can_attach()
    file = arena.SparseFile()
    rows, offset = file.zeros((1 << 30, 2), np.float64)
    rows[1 << 29] = 7
    there = arena.SparseFile.opened(file.region).view(offset, (1 << 30, 2), np.float64)
    assert there[1 << 29].tolist() == [7, 7] and not there[0].any()
    assert file.room <= shutil.disk_usage("/dev/shm").total
    for fd in (file.region.fd, arena.locate(arena.empty(10)).fd):
        assert os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")  # it has no name


@pytest.mark.slow
@pytest.mark.parametrize("full", [["/dev/shm"], ["/dev/shm", tempfile.gettempdir()]])
def test_where_dev_shm_is_full_too_another_folder_serves_or_the_cause_is_told(monkeypatch, full):
    _deny(errno.EPERM, monkeypatch)
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=0) if folder in full else usage(folder)
    )
    if len(full) == 1:
        test_another_process_can_attach()
        return
    with pytest.raises(
        MemoryError,
        match="memfd_create is denied here .*; /dev/shm has 0 MiB free; .* has 0 MiB free: "
        r"allow the call .*, or give /dev/shm room",
    ):
        arena.empty(1000)


LIMITED = """
import resource, sys
import collectives
from collectives.fabric import arena
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20,) * 2)
kept = collectives.empty(1 << 20)
kept[:] = 1
for make in (lambda: collectives.empty(3 << 20), lambda: arena.SparseFile().zeros((3 << 20,), "f4")):
    try:
        make()
    except MemoryError as error:
        print(error)
"""


def test_a_limit_of_file_sizes_is_kept_and_named():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, timeout=60)
    said = done.stdout.splitlines()
    assert len(said) == 2 and all("raise ulimit -f, which is 8.0 MiB here" in line for line in said), said


@pytest.mark.slow
def test_freed_memory_beyond_the_pool_returns_to_the_system(monkeypatch):
    monkeypatch.setattr(arena, "IDLE_BYTES", 0)
    array = arena.empty(64 << 20, np.uint8)
    array.fill(7)
    region = arena.locate(array)
    there = arena.attach(region)
    del array
    gc.collect()
    assert (there[arena.HUGE_PAGE : -arena.HUGE_PAGE] == 0).all()  # a punched hole reads as zeros


@pytest.mark.parametrize("given", [False, True], ids=["taking", "giving"])
def test_an_interrupt_between_any_two_steps_keeps_the_free_list_whole(given):
    for step in range(1, 60):
        free, taken = arena._FreeList(1000), {}
        for nbytes in (100, 50, 200, 10, 300, 60, 100):
            taken[free.take(nbytes)] = nbytes
        starts = sorted(taken)
        for start in starts[1::2]:
            free.give(start, taken.pop(start))
        steps = iter(range(1, 1000))

        def interrupt(frame, event, argument, steps=steps, step=step):
            if frame.f_code.co_name in ("_find", "_join", "_insert", "_remove") and next(steps) == step:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            if given:
                free.give(starts[2], taken[starts[2]])
            else:
                taken[free.take(40)] = 40
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if given:
            del taken[starts[2]]
        while (start := free.take(7)) is not None:
            taken[start] = 7
        ends = [start + nbytes for start, nbytes in sorted(taken.items())]
        assert all(end <= start for end, start in zip(ends, sorted(taken)[1:])) and ends[-1] <= 1000
        for start, nbytes in taken.items():
            free.give(start, nbytes)
        assert free.take(1000) == 0


def test_arrays_may_all_lie_in_one_segment_as_large_as_the_memory(monkeypatch):
    monkeypatch.setattr(arena, "_arena", arena._Arena())
    before = arena.locate(arena.empty(10))
    arena.in_one_segment()
    first, second = (arena.locate(arena.empty(1000)) for _ in range(2))
    assert before[:3] != first[:3] == second[:3]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert arena.segment(first).nbytes >= memory


def test_arrays_that_grow_into_huge_pages_keep_their_bytes_and_those_of_others():
    file = arena.SparseFile()
    # the second array lies behind the first one, and each is more than FEW_HUGE_PAGES long
    (first, _), (rows, offset) = (file.zeros((5 << 20,), np.uint16) for _ in range(2))
    there = arena.SparseFile.opened(file.region).view(offset, (5 << 20,), np.uint16)
    rows[: 1 << 20] = 7
    arena.use_huge_pages(rows, 2 << 20, 9 << 20)
    rows[4 << 20 :] = 8
    del first
    assert [np.unique(part).tolist() for part in (there[: 1 << 20], there[1 << 20 : 4 << 20], there[4 << 20 :])] == [
        [7],
        [0],
        [8],
    ]


def _write(told):
    file = arena.SparseFile()
    file.zeros((3,), np.int8)
    rows, offset = file.zeros((1 << 40, 2), np.float64)
    rows[1 << 39] = 7
    told.send((tuple(file.region), offset))
    told.recv()


@pytest.mark.slow
def test_a_sparse_file_is_there_when_its_process_was_killed():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_write, args=(there,))
    child.start()
    region, offset = here.recv()
    file = arena.SparseFile.opened(arena.Region(*region))
    child.kill()
    child.join(60)
    rows = file.view(offset, (1 << 40, 2), np.float64)
    assert rows[1 << 39].tolist() == [7, 7] and not rows[(1 << 39) + 1].any()
    with pytest.raises(CollectiveError, match="cannot map memory"):
        arena.SparseFile.opened(arena.Region(*region))
    with pytest.raises(MemoryError, match="make fewer or smaller arrays"):
        file.zeros((1 << 60,), np.float64)
