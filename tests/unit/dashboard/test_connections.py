"""Connections are bounded in number and in time, whoever holds them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from umbel.dashboard.connections import (
    BACKLOG_MAX,
    CONNECTIONS_MAX,
    FILES_KEPT,
    Limits,
    Sparing,
    Table,
    to_drop,
)
from umbel.dashboard.guard import Visit
from umbel.dashboard.identity import Identity
from umbel.dashboard.serving import Server
from umbel.dashboard.site import Site
from umbel.dashboard.stream import Places

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
WAIT_S = 20.0


class Peer:
    """One connection, from an address of the loopback network."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> bytes:
        """The head of an answer, and as much of its body as came with it."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await asyncio.wait_for(self.reader.readexactly(length), WAIT_S)
        return head

    async def is_dropped(self) -> bool:
        """Wait for its end; raises TimeoutError when there is none."""
        try:
            return await asyncio.wait_for(self.reader.read(1), WAIT_S) == b""
        except ConnectionError:
            return True


@dataclass
class Port:
    number: int
    table: Table
    peers: list[Peer] = field(default_factory=list)

    async def connect(self, source: str = "127.0.0.1") -> Peer:
        made = await asyncio.open_connection("127.0.0.1", self.number, local_addr=(source, 0))
        self.peers.append(Peer(*made))
        return self.peers[-1]


@contextlib.asynccontextmanager
async def serving(site: Site, **limits: Any) -> AsyncIterator[Port]:
    sock = socket.create_server(("127.0.0.1", 0))
    server = Server(site, Limits(**limits))
    task = asyncio.create_task(server._serve([sock]))
    try:
        while not server.started:
            await asyncio.sleep(0)
        port = Port(sock.getsockname()[1], server.table)
        yield port
        for peer in port.peers:
            peer.writer.close()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)
        sock.close()


Scenario = Callable[[Port], Coroutine[Any, Any, None]]


@pytest.fixture
def play(site: Site) -> Callable[..., None]:
    def run(scenario: Scenario, **limits: Any) -> None:
        async def whole() -> None:
            async with serving(site, **limits) as port:
                await scenario(port)

        asyncio.run(whole())

    return run


# -- time --------------------------------------------------------------------------------------


def test_a_request_head_that_does_not_end_is_dropped(play: Callable[..., None]) -> None:
    async def scenario(port: Port) -> None:
        silent, slow, good = [await port.connect() for _ in range(3)]
        await slow.send(REQUEST[:-2])
        await good.send(REQUEST)
        assert b" 200 " in await good.answer()
        assert await silent.is_dropped()
        assert await slow.is_dropped()
        await good.send(REQUEST)  # it was idle meanwhile, and may be for longer
        assert b" 200 " in await good.answer()
        await good.send(REQUEST[:-2])  # the head of a further request has no more time than a first
        assert await good.is_dropped()

    play(scenario, head_s=0.2)


def test_drops_do_not_extend_the_time_of_a_head(play: Callable[..., None]) -> None:
    async def scenario(port: Port) -> None:
        slow = await port.connect()

        async def drip() -> None:
            for at in range(len(REQUEST) - 2):
                await slow.send(REQUEST[at : at + 1])
                await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        assert await slow.is_dropped()
        dripping.cancel()

    play(scenario, head_s=0.3)


def test_an_idle_connection_is_dropped_after_a_while(play: Callable[..., None]) -> None:
    async def scenario(port: Port) -> None:
        peer = await port.connect()
        await peer.send(REQUEST)
        assert b" 200 " in await peer.answer()
        assert await peer.is_dropped()

    play(scenario, idle_s=0.2)


def test_who_does_not_read_is_dropped(play: Callable[..., None]) -> None:
    async def scenario(port: Port) -> None:
        deaf, other = await port.connect(), await port.connect()
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        asked = b"GET /static/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        deaf.writer.write(asked * 2_000)
        async with asyncio.timeout(WAIT_S):
            while len(port.table.connections) == 2:
                await other.send(REQUEST)
                assert b" 200 " in await other.answer()
        deaf.writer.transport.resume_reading()  # type: ignore[attr-defined]

    play(scenario, write_s=0.2)


# -- number ------------------------------------------------------------------------------------


def test_who_holds_many_connections_loses_them_first(play: Callable[..., None]) -> None:
    async def scenario(port: Port) -> None:
        mine = [await port.connect("127.0.0.1") for _ in range(3)]
        for peer in mine:
            await peer.send(REQUEST)
            assert b" 200 " in await peer.answer()
        theirs = [await port.connect("127.0.0.2") for _ in range(60)]
        assert await theirs[0].is_dropped()
        assert await theirs[20].is_dropped()
        assert len(port.table.connections) <= 20
        for peer in mine:
            await peer.send(REQUEST)
            assert b" 200 " in await peer.answer()
        for _ in range(60):  # one by one, each finds a place
            peer = await port.connect("127.0.0.3")
            await peer.send(REQUEST)
            assert b" 200 " in await peer.answer()

    # Nobody is dropped for the time that it takes.
    play(scenario, connections_max=20, head_s=600.0, idle_s=600.0)


@dataclass(frozen=True)
class Guest:
    rank: int
    address: str
    since_s: float


def test_the_lowest_rank_goes_first_then_the_biggest_crowd_then_the_oldest() -> None:
    known = [Guest(2, "a", 0.0), Guest(2, "a", 1.0)]
    crowd = [Guest(0, "b", float(number)) for number in range(5)]
    few = [Guest(0, "c", -1.0), Guest(0, "c", -2.0)]
    busy = [Guest(1, "b", -9.0)]
    guests = [*few, *crowd, *known, *busy]
    assert to_drop(guests, 3) == crowd[:3]
    assert to_drop(guests, 5)[3:] in ([crowd[3], few[1]], [few[1], crowd[3]])
    assert set(to_drop(guests, 50)) == {*crowd, *few}
    assert to_drop([*known, *busy], 9) == busy
    assert to_drop([], 1) == []


@pytest.mark.parametrize(
    ("files", "connections", "backlog"),
    [
        (resource.RLIM_INFINITY, CONNECTIONS_MAX, BACKLOG_MAX),
        (20_000, CONNECTIONS_MAX, BACKLOG_MAX),
        (1_024, CONNECTIONS_MAX, BACKLOG_MAX),
        (256, 96, 32),
        (40, 24, 8),
    ],
)
def test_there_are_fewer_connections_than_files(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int, backlog: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    limits = Limits.of_process()
    assert (limits.connections_max, limits.backlog) == (connections, backlog)
    if FILES_KEPT < files < resource.RLIM_INFINITY:
        assert limits.connections_max + limits.backlog <= files - FILES_KEPT


# -- live updates ------------------------------------------------------------------------------


def visit(user: str = "", address: str = "a") -> Visit:
    return Visit(Identity(user, address), "")


def test_live_updates_are_shared_between_addresses_and_those_who_logged_in_come_first() -> None:
    places = Places(4)
    first = [places.enter(visit(address="a")) for _ in range(4)]
    assert not places.has_room(visit(address="a"))
    assert places.has_room(visit(address="b"))
    mine = places.enter(visit(address="b"))
    assert [one.is_lost for one in first] == [True, False, False, False]
    assert places.has_room(visit(address="b"))
    assert places.enter(visit(address="b")) is not None
    assert not places.has_room(visit(address="b"))  # each has half of them
    for number in range(4):
        assert places.has_room(visit("ada", "a"))
        places.enter(visit("ada", "a"))
        assert len(places) == 4, number
    assert all(one.is_lost for one in (*first, mine))
    assert not places.has_room(visit("ada", "a"))
    assert not places.has_room(visit(address="c"))
    places.leave(first[0])
    assert len(places) == 4


# -- the log -----------------------------------------------------------------------------------


def test_what_anybody_can_provoke_is_logged_once_a_minute() -> None:
    now = [100.0]
    sparing = Sparing(clock=lambda: now[0])

    def passes(text: str, level: int = logging.WARNING) -> bool:
        return sparing.filter(logging.LogRecord("x", level, "", 0, text, (), None))

    assert [passes("Invalid HTTP request received.") for _ in range(3)] == [True, False, False]
    assert passes("another")
    assert [passes("ours", logging.ERROR) for _ in range(2)] == [True, True]
    now[0] += 61
    assert passes("Invalid HTTP request received.")
