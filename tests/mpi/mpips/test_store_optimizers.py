"""Optimizers in a store: schedules and changed numbers keep the state, groups of keys, classes of a user's own."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import mpips
from mpips import compression, optimizers
from mpips.optimizers import SGD, Adam, Chained, Constant, Cosine, StepDecay, Warmup
from tests.choice import once
from tests.mpi.mpips.support import WORLD, failure, need, run
from tests.mpi.sizes import either_mpi

STORES = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2, "big_array": 100}),
    ("dist_sync", {"servers": 1, "shared_memory": False}),
    ("mpi_sync", {"servers": 1, "clients": 2}),
    ("mpi_sync", {"servers": 2, "clients": 1, "masters": "all"}),
    ("mpi_sync", {"servers": 0}),
]
SIZES = {"small": 6, "large": 100_000}
RATE = Chained((Warmup(0.5, 3), StepDecay(0.5, every=2, factor=0.5), Cosine(0.1, 4)), until=(3, 7))


@optimizers.register
@dataclass(frozen=True)
class Lion:
    """An optimizer of a user's own; it has no `from __future__` of its own to lean on."""

    learning_rate: float | optimizers.RateSchedule = 0.01
    beta1: float = 0.9
    beta2: float = 0.99

    def init(self, weights):
        return [np.zeros_like(weights)]

    def update(self, weights, gradient, state, step):
        (momentum,) = state
        rate = optimizers.at(self.learning_rate, step)
        weights -= rate * np.sign(self.beta1 * momentum + (1 - self.beta1) * gradient)
        momentum += (1 - self.beta2) * (gradient - momentum)


def gradient_of(rank, size, step):
    """Whole numbers: sums are exact in any order."""
    return np.random.default_rng([rank, step]).integers(-8, 9, size).astype(np.float32)


class Serial:
    """One process alone with the sum of all workers' gradients."""

    def __init__(self, size, workers):
        self.size, self.workers = size, workers
        self.weights, self.state, self.step = np.ones(size, np.float32), None, 0

    def run(self, optimizer, steps, anew=False):
        if self.state is None or anew:
            self.state, self.step = optimizer.init(self.weights), 0
        for step in steps:
            self.step += 1
            total = sum(gradient_of(rank, self.size, step) for rank in range(self.workers))
            optimizer.update(self.weights, total, self.state, self.step)
        return self.weights


def push(kv, name, steps):
    """What is stored after these steps."""
    out = np.empty(SIZES[name], np.float32)
    for step in steps:
        kv.pushpull(name, gradient_of(kv.rank, SIZES[name], step), out=out)
    return out


def begin(kv):
    for name, size in SIZES.items():
        kv.init(name, np.ones(size, np.float32))
    return {name: Serial(size, kv.num_workers) for name, size in SIZES.items()}


@either_mpi
@once(**{"kind, options": STORES}, make=[lambda rate: SGD(rate, momentum=0.5), lambda rate: Adam(rate), Lion])
def test_state_under_a_schedule_is_bitwise_that_of_a_serial_run(kind, options, make):
    need(**options)

    def body(kv):
        serial = begin(kv)
        kv.set_optimizer(make(RATE))
        for name in SIZES:
            got = push(kv, name, range(12))
            for step in range(12):
                serial[name].run(make(RATE.at(step + 1)), [step])
            np.testing.assert_array_equal(got, serial[name].weights)

    run(kind, body, **options)


@either_mpi
@pytest.mark.parametrize("kind, options", STORES, ids=str)
def test_changed_numbers_keep_the_state_bitwise(kind, options):
    need(**options)

    def body(kv):
        serial = begin(kv)
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        for first, changes in enumerate([{}, {"learning_rate": 0.125}, {"momentum": 0.75, "rescale": -1}]):
            if changes:
                kv.update_optimizer(**changes)
            now = {"learning_rate": 0.5 if not first else 0.125, "momentum": 0.5 if first < 2 else 0.75}
            steps = range(4 * first, 4 * first + 4)
            for name in SIZES:
                expected = serial[name].run(SGD(**now, rescale=1 if first < 2 else -1), steps)
                np.testing.assert_array_equal(push(kv, name, steps), expected)
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)  # state begins anew
        for name in SIZES:
            expected = serial[name].run(SGD(0.5, momentum=0.5), range(20, 23), anew=True)
            np.testing.assert_array_equal(push(kv, name, range(20, 23)), expected)

    run(kind, body, **options)


@either_mpi
@pytest.mark.parametrize("kind, options", STORES, ids=str)
def test_groups_of_keys_have_optimizers_of_their_own(kind, options):
    need(**options)

    def body(kv):
        serial = begin(kv)
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        kv.set_optimizer(Adam(0.1), keys=["large"])
        wanted = {"small": SGD(0.5, momentum=0.5), "large": Adam(0.1)}
        for name in SIZES:
            np.testing.assert_array_equal(push(kv, name, range(3)), serial[name].run(wanted[name], range(3)))
        kv.update_optimizer(keys=["large"], learning_rate=Constant(0.25))
        wanted["large"] = Adam(0.25)
        for name in SIZES:
            np.testing.assert_array_equal(push(kv, name, range(3, 6)), serial[name].run(wanted[name], range(3, 6)))
        kv.update_optimizer(learning_rate=0.125)
        wanted = {"small": SGD(0.125, momentum=0.5), "large": Adam(0.125)}
        for name in SIZES:
            np.testing.assert_array_equal(push(kv, name, range(6, 9)), serial[name].run(wanted[name], range(6, 9)))

    run(kind, body, **options)


class Unheard:
    """A schedule that is not registered, so that it cannot travel."""

    def at(self, step):
        return 0.1

    def __repr__(self):
        return "Unheard()"


@pytest.mark.parametrize("kind, options", STORES, ids=str)
def test_a_bad_change_is_a_sentence_on_all_and_changes_nothing(kind, options):
    need(**options)

    def body(kv):
        serial = begin(kv)
        assert "set_optimizer first" in failure(lambda: kv.update_optimizer(learning_rate=1))
        kv.set_optimizer(SGD(0.5, momentum=0.5))
        kv.set_optimizer(Adam(0.1), keys=["large"])
        for call, words in {
            lambda: kv.update_optimizer(momentum=0.75): "Adam has no option momentum",
            lambda: kv.update_optimizer(learning_rate=-1): "learning_rate",
            lambda: kv.update_optimizer(keys=["large"], beta1=0.5): "set_optimizer",
            lambda: kv.update_optimizer(keys=["none"], learning_rate=1): "'none'",
            lambda: kv.update_optimizer(): "no number",
            lambda: kv.update_optimizer(learning_rate=Unheard()): "registered schedule",
            lambda: kv.set_optimizer("sgd", learning_rate="fast"): "fast",
            lambda: kv.set_optimizer(object()): "no optimizer of mpips",
        }.items():
            assert words in failure(call)
        if kv.num_workers > 1:
            assert "argument" in failure(lambda: kv.update_optimizer(learning_rate=0.1 * (kv.rank + 1)))
        wanted = {"small": SGD(0.5, momentum=0.5), "large": Adam(0.1)}
        for name in SIZES:
            np.testing.assert_array_equal(push(kv, name, range(3)), serial[name].run(wanted[name], range(3)))

    run(kind, body, **options)


@pytest.mark.parametrize("servers", [0, 1])
def test_integer_keys_have_no_optimizer(servers):
    workers = need(1, servers=servers)

    def body(kv):
        count, w = np.zeros(1, np.int64), np.ones(3, np.float32)
        kv.init(["w", "count"], [w, count])
        why = "key 'count' is int64, and an optimizer needs floats"
        for keys in (None, ["count"]):
            said = failure(lambda: kv.set_optimizer("sgd", keys=keys))  # noqa: B023
            assert said == f"set_optimizer: {why}: give keys=[...] without it"
        kv.set_optimizer("sgd", keys=["w"], learning_rate=1.0)
        kv.pushpull(["w", "count"], [np.ones(3, np.float32), out := np.ones(1, np.int64)])
        assert out[0] == workers
        kv.forget("count")
        kv.set_optimizer("sgd")
        said = failure(lambda: kv.init("count", count))
        assert said == f"init: {why}: name the keys that have one, set_optimizer(..., keys=[...])"
        kv.pushpull("w", w)

    run("dist_sync", body, servers=servers)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_name_that_the_servers_do_not_know_is_a_sentence_and_the_store_lives_on(servers):
    workers = need(servers=servers)

    @dataclass(frozen=True)
    class Unknown(Lion):
        pass

    if WORLD.rank < workers:
        optimizers.register(Unknown)

    def body(kv):
        serial = begin(kv)
        said = failure(lambda: kv.set_optimizer("unknown"))
        assert re.search(r"server rank \d: optimizer 'unknown' is not known here: .* before mpips\.create", said)
        kv.set_optimizer(SGD(0.5))
        np.testing.assert_array_equal(push(kv, "large", range(2)), serial["large"].run(SGD(0.5), range(2)))

    try:
        run("dist_sync", body, servers=servers)
    finally:
        optimizers.OPTIMIZERS.pop("unknown", None)


@either_mpi
@pytest.mark.parametrize("servers", [0, 1, 2])
def test_the_programs_of_the_docs_do_what_they_say(servers, monkeypatch, capsys):
    if WORLD.size - servers < 2:
        pytest.skip("the programs say what 2 workers and more give")
    monkeypatch.setenv("MPIPS_SERVERS", str(servers))
    pages = Path(__file__).resolve().parents[3] / "docs" / "how-to"
    text = "".join((pages / f"own-{part}.md").read_text() for part in ("optimizer", "compressor"))
    programs = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "mpips run" in block]
    assert len(programs) == 2
    kept = dict(optimizers.OPTIMIZERS), dict(compression.COMPRESSORS)
    try:
        optimizers.OPTIMIZERS.pop("lion")  # the program registers another
        for program in programs:
            with contextlib.suppress(SystemExit):
                exec(compile(program, "program", "exec", dont_inherit=True), {"__name__": "program"})
    finally:
        optimizers.OPTIMIZERS.clear(), compression.COMPRESSORS.clear()
        optimizers.OPTIMIZERS.update(kept[0]), compression.COMPRESSORS.update(kept[1])
    workers = WORLD.size - servers
    said = capsys.readouterr().out
    if WORLD.rank == 0:
        assert "every weight is 0.90" in said
        assert float(said.split()[-1]) <= 0.005 * workers + 0.001
    else:
        assert said == ""


@optimizers.register
@dataclass(frozen=True)
class Breaks(Lion):
    """Its third update of a key fails, in the middle."""

    def update(self, weights, gradient, state, step):
        super().update(weights, gradient, state, step)
        if step == 3:
            raise ArithmeticError("three is too many")


@pytest.mark.parametrize("kind, options", [*STORES, ("dist_async", {"servers": 1})], ids=str)
def test_an_update_that_raises_ends_the_generation_with_its_text(kind, options):
    need(**options)

    def body(kv):
        begin(kv)
        kv.set_optimizer("breaks")

        def train():
            for step in range(4):
                push(kv, "small", [step])
                kv.barrier()

        with pytest.raises((mpips.StoreError, ArithmeticError), match="three is too many"):
            train()
        kv.recover()
        kv.set_optimizer(SGD(0.5))
        push(kv, "large", range(2))

    run(kind, body, **options)
