"""The server of rows, with real readers, and with callers that mean harm."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.rows import protocol, server
from actors.rows.memory import BlockMemory
from actors.rows.protocol import (
    HOLD,
    REQUEST_BYTES,
    TAKE,
    VERSION,
    RowsPlace,
    receive_answer,
    receive_into,
)
from actors.rows.reader import RowsReader, RowsRefused
from actors.rows.server import RowsServer
from tests.unit.rows.kept import Dictionary, serving
from tests.waiting import until

ROWS = torch.arange(3 * 2**20, dtype=torch.int32).view(torch.bfloat16).view(-1, 64)
"""12 MB: more than a socket's buffers hold."""


@pytest.fixture
def store() -> Dictionary:
    return Dictionary(BlockMemory.shared(2**25), deepstack=2)


@pytest.fixture
def served(store: Dictionary, tmp_path: Path) -> Iterator[tuple[RowsServer, RowsPlace]]:
    with serving(store, tmp_path) as found:
        yield found


@pytest.fixture
def place(served: tuple[RowsServer, RowsPlace]) -> RowsPlace:
    return served[1]


def reader_of(place: RowsPlace) -> RowsReader:
    found = RowsReader.connect(place)
    assert found
    return found


def raw(place: RowsPlace) -> socket.socket:
    host, port = place.tcp.split(":")
    return socket.create_connection((host, int(port)), 20)


def ended(connection: socket.socket) -> bool:
    """Whether the server closes it, within 20 s."""
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_rows_are_read_over_the_socket_that_can_be_reached(
    store: Dictionary, place: RowsPlace
) -> None:
    name = store.keep(ROWS)
    for where, path in ((place, "unix"), (replace(place, unix="/nowhere"), "tcp")):
        reader = reader_of(where)
        assert reader.path == path
        held = reader.hold(name)
        assert (held.shape, held.dtype, held.deepstack) == (tuple(ROWS.shape), "bfloat16", 2)
        assert (held.memory is not None) == (path == "unix"), "handles stay on the machine"
        target = torch.zeros_like(ROWS)
        reader.read(name, target.view(torch.uint8).flatten().numpy().data)
        assert torch.equal(target.view(torch.int16), ROWS.view(torch.int16))
        reader.free(name)
        until(lambda: store.held == 0)
        reader.close()


def test_neither_way_or_another_version_is_no_connection(place: RowsPlace) -> None:
    assert RowsReader.connect(RowsPlace("/nowhere", "")) is None
    assert RowsReader.connect(RowsPlace("/nowhere", "127.0.0.1:1")) is None
    assert RowsReader.connect(replace(place, version=VERSION + 1)) is None


def test_ids_are_not_told_to_another_users_process(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    reader = reader_of(place)
    assert reader.path == "tcp"
    reader.close()
    assert RowsReader.connect(replace(place, tcp="")) is None


def test_only_what_is_held_can_be_read(store: Dictionary, place: RowsPlace) -> None:
    name, other = store.keep(ROWS), store.keep(ROWS)
    reader = reader_of(place)
    target = memoryview(bytearray(ROWS.nbytes))
    for refused in ("x" * 32, "short", "ü" * 32):
        with pytest.raises(RowsRefused):
            reader.hold(refused)
    reader.hold(name)
    with pytest.raises(RowsRefused, match="does not hold"):
        reader.read(other, target)
    with pytest.raises(RowsRefused, match="does not hold"):
        reader.free(other)
    store.lost.add(name)
    with pytest.raises(RowsRefused, match="not written"):
        reader.read(name, target)
    reader.ping()
    assert store.holds == {name: 1}
    reader.close()


def test_what_a_connection_holds_ends_with_it(store: Dictionary, place: RowsPlace) -> None:
    name = store.keep(ROWS)
    readers = [reader_of(place) for _ in range(2)]
    for reader in readers:
        reader.hold(name)
        reader.hold(name)
    assert store.held == 4
    readers[0].close()
    until(lambda: store.held == 2)
    readers[1].free(name)
    assert store.held == 1
    readers[1].close()
    until(lambda: store.held == 0)


def test_a_reader_that_says_nothing_loses_what_it_holds(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HOLD_SECONDS", 0.3)
    name = store.keep(ROWS)
    silent, talking = reader_of(place), reader_of(place)
    silent.hold(name)
    talking.hold(name)
    for _ in range(8):
        time.sleep(0.1)
        talking.ping()
    assert store.held == 1
    with pytest.raises(ConnectionError):
        silent.ping()
    assert not silent.alive
    talking.close()


def test_a_server_that_stops_waits_for_what_is_held(
    store: Dictionary, served: tuple[RowsServer, RowsPlace]
) -> None:
    running, place = served
    name = store.keep(ROWS)
    reader = reader_of(place)
    reader.hold(name)
    stopping = threading.Thread(target=running.stop, args=(20,))
    stopping.start()
    time.sleep(0.2)
    assert RowsReader.connect(place) is None
    reader.read(name, memoryview(bytearray(ROWS.nbytes)))
    reader.free(name)
    stopping.join(10)
    assert not stopping.is_alive()
    with pytest.raises(ConnectionError):
        reader.ping()


def test_a_server_that_stops_does_not_wait_for_ever(
    store: Dictionary, served: tuple[RowsServer, RowsPlace]
) -> None:
    running, place = served
    reader = reader_of(place)
    reader.hold(store.keep(ROWS))
    began = time.monotonic()
    running.stop(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert store.held == 0
    reader.close()


@pytest.mark.parametrize(
    "sent",
    [
        os.urandom(4096),
        b"GET /v1/model HTTP/1.1\r\nHost: a\r\n\r\n" * 4,
        bytes([VERSION + 1]) + HOLD + b"x" * 32,
        bytes([VERSION]) + HOLD + b"\xff" * 32,
        bytes([VERSION]) + TAKE + b"\xff" * 64,
        bytes([VERSION]) + HOLD,
    ],
)
def test_what_is_no_request_ends_its_connection_alone(
    store: Dictionary, place: RowsPlace, sent: bytes
) -> None:
    name = store.keep(ROWS)
    reader = reader_of(place)
    reader.hold(name)
    with closing(raw(place)) as stranger:
        stranger.sendall(sent)
        if len(sent) < REQUEST_BYTES:
            stranger.shutdown(socket.SHUT_WR)
        assert ended(stranger)
    reader.read(name, memoryview(bytearray(ROWS.nbytes)))
    reader.close()


def test_unknown_ids_and_verbs_are_told_so(place: RowsPlace) -> None:
    with closing(raw(place)) as stranger:
        for verb in (HOLD, b"x", b"\x00"):
            stranger.sendall(bytes([VERSION]) + verb + b"x" * 32)
            assert set(receive_answer(stranger)) == {"error"}


def test_a_slow_stranger_is_cut_off(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STRANGER_SECONDS", 0.5)
    with closing(raw(place)) as stranger:
        began = time.monotonic()
        stranger.settimeout(0.05)
        request = bytes([VERSION]) + HOLD + b"x" * 32
        for byte in request:  # which takes 1.7 s
            try:
                stranger.sendall(bytes([byte]))
                if stranger.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert 0.4 < time.monotonic() - began < 1.5


def test_a_reader_that_does_not_read_is_cut_off(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_SECONDS", 0.3)
    name = store.keep(ROWS)
    with closing(raw(place)) as lazy:
        for verb in (HOLD, protocol.READ):
            lazy.sendall(bytes([VERSION]) + verb + name.encode())
        until(lambda: store.held == 1)
        until(lambda: store.held == 0)


def test_a_reader_that_trickles_is_cut_off(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "transfer_seconds", lambda size_bytes: 0.5)
    monkeypatch.setattr(protocol, "PIECE_BYTES", 2**16)
    name = store.keep(ROWS)
    with closing(raw(place)) as lazy:
        for verb in (HOLD, protocol.READ):
            lazy.sendall(bytes([VERSION]) + verb + name.encode())
        until(lambda: store.held == 1)
        end = time.monotonic() + 10
        while store.held:
            lazy.recv(2**16)
            time.sleep(0.02)
            assert time.monotonic() < end, "3.6 s for all of it"


def test_strangers_do_not_keep_readers_out(
    store: Dictionary, served: tuple[RowsServer, RowsPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    (rows_server, place), name = served, store.keep(ROWS)
    strangers = [raw(place) for _ in range(4)]
    until(lambda: len(rows_server._connections) == 4)  # over TCP, readers over the unix socket
    readers = []
    for _ in range(4):
        reader = reader_of(place)
        reader.hold(name)
        readers.append(reader)
    assert all(ended(one) for one in strangers)
    with closing(raw(place)) as stranger:
        assert ended(stranger), "readers are not sent away for it"
    for reader in readers:
        reader.ping()
        reader.close()
    for one in strangers:
        one.close()


def test_readers_that_hold_nothing_make_room(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one used longest ago."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    holding, used, idle = (reader_of(place) for _ in range(3))
    holding.hold(store.keep(ROWS))
    idle.ping()
    used.ping()
    latest = reader_of(place)
    for reader in (latest, used, holding):
        reader.ping()
    assert not idle.alive
    for reader in (latest, used, holding):
        reader.close()


def test_readers_are_served_again_once_threads_can_be_started(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = store.keep(ROWS)
    with monkeypatch.context() as patch:

        def fail(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        with closing(raw(place)) as refused:
            assert ended(refused)
    reader = reader_of(replace(place, unix="/nowhere"))
    reader.hold(name)
    reader.close()


def test_many_readers_at_once_get_their_own_rows(store: Dictionary, place: RowsPlace) -> None:
    tensors = [torch.full((1000, 64), float(number)) for number in range(16)]
    names = [store.keep(rows) for rows in tensors]
    wrong: list[int] = []

    def read(number: int) -> None:
        reader = reader_of(place if number % 2 else replace(place, unix="/nowhere"))
        for _ in range(10):
            reader.hold(names[number])
            target = torch.zeros_like(tensors[number])
            reader.read(names[number], target.view(torch.uint8).flatten().numpy().data)
            reader.free(names[number])
            if not torch.equal(target, tensors[number]):
                wrong.append(number)
        reader.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    until(lambda: store.held == 0)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00\x00\x00",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b'\x00\x00\x00\x13{"size_bytes": 9999}'[:23],
        b'\x00\x00\x00\x12{"size_bytes": 64}half of the rows',
    ],
)
def test_a_server_that_dies_midway_or_talks_nonsense_is_lost(tmp_path: Path, said: bytes) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        path = tmp_path / "rows.sock"
        listener.bind(str(path))
        listener.listen()

        def dies() -> None:
            connection, _ = listener.accept()
            connection.recv(REQUEST_BYTES)
            connection.sendall(said)
            connection.close()

        thread = threading.Thread(target=dies)
        thread.start()
        reader = reader_of(RowsPlace(str(path), ""))
        target = memoryview(bytearray(64))
        call = partial(reader.read, target=target) if b"size" in said else reader.hold
        with pytest.raises(ConnectionError, match="the connection to the replica was lost"):
            call("x" * 32)
        assert not reader.alive
        with pytest.raises(ConnectionError):
            reader.ping()
        thread.join()


def test_a_reader_can_be_closed_while_it_waits(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        path = tmp_path / "rows.sock"
        listener.bind(str(path))
        listener.listen()
        reader = reader_of(RowsPlace(str(path), ""))
        threading.Timer(0.2, reader.close).start()
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            reader.ping()
        assert time.monotonic() - began < 5


def test_ports_are_tried_in_order(store: Dictionary, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        if port + server.PORTS > 65_535:
            pytest.skip("the system gave one of the last ports")
        running = RowsServer(store)
        place = running.start(tmp_path / "rows.sock", "127.0.0.1", port)
        assert port < int(place.tcp.split(":")[1]) < port + server.PORTS
        running.stop()


def test_what_is_taken_is_released(store: Dictionary, place: RowsPlace) -> None:
    mine, others = "a" * 32 + "." + "b" * 32, "a" * 32 + "." + "c" * 32
    store.tensors |= {mine: ROWS, others: ROWS}
    reader = reader_of(place)
    target = torch.zeros_like(ROWS)
    memory = target.view(torch.uint8).flatten().numpy().data
    store.lost.add(others)
    unknown = "a" * 32 + "." + "d" * 32
    names = ("a" * 32, unknown, mine, mine + ".e", others, "a.b", mine)
    answers = list(reader.take([(name, memory) for name in names]))
    not_id = "not an id"
    reasons = [not_id, server.UNKNOWN, "None", not_id, "not written", not_id, server.UNKNOWN]
    assert all(why in str(one) for why, one in zip(reasons, answers, strict=True))
    assert torch.equal(target.view(torch.int16), ROWS.view(torch.int16))
    until(lambda: store.held == 0)
    reader.ping()  # the server has gone on
    assert store.tensors.keys() == {others}
    assert store.held == 0
    store.lost.clear()
    with pytest.raises(ConnectionError):  # it sends as many bytes as there are
        list(reader.take([(others, memory[1:])]))
    until(lambda: store.held == 0)


def test_answers_that_nobody_takes_end_the_connection(store: Dictionary, place: RowsPlace) -> None:
    """The next call would receive them."""
    names = ["a" * 32 + "." + letter * 32 for letter in "bc"]
    store.tensors |= dict.fromkeys(names, ROWS)
    memory = torch.zeros_like(ROWS).view(torch.uint8).flatten().numpy().data
    reader = reader_of(place)
    answers = reader.take([(name, memory) for name in names])
    assert next(answers) is None
    del answers
    assert not reader.alive
    with pytest.raises(ConnectionError):
        reader.ping()
    until(lambda: store.held == 0)


def test_answers_that_an_interrupted_call_leaves_end_the_connection(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store.keep(ROWS), store.keep(ROWS + 1)
    reader = reader_of(place)
    memory = torch.zeros_like(ROWS).view(torch.uint8).flatten().numpy().data
    for name in (first, second):
        reader.hold(name)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("actors.rows.reader.receive_answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reader.read(first, memory)
    with pytest.raises(ConnectionError):
        reader.read(second, memory)
    until(lambda: store.held == 0)


def test_what_could_not_be_sent_is_not_released(
    store: Dictionary, place: RowsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader asks the front door."""
    monkeypatch.setattr(server, "SEND_SECONDS", 0.3)
    name = "a" * 32 + "." + "b" * 32
    store.tensors[name] = ROWS
    with closing(raw(place)) as lazy:
        lazy.sendall(bytes([VERSION]) + TAKE + name.replace(".", "").encode())
        until(lambda: store.held == 1)
        until(lambda: store.held == 0)
    assert name in store.tensors


def test_the_end_waits_for_what_is_being_taken(
    store: Dictionary, served: tuple[RowsServer, RowsPlace]
) -> None:
    running, place = served
    name = "a" * 32 + "." + "b" * 32
    store.tensors[name] = ROWS
    with closing(raw(place)) as connection:
        connection.sendall(bytes([VERSION]) + TAKE + name.replace(".", "").encode())
        assert receive_answer(connection) == {"size_bytes": ROWS.nbytes}
        stopping = threading.Thread(target=running.stop, args=(20,))
        stopping.start()
        until(lambda: not running._running)
        time.sleep(0.1)
        target = bytearray(ROWS.nbytes)
        receive_into(connection, memoryview(target))
        stopping.join(20)
        assert ended(connection)
    assert store.held == 0
