"""What comes out of an mpirun whose ranks are on other hosts: passed on as it is, and listened to.

Open MPI's mpirun ends a job whose host is lost with exit code 0. That it was lost it says, in one of two sentences, on
standard error or output. Whether the others had ended well by then says one of them (`mpips.ending.status`).
"""

from __future__ import annotations

import os
import select
import threading

from mpips.store.world import WELL_WITHOUT

LOST = (b"has lost communication with a remote daemon", b"A daemon failed to report back after being spawned")
SENTENCES = (*LOST, WELL_WITHOUT)
LONGEST = max(map(len, SENTENCES))
MOST_BYTES = 1 << 16


class Stream:
    """A pipe whose `entry` is for mpirun, in place of our file `number`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.exit, self.entry = os.pipe()
        os.set_blocking(self.exit, False)
        self._tail = b""

    def pass_on(self, found: set[bytes]) -> bool:
        """Pass on what has come, and add what is in it to `found`; False where nothing more comes now."""
        try:
            data = os.read(self.exit, MOST_BYTES)
        except BlockingIOError:
            return False
        text = self._tail + data
        found.update(sentence for sentence in SENTENCES if sentence in text)
        self._tail = text[-LONGEST:]
        return bool(data) and _written(self._number, data)



class Listener:
    """Passes on, in a thread, what mpirun writes to `output` and `errors`. `start` it once mpirun has them."""

    def __init__(self) -> None:
        self._streams = Stream(1), Stream(2)
        self.output, self.errors = (stream.entry for stream in self._streams)
        self._stopped, self._stop = os.pipe()
        self._found: set[bytes] = set()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        for stream in self._streams:
            os.close(stream.entry)
        self._thread.start()

    def finish(self) -> None:
        """mpirun has ended: nothing more will come."""
        os.close(self._stop)

    def has_finished(self, seconds: float) -> bool:
        """Whether all has been passed on. Blocking for at most so long."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def lost(self) -> bool:
        """Whether mpirun has lost a host."""
        return not self._found.isdisjoint(LOST)

    @property
    def well(self) -> bool:
        """Whether those that were left have ended well."""
        return WELL_WITHOUT in self._found

    def _pass_on(self) -> None:
        open_ = {stream.exit: stream for stream in self._streams}
        while open_:
            ready = select.select([*open_, self._stopped], [], [])[0]
            for stream in [open_[descriptor] for descriptor in ready if descriptor in open_]:
                if not stream.pass_on(self._found):
                    os.close(open_.pop(stream.exit).exit)
            if ready == [self._stopped]:
                break
        for descriptor in (*open_, self._stopped):
            os.close(descriptor)


def _written(file: int, data: bytes) -> bool:
    """Write all of it, waiting for who reads; False where nobody does, as mpirun is to see, too."""
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            select.select([], [file], [])
        except OSError:
            return False
    return True
