"""Make a table: check its options, compare them between workers, and let the servers make the table.

A *card* is the description of a table that is sent to the servers. With `admit=mpips.seen(...)` a second, hidden table
counts the updates of ids that have no row yet.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from mpips.collectives.errors import warn
from mpips.store.keys import arguments
from mpips.store.runtime import rendezvous
from mpips.store.worker.operations import CALLER_ERRORS
from mpips.store.worker.restored import Restored
from mpips.store.worker.route import Route
from mpips.store.worker.store import WorkerStore
from mpips.tables import eviction, initial, row_optimizers
from mpips.tables.admission import Chance, Seen
from mpips.tables.halves import is_half
from mpips.tables.initial import FirstValues, key_of, uniform
from mpips.tables.messages import COUNTS, DTYPES, MakeTable, TableOptions
from mpips.tables.table import MOST_BYTES, Table, whole, with_name
from mpips.tables.worker import WorkerTables

# the rule for first values of a table that is made without `init`
DEFAULT_INIT = uniform(0.05)
# `evict`, `limit` and the number of updates of a table are below this number, because ages of rows are int32.
MOST_COUNT = 1 << 31
ROUNDINGS = ("nearest", "stochastic")


def make(store: WorkerStore, route: Route, name: Any, options: TableOptions, numbers: dict[str, Any]) -> Table:
    """Make a table; see `KVStore.table`. Collective over the workers.

    If the table was restored from a checkpoint or by a recovery, the call is local and returns the restored table.

    Args:
        numbers: Hyperparameters of the optimizer.
    """
    service = next((service for service in store.backend.services if isinstance(service, WorkerTables)), None)
    # The table was restored. Compare the options that the program asks for with those of the restored table.
    if service is not None and name in store.restored.names and name in service.collections:
        with CALLER_ERRORS:
            asked = card_of(name, _checked(store, name, options, numbers))
            table = service.collections[asked.table]
            difference = _difference(table.card, asked, store.restored)
        if difference and store.layout.rank == 0:
            warn(f"{difference}: what is restored holds")
        store.restored.claim([table.name, table.card.table_of_counts])
        return Table(store, route, service.client, table)

    def check() -> tuple[str, TableOptions]:
        given = _check_name(name)
        if service is None:
            raise ValueError(
                f"table {given!r}: kind {store.layout.kind!r} has no servers here, and a table needs one: take "
                "dist_sync with servers=1"
            )
        return given, _checked(store, name, options, numbers)

    checked, refusal = rendezvous.attempt(check)
    store.finish()
    fields = {} if checked is None else checked[1]._asdict()
    items = [(field, value if isinstance(value, str) else repr(value)) for field, value in fields.items()]
    store.agree(f"table {name!r}", items, refusal, noun="argument")
    assert checked is not None and service is not None
    card = card_of(*checked)
    # Make the table of counts first, because servers look it up by name when they make the table.
    cards = [card_of_counts(card, checked[1].admit), card] if card.seen else [card]
    for each in cards:
        store.run(f"table {each.table!r}", service.client.make(each))
    return Table(store, route, service.client, service.collections[card.table])


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"table: the name {name!r} is no str: give one")
    arguments.check_new(name, "table", "name")
    return str.__str__(name)


def _checked(store: WorkerStore, name: str, options: TableOptions, numbers: dict[str, Any]) -> TableOptions:
    """Check the options of a table. Return them as plain Python values, so that 8 and numpy.int64(8) compare equal.

    In the result `optimizer` is an object with the hyperparameters `numbers`.
    """
    dim, dtype, init, optimizer, seed, admit, evict, limit, evict_by, evict_after, rounding = options
    servers, collections = store.layout.num_servers, store.collections
    if not (admit is None or isinstance(admit, (Seen, Chance))):
        raise ValueError(f"table {name!r}: admit={admit!r}: give mpips.seen(times), mpips.chance(probability) or None")
    for each in (name, name + COUNTS) if isinstance(admit, Seen) else (name,):
        if each in store.keys:
            raise ValueError(f"table: a key has the name {each!r}: choose another")
        if each in collections and each not in store.restored.names:
            raise ValueError(
                f"table: {each!r} was already made: use the table that the first call returned, or choose another name"
            )
    try:
        dtype = str(dtype) if dtype is None else np.dtype(dtype).name
    except TypeError:
        dtype = repr(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"table {name!r}: dtype={dtype}, and a table holds {', '.join(DTYPES)}: give one of them")
    if rounding not in ROUNDINGS:
        raise ValueError(f"table {name!r}: rounding={rounding!r}: give {' or '.join(map(repr, ROUNDINGS))}")
    if rounding != "nearest" and not is_half(np.dtype(dtype)):
        raise ValueError(
            f"table {name!r}: rounding={rounding!r} is for rows of float16 or bfloat16, and these are {dtype}: "
            "leave it out, or give another dtype"
        )
    dim = whole(name, "dim", dim)
    if not 0 < dim <= MOST_BYTES // 8:
        raise ValueError(f"table {name!r}: dim={dim}: give at least 1 and at most {MOST_BYTES // 8}")
    init = DEFAULT_INIT if init is None else initial.checked(name, init)
    if init.most > float(ml_dtypes.finfo(np.dtype(dtype)).max):
        raise ValueError(f"table {name!r}: init={init!r} is infinite in {dtype}: give a smaller one")
    if isinstance(admit, Seen):
        _check_count(name, "remember", admit.remember, servers)
    checked = TableOptions(
        dim,
        dtype,
        init,
        with_name(name, lambda: row_optimizers.create(optimizer, numbers)),
        whole(name, "seed", seed),
        admit,
        _check_count(name, "evict", evict, 1),
        _check_count(name, "limit", limit, servers),
        _check_evict_by(name, evict_by, limit),
        None if evict_after is None else with_name(name, lambda: eviction.span_of(evict_after)),
        rounding,
    )
    # Compute one row as a test, so that a function that fails raises its error here, and not on a server.
    FirstValues(card_of(name, checked)).write(np.empty((1, dim), dtype), np.zeros(1, np.int64), np.zeros(1, np.int64))
    return checked


def card_of(name: str, options: TableOptions) -> MakeTable:
    """Return the message that makes a table on a server, from the checked options."""
    optimizer, numbers = row_optimizers.encode(options.optimizer)
    admit = options.admit
    return MakeTable(
        name,
        options.dim,
        options.dtype,
        key_of(options.seed, name),
        options.init.spread,
        optimizer,
        numbers,
        options.evict or 0,
        options.limit or 0,
        seen=admit.times if isinstance(admit, Seen) else 0,
        chance=admit.probability if isinstance(admit, Chance) else 1.0,
        evict_by=options.evict_by,
        evict_after=options.evict_after or 0,
        init=options.init.rule,
        mean=options.init.mean,
        stochastic=options.rounding == "stochastic",
    )


def card_of_counts(card: MakeTable, admit: Seen) -> MakeTable:
    """Return the card of the hidden table that counts updates of ids without a row.

    Each row of this table has one value, the count. For each update that names an id, the server applies the gradient
    -1 with learning rate 1 to the row, so that the value grows by 1.
    """
    optimizer = row_optimizers.encode(row_optimizers.create("sgd", {"learning_rate": 1.0}))
    name = card.table_of_counts
    life: dict[str, Any] = {"evict": card.evict, "evict_after": card.evict_after, "limit": admit.remember}
    return MakeTable(name, 1, "float32", card.key, 0.0, *optimizer, **life)


def _difference(restored: MakeTable, asked: MakeTable, source: Restored) -> str:
    """Compare a restored table with the table that the program asks for.

    Raise ValueError if dim, dtype, optimizer, seed or first values differ. If other options differ, the restored ones
    are kept, and the function returns a message about this. Otherwise it returns "".
    """
    arguments_of = {"dim": "dim", "dtype": "dtype", "optimizer": "optimizer", "key": "seed"}
    arguments_of |= {"init": "init", "mean": "init", "bound": "init"}
    for field, argument in arguments_of.items():
        has, wanted = getattr(restored, field), getattr(asked, field)
        if has != wanted:
            how = "another one" if argument == "seed" else f"{has}, and this is {wanted}"
            raise ValueError(f"table: {asked.table!r} has {argument} {how} in {source.source}: {source.cure}")
    if restored == asked:
        return ""
    return f"table {asked.table!r} has other options in {source.source} than are asked for"


def _check_evict_by(name: str, given: object, limit: object) -> str:
    if given is None or given == eviction.AGE:
        return eviction.AGE
    if given not in (eviction.COUNT, eviction.SCORE):
        raise ValueError(f"table {name!r}: evict_by={given!r}: give 'age', 'count' or 'score'")
    if limit is None:
        raise ValueError(f"table {name!r}: evict_by={given!r} says which rows limit= drops first: give limit, too")
    return str(given)


def _check_count(name: str, argument: str, given: object, least: int) -> int | None:
    """Check an option that is None or a whole number of at least `least`."""
    if given is None:
        return None
    number = whole(name, argument, given)
    if not least <= number < MOST_COUNT:
        raise ValueError(f"table {name!r}: {argument}={number}: give at least {least} and less than 2**31, or None")
    return number
