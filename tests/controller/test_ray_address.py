"""An address where no Ray is, is told at once: Ray itself would try for minutes."""

import socket

import pytest

from meshrl.controller.calls import RayStartError
from meshrl.tools.doctor.network import check_cluster

pytest.importorskip("ray")
from meshrl.controller.ray import _check_reachable


@pytest.fixture
def closed_port():
    """A port of this machine that is bound and not listened at, so that nobody else gets it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_nobody_listens(closed_port):
    with pytest.raises(RayStartError, match=rf"nobody listens at 127\.0\.0\.1:{closed_port} .*ray_init\.address"):
        _check_reachable(f"127.0.0.1:{closed_port}")
    with pytest.raises(RayStartError, match="nobody listens"):
        _check_reachable("127.0.0.1:99999")


def test_somebody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        _check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
        server.settimeout(5)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""


@pytest.mark.parametrize("address", ["auto", "local", "ray://nowhere:1"])
def test_what_is_no_plain_address_is_left_to_ray(address, monkeypatch):
    tried = []
    monkeypatch.setattr("socket.create_connection", lambda *words, **_: tried.append(words))
    _check_reachable(address)
    assert not tried


def test_the_doctor_says_so(closed_port, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # another test may have a Ray in this process
    (found,) = check_cluster(f"127.0.0.1:{closed_port}")
    assert found.status == "fail"
    assert "nobody listens" in found.found
