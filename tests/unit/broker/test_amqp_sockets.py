"""Sockets: a wait that ends is told from a connection that has."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from umbel.broker.amqp.sockets import TCPChunks, patience_of_socket


class Failing(TCPChunks):
    """Has a socket of which nothing can be read."""

    def __init__(self, error: OSError) -> None:
        self.sock: Any = object()
        self.connected = True
        self._error = error

    def _receive(self, size: int, timeout_s: float | None) -> bytes:
        raise self._error

    def __del__(self) -> None:
        """There is nothing to close."""


def test_a_connection_that_the_kernel_gave_up_is_lost_and_not_quiet() -> None:
    socket = Failing(OSError(errno.ETIMEDOUT, "Connection timed out"))
    with pytest.raises(ConnectionAbortedError):
        socket.receive(1, 0.1)
    assert not socket.connected


@pytest.mark.parametrize("error", [TimeoutError("timed out"), BlockingIOError(errno.EAGAIN, "no")])
def test_when_nothing_came_the_connection_is_still_there(error: OSError) -> None:
    socket = Failing(error)
    with pytest.raises(TimeoutError):
        socket.receive(1, 0.1)
    assert socket.connected


def test_the_kernel_is_told_in_milliseconds() -> None:
    assert list(patience_of_socket(2.5).values()) in ([2500], [])
