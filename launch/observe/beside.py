"""Threads beside a job that `mpips run` watches: they hear no signals, which are for the one that watches."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads that are started in the block, and those that they start, hear no signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "[HOST:]PORT"; without a host the loopback. click.UsageError for what is none."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise click.UsageError(f"{text!r} is no address: write PORT or HOST:PORT")
    if int(port) >= 1 << 16:
        raise click.UsageError(f"{text!r}: a port is a number from 0 to {(1 << 16) - 1}")
    return host.strip("[]") or "127.0.0.1", int(port)
