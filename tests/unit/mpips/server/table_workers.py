"""Workers that ask a server for rows of its tables, without MPI, and the tables and ids that tests draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from collectives.fabric.arena import SparseFile
from mpips.optimizers import encode_numbers
from mpips.tables import messages
from mpips.tables.admission import Chance, Seen, chance, seen
from mpips.tables.messages import COUNTS
from mpips.tables.mirror import RowMirror
from mpips.tables.service import ServerTables

CARD = messages.MakeTable("t", 1, "float32", 1, 0.0, "sgd", encode_numbers({"learning_rate": 1.0}))


class Workers:
    """Requests of workers to one server; each asker is (worker, its count of requests)."""

    def __init__(
        self,
        count: int,
        staleness: int | None = None,
        server: tuple[int, int] = (0, 1),
        cards: Sequence[messages.MakeTable] = (CARD,),
        file: SparseFile | None = None,
        mirror: RowMirror | None = None,
    ) -> None:
        self.tables = ServerTables(count, staleness, *server, file, file is not None, mirror)
        self.asked = [0] * count
        self.said: dict[Any, Any] = {}
        for card in cards:
            self.ask(0, card)

    def ask(self, worker: int, request: messages.TableRequest, *arrays: np.ndarray) -> Any:
        asker: Any = (worker, self.asked[worker])
        self.asked[worker] += 1
        payload = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
        self.hear(self.tables.answer(worker, asker, request, payload))
        return asker

    def hear(self, answers: Any) -> None:
        for who, answer in answers:
            assert who not in self.said
            self.said[who] = answer

    def push(self, worker: int, value: float) -> Any:
        gradients = np.array([-value, 0], np.float32)  # ids begin at a multiple of 8 bytes
        return self.ask(worker, messages.PushRows("t", 1), gradients, np.array([9], np.int64))

    def contribute(self, worker: int, call: str, ids: np.ndarray, *rows_and_scores: np.ndarray, time: int = 0) -> Any:
        """A push, a set or a remove of different ids."""
        if call == "remove":
            return self.ask(worker, messages.RemoveRows("t", ids.tobytes(), 0, time))
        rows, *scores = rows_and_scores
        return self.ask(worker, messages.PushRows("t", len(ids), 0, call == "set", time), rows, ids, *scores)

    def pull(self, worker: int, round_: int) -> Any:
        return self.ask(worker, messages.PullRows("t", round_, 1, False), np.array([9], np.int64))

    def value(self, asker: Any) -> float:
        return float(np.frombuffer(self.said[asker].data, np.float32)[0])


LIVES = st.fixed_dictionaries(
    {
        "admit": st.sampled_from([None, seen(2, 12), seen(3), chance(0.5)]),
        "evict": st.sampled_from([0, 1, 3]),
        "limit": st.sampled_from([0, 3, 10]),
        "evict_by": st.sampled_from(["age", "age", "count", "score"]),
        "evict_after": st.sampled_from([0, 0, 1, 3]),
    }
)
CALLS = st.sampled_from(["push", "push", "push", "set", "remove"])
IDS = st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9)


def cards_of(name: str, key: int, optimizer: str, life: dict[str, Any]) -> list[messages.MakeTable]:
    """Tables as workers would have servers make them."""
    numbers, admit = encode_numbers({"learning_rate": 0.1}), life["admit"]
    more = {"evict_by": life.get("evict_by", "age"), "evict_after": life.get("evict_after", 0) * 10**6}
    card = messages.MakeTable(name, 3, "float64", key, 0.5, optimizer, numbers, life["evict"], life["limit"], **more)
    if isinstance(admit, Chance):
        card.chance = admit.probability
    if not isinstance(admit, Seen):
        return [card]
    card.seen, numbers = admit.times, encode_numbers({"learning_rate": 1.0})
    counts = name + COUNTS, 1, "float32", key, 0.0, "sgd", numbers, life["evict"], admit.remember
    return [messages.MakeTable(*counts, evict_after=card.evict_after), card]
