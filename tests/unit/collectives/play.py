"""A schedule executed on NumPy arrays in one process: the meaning of a schedule, in as few lines as it takes."""

from __future__ import annotations

import numpy as np

from collectives.schedule.model import NOBODY, Schedule, cut


def play(schedule: Schedule, vectors: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank holds after the schedule ran over the ranks' vectors, added with +."""
    if schedule.kind == "alltoall":
        return _alltoall(schedule, vectors)
    held = [vector.copy() for vector in vectors]
    for lane in range(len(schedule.lanes)):
        at = schedule.offsets(len(held[0]), lane)
        texts = [list(schedule.steps(lane, rank)) for rank in range(schedule.p)]
        for step in zip(*texts):
            before = [vector.copy() for vector in held]
            for rank, rounds in enumerate(step):
                for number, r in enumerate(rounds):
                    if r.receive_from == NOBODY:
                        continue
                    sent = list(step[r.receive_from])[number].send
                    come = before[r.receive_from][at[sent.start] : at[sent.stop]]
                    place = slice(at[r.receive.start], at[r.receive.stop])
                    held[rank][place] = held[rank][place] + come if r.add else come
    return held


def _alltoall(schedule: Schedule, vectors: list[np.ndarray]) -> list[np.ndarray]:
    p, n = schedule.p, len(vectors[0])
    block = [slice(cut(n, p, i), cut(n, p, i + 1)) for i in range(p)]
    out = [np.zeros_like(vector) for vector in vectors]
    for rank in range(p):
        out[rank][block[rank]] = vectors[rank][block[rank]]
        for step in schedule.steps(0, rank):
            for r in step:
                out[r.send_to][block[rank]] = vectors[rank][block[r.send.start]]
    return out
