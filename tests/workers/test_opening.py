"""A rank tells addresses that others can dial, whatever it listens on, and names the setting where it cannot listen."""

from __future__ import annotations

import os
import socket

import pytest
from fakes import echo_worker

from workers.opening import OpenedRank, open_rank


def opened(bind_host: str, advertise_host: str | None = None) -> OpenedRank:
    server, found = open_rank(
        echo_worker.load,
        epoch=1,
        terms=echo_worker.TERMS,
        bind_host=bind_host,
        advertise_host=advertise_host,
        own_host="127.0.0.1",
        ports=(0, 0),
        keeps_store=True,
    )
    assert found.store is not None
    for address in (found.address, found.store.address):
        host, _, port = address.rpartition(":")
        socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
        assert host == (advertise_host or "127.0.0.1")
    os.close(found.store.fd)
    server.stop(None)
    return found


def test_a_rank_that_listens_everywhere_tells_one_address() -> None:
    assert opened("0.0.0.0").host == "127.0.0.1"
    assert opened("0.0.0.0", "localhost").host == "localhost"
    assert opened("127.0.0.1").host == "127.0.0.1"


def test_an_address_of_another_machine_names_the_setting() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1.* set cluster\.worker_bind_host to an address"):
        opened("192.0.2.1")
