import socket
import threading
import time

import pytest
from env_servers import (
    NoRoute,
    broken,
    cut,
    dropped,
    free_port,
    gateway,
    html,
    saying,
    serving,
    slow,
    trickle,
)

from race_jax.envs import service
from race_jax.envs.base import EnvironmentFault
from race_jax.envs.service import Service


def echo(method, route, body):
    if route == "/lost":
        raise NoRoute
    return {"method": method, "route": route, "body": body}


@pytest.fixture
def server():
    with serving(echo) as running:
        yield running


def asking(server, **settings):
    return Service(server.address, **{"timeout": 0.4, "attempts": 3, "pause": 0.01, **settings})


def test_requests_and_replies(server):
    ask = asking(server)
    ask.check()
    got = ask.post("/step", {"id": 3, "text": "ü"})
    assert got == {"method": "POST", "route": "/step", "body": {"id": 3, "text": "ü"}}
    assert ask.get("/state", id=3)["body"] == {"id": "3"}
    assert ask.post("/step", {"text": "half \ud83d"})["body"] == {"text": "half \ud83d"}
    ask.close()
    assert ask.post("/step", {})["route"] == "/step"


@pytest.mark.parametrize("fault", [slow, trickle, broken, gateway, dropped, cut])
def test_what_may_pass_is_tried_again_where_that_is_safe(server, fault):
    server.faults["/reset"] = [fault, fault]
    assert asking(server).post("/reset", {"id": 1}, again=True)["body"] == {"id": 1}
    assert server.routes() == ["/reset"] * 3


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (slow, r"POST http://127\.0\.0\.1:\d+/step: no whole reply within 0\.4 s"),
        (trickle, "no whole reply within"),
        (broken, "HTTP status 500, 'Internal Server Error'"),
        (gateway, "HTTP status 502, '<html>"),
        (dropped, "the connection broke"),
        (cut, "the connection broke"),
    ],
)
def test_a_step_is_sent_once(server, fault, said):
    server.faults["/step"] = [fault]
    with pytest.raises(EnvironmentFault, match=said):
        asking(server).post("/step", {})
    assert server.routes() == ["/step"]


def test_attempts_end(server):
    server.faults["/reset"] = [broken] * 9
    with pytest.raises(EnvironmentFault, match=r"status 500.* in 3 attempts"):
        asking(server).post("/reset", {}, again=True)
    assert server.routes() == ["/reset"] * 3


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (html, "no JSON but '<html><body>Please log in"),
        (saying({"error": "The id 7 is not valid."}), "the server says 'The id 7 is not valid.'"),
    ],
)
def test_wrong_replies_are_faults_at_once(server, fault, said):
    server.faults["/reset"] = [fault]
    with pytest.raises(EnvironmentFault, match=said):
        asking(server).post("/reset", {}, again=True)
    with pytest.raises(EnvironmentFault, match="HTTP status 404") as raised:
        asking(server).get("/lost")
    assert raised.value.status == 404
    assert len(server.seen) == 2


def test_a_reply_without_end_is_not_held(server, monkeypatch):
    monkeypatch.setattr(service, "MAX_BYTES", 100)
    with pytest.raises(EnvironmentFault, match="the reply is over 100 bytes"):
        asking(server).post("/step", {"text": "x" * 1000})


def test_a_server_that_is_down_is_named_at_once():
    address = f"http://127.0.0.1:{free_port()}"
    ask = Service(address, pause=0.01, start="start it with `serve`")
    with pytest.raises(EnvironmentFault, match=rf"no server answers at {address}.*`serve`"):
        ask.check()
    with pytest.raises(EnvironmentFault, match=r"no connection.*`serve` in 4 attempts"):
        ask.post("/step", {})


def test_a_server_that_is_busy_is_there():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ask = Service(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=0.2, attempts=1)
        ask.check()
        with pytest.raises(EnvironmentFault, match="no whole reply within"):
            ask.get("/")


def test_a_server_that_comes_back_is_asked_again():
    """Nothing was sent without a connection, so even a step can be sent again."""
    port, done = free_port(), []

    def later():
        time.sleep(0.2)
        with serving(echo, port):
            while not done:
                time.sleep(0.01)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        ask = Service(f"http://127.0.0.1:{port}", attempts=9, pause=0.05)
        assert ask.post("/step", {"id": 1})["body"] == {"id": 1}
    finally:
        done.append(True)
        thread.join()


@pytest.mark.parametrize(
    ("address", "settings", "said"),
    [
        ("localhost:8000", {}, "it must be like http://"),
        ("http://", {}, "it must be like"),
        ("ftp://a", {}, "it must be like"),
        ("http://a:99999", {}, "it must be like"),
        ("http://a:x", {}, "it must be like"),
        ("http://a", {"timeout": 0}, "timeout is 0"),
        ("http://a", {"attempts": 0}, "attempts is 0"),
        ("http://a", {"pause": -1}, "pause is -1"),
    ],
)
def test_bad_settings(address, settings, said):
    with pytest.raises(ValueError, match=said):
        Service(address, **settings)
