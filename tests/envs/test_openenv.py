"""The client of OpenEnv's servers, against a server process, and against the released package."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from env_servers import free_port
from websockets.protocol import State

from race_jax.envs import openenv_session
from race_jax.envs.base import Diverged, EnvironmentFault, replay
from race_jax.envs.factory import make_environment
from race_jax.envs.openenv import OpenEnv, OpenEnvConfig
from race_jax.envs.openenv_session import LostSession, Session
from race_jax.rollout.calls import checker_of

TOY, REAL = (Path(__file__).parent.parent / f"openenv_{name}.py" for name in ("toy", "real"))


@contextlib.contextmanager
def started(form):
    command = [sys.executable, TOY, form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        try:
            yield f"http://127.0.0.1:{int(running.stdout.readline())}"
        finally:
            running.kill()


@pytest.fixture(scope="module")
def game():
    with started("schema") as address:
        yield address


@pytest.fixture(scope="module")
def tool_game():
    with started("tools") as address:
        yield address


@contextlib.contextmanager
def playing(address, **settings):
    env = OpenEnv(OpenEnvConfig(address, **{"timeout": 0.6, "pause": 0.05, **settings}))
    try:
        yield env
    finally:
        env.close()


def act(number):
    return {"name": "act", "arguments": {"guess": {"number": number}}}


def guess(number):
    return {"name": "guess", "arguments": {"number": number}}


def test_an_episode_by_the_schema_of_actions(game):
    with playing(game, prompt="What is my number?") as env:
        (tool,) = env.tools
        assert tool["function"]["name"] == "act"
        # What the server fills in itself is not asked for.
        assert list(tool["function"]["parameters"]["properties"]) == ["guess"]
        checker_of(env.tools)
        told = env.reset("seed_3")
        assert told == 'What is my number?\n\n{"text": "Guess.", "left": 3}'
        step = env.step(act(1))
        assert step == ('{"text": "too low", "left": 2}', 0.0, False, False)
        refused = env.step(act("x"))
        assert refused.observation == "Error: the action was refused: guess.number: no integer"
        assert refused[1:] == (0.0, False, False)
        assert env.step(act(4)) == ('{"text": "right", "left": 1}', 1.0, True, True)
        with pytest.raises(ValueError, match="call reset"):
            env.step(act(4))
        env.reset("seed_3")
        assert [env.step(act(9))[1:] for _ in range(3)][-1] == (0.0, True, False)


def test_an_episode_by_the_tools_that_are_listed(tool_game):
    with playing(tool_game) as env:
        assert env.reset("seed_3") == "The episode has begun."
        assert [tool["function"]["name"] for tool in env.tools] == ["guess"]
        assert env.step(guess(1)) == ("too low\n[image]", 0.0, False, False)
        assert env.step(guess(121)).observation == "Error: it went wrong"
        assert env.step(guess(4)) == ("right\n[image]", 1.0, True, True)
        env.reset("seed_3")
        with pytest.raises(EnvironmentFault, match="transport_error: it went wrong"):
            env.step(guess(122))


def test_fields_rewards_and_success_are_settings(game):
    with playing(game, fields=["text"], reward="last", success_at=0.0) as env:
        assert env.reset("seed_3") == "Guess."
        env.step(act(1)), env.step(act(2))
        assert env.step(act(3)) == ("too low", 0.0, True, True)
    with playing(game, fields=["board"]) as env, pytest.raises(EnvironmentFault, match="'board'"):
        env.reset("seed_3")
    with playing(game, success_field="solved") as env:
        env.reset("seed_3")
        with pytest.raises(EnvironmentFault, match=r"no truth value 'solved'.*has text, left"):
            env.step(act(4))


def test_tasks_are_seeds_or_lines_of_reset_options(game, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"id": "a", "reset": {"seed": 3}, "prompt": "Go."}\n{"reset": {"level": "none"}}\n'
    )
    with playing(game, test=str(path), train=[5, 8]) as env:
        assert env.tasks("train") == ["seed_5", "seed_6", "seed_7"]
        assert env.tasks("test") == ["a", "1"]
        assert env.reset("a").startswith("Go.\n\n")
        assert env.step(act(4)).success
        with pytest.raises(EnvironmentFault, match=r"options .* refused: level: there is no such"):
            env.reset("1")
        for task, split in (("seed_0", "other"), ("seed_4", "test")):
            with pytest.raises(ValueError, match="there is no"):
                env.tasks(split) if split == "other" else env.reset(task)
    for line, said in (
        ('{"reset": 3}', "line 1: `reset` is 3; it must be an object"),
        ('{"seed": 3}', "line 1: 'seed' is unknown"),
        ('{"prompt": 3}', "line 1: `prompt` is 3"),
        ('{"id": 1}\n{"id": "1"}', "line 2: a second task is named '1'"),
    ):
        path.write_text(line + "\n")
        with playing(game, test=str(path)) as env, pytest.raises(ValueError, match=said):
            env.tasks("test")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"actions": "mcp"}, "actions is 'mcp'; it can be auto, schema, tools"),
        ({"reward": "mean"}, "reward is 'mean'; it can be sum, last"),
        (
            {"test": [3, 1]},
            r"test is \(3, 1\); it must be a JSONL file of tasks, or the first seed",
        ),
        ({"reward_range": [1, 0]}, r"reward_range is \(1, 0\)"),
        ({"fields": "text"}, "fields is 'text'; it must be a list"),
    ],
)
def test_settings_out_of_range_are_told(settings, said):
    with pytest.raises(ValueError, match=said):
        make_environment("openenv", {"address": "http://127.0.0.1:1", **settings})


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (101, r"ws://127\.0\.0\.1:\d+/ws, step: no whole reply within 0\.6 s"),
        (102, "step: the connection broke"),
        (103, r"the server says 'it went wrong' \(EXECUTION_ERROR\)"),
        (104, "step: the reply is no JSON but '<html>'"),
        (105, "sends an observation or an error there"),
        (106, "`observation` is 'text alone'; an OpenEnv server sends an object there"),
        (107, "`done` is 'yes'"),
        (108, "`reward` is '1'"),
        (109, r"return is 7, but reward_range is \[0, 1\]; set it"),
    ],
)
def test_what_the_server_does_wrong_ends_the_episode_and_no_other(game, number, said):
    with playing(game) as env:
        env.reset("seed_3")
        with pytest.raises(EnvironmentFault, match=said):
            env.step(act(number))
        with pytest.raises(ValueError, match="call reset"):
            env.step(act(1))
        env.reset("seed_3")
        assert env.step(act(4)).success


def test_a_long_observation_comes_whole(game):
    with playing(game) as env:
        env.reset("seed_3")
        assert len(env.step(act(111)).observation) == 1_000_000


def test_a_server_without_room_is_asked_again_and_then_named():
    with started("full") as address, playing(address) as first:
        first.reset("seed_3")
        with playing(address, attempts=3) as second:
            with pytest.raises(EnvironmentFault, match="no room for a further session"):
                second.reset("seed_3")
            first.close()
            second.reset("seed_3")


def test_why_a_session_was_ended_is_read_after_it_was():
    with started("full") as address, playing(address) as first:
        first.reset("seed_3")
        session = Session(address, 5.0)
        until = time.monotonic() + 5
        while session._socket.protocol.state is State.OPEN and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(LostSession, match="no room for a further session"):
            session.reset({})
        session.close()


def test_a_session_that_broke_between_episodes_is_renewed(game):
    with playing(game, attempts=1, pause=0.2) as env:
        env.reset("seed_3")
        env._session._socket.socket.shutdown(socket.SHUT_RDWR)
        assert env.reset("seed_3")


def test_a_task_that_is_over_as_it_begins_is_a_fault(game, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"reset": {"level": "over"}}\n')
    with playing(game, test=str(path)) as env, pytest.raises(EnvironmentFault, match="is over as"):
        env.reset("0")


def test_a_server_that_dies_is_a_fault_and_so_is_one_that_is_down():
    with started("schema") as address, playing(address, attempts=1) as env:
        env.reset("seed_3")
        with pytest.raises(EnvironmentFault, match="the connection broke"):
            env.step(act(110))
        with pytest.raises(EnvironmentFault, match="no connection"):
            env.reset("seed_3")
    with pytest.raises(EnvironmentFault, match=f"no server answers at {address} .*start it with"):
        OpenEnv(OpenEnvConfig(address, timeout=0.3))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("html", r"GET http://127\.0\.0\.1:\d+/schema: the reply is no JSON but '<html>"),
        ("no-schema", "there is no object `action`"),
    ],
)
def test_a_server_that_sends_no_schema_is_named_at_once(form, said):
    with started(form) as address, pytest.raises(EnvironmentFault, match=said):
        OpenEnv(OpenEnvConfig(address))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("far", r"'act': its parameters refer to 'http://127\.0\.0\.1:9/guess\.json'"),
        ("no-object", "'act': its parameters are of the type 'string'"),
        ("twice", "two tools have the name 'guess'"),
    ],
)
def test_tools_at_fault_are_told_by_the_loop(form, said):
    with started(form) as address, playing(address) as env:
        env.reset("seed_3")
        with pytest.raises(ValueError, match=said):
            checker_of(env.tools)


def test_an_episode_is_copied_by_replay_and_a_copy_that_differs_is_told(game):
    make = lambda: OpenEnv(OpenEnvConfig(game, timeout=2.0, fields=["text"]))  # noqa: E731
    copy = replay(make, "seed_3", [act(1), act(2)], ["Guess.", "too low", "too low"])
    assert copy.step(act(4)).success
    copy.close()
    with pytest.raises(Diverged, match="observation 1 of the replay is 'too low'"):
        replay(make, "seed_3", [act(1)], ["Guess.", "too high"])


def test_without_the_package_the_extra_is_named(game, monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(ValueError, match=r"pip install 'race-jax\[openenv\]'"):
        openenv_session.Session(game, 1.0)


installed = pytest.mark.skipif(
    "OPENENV_PYTHON" not in os.environ,
    reason="OPENENV_PYTHON does not name the Python of an environment with openenv-core installed",
)


@installed
@pytest.mark.parametrize("kind", ["schema", "tools"])
def test_an_episode_on_the_released_package(kind):
    port = free_port()
    command = [os.environ["OPENENV_PYTHON"], REAL, str(port), kind]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        try:
            for _ in range(600):
                time.sleep(0.1)
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
            with playing(f"http://127.0.0.1:{port}", timeout=20.0) as env:
                call = act if kind == "schema" else guess
                told = env.reset("seed_3")
                first = env.step(call(1))
                refused = env.step(call("x"))
                assert env.step(call(4))[1:] == (1.0, True, True)
        finally:
            running.terminate()
    if kind == "schema":
        assert json.loads(told) == {"text": "Guess a number from 1 to 9.", "tries_left": 3}
        assert json.loads(first.observation) == {"text": "too low", "tries_left": 2}
        assert refused.observation.startswith("Error: the action was refused: guess.number: Input")
    else:
        assert (told, first.observation) == ("The episode has begun.", "too low")
        assert refused.observation.startswith("Error: 1 validation error")
