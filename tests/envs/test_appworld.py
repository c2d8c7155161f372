import ast
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import appworld_toy
import pytest
from env_servers import NoRoute, broken, dropped, free_port, html, saying, serving, slow

from race_jax.envs import appworld, appworld_export
from race_jax.envs.appworld import (
    AppWorld,
    AppWorldConfig,
    bounded,
    code,
    read_functions,
    scenario_completion,
)
from race_jax.envs.base import EnvironmentFault, replay

LINE = re.compile(r"print\(apis\.(\w+)\.(\w+)\(\*\*(\{.*\})\)\)", re.DOTALL)


def tool(name, *required, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
TOOLS = [
    tool("api_docs__show_app_descriptions"),
    tool("supervisor__show_account_passwords"),
    tool("supervisor__complete_task", answer={}, status=TEXT),
    tool("simple_note__login", "username", "password", username=TEXT, password=TEXT),
    tool("simple_note__create_note", "title", "access_token", title=TEXT, access_token=TEXT),
    tool("gmail__login", "username", "password", username=TEXT, password=TEXT),
]


class AppWorldServer:
    """One world, as the real server has it: errors are 500, outputs are what was printed."""

    def __init__(self):
        self.task, self.notes, self.done, self.args, self.lines = None, [], None, None, []

    def __call__(self, method, route, body):
        if route == "/initialize":
            self.task, self.notes, self.done, self.args = body["task_id"], [], None, body
            person = {"first_name": "Ann", "last_name": "Lee", "email": "a@b.c"}
            output = {
                "task_id": self.task,
                "instruction": "Write a note 'milk'.",
                "supervisor": {**person, "phone_number": "555"},
                "datetime": "2023-05-18T12:00:00",
            }
            return {"output": output}
        routes = ("/execute", "/task_completed", "/evaluate")
        if route not in routes:
            raise NoRoute
        assert body["task_id"] == self.task
        if route == "/execute":
            return {"output": self.run(body["code"])}
        if route == "/task_completed":
            return {"output": self.done is not None}
        passes = [{"requirement": "a", "label": None}] * (2 if "milk" in self.notes else 1)
        fails = [{"requirement": "b", "trace": "", "label": None}] * (2 - len(passes))
        report = {"success": not fails, "difficulty": 1, "num_tests": 2}
        return {"output": {**report, "passes": passes, "failures": fails}}

    def run(self, line):
        self.lines.append(line)
        _, api, arguments = LINE.fullmatch(line).groups()
        given = ast.literal_eval(arguments)
        failed = 'Execution failed. Traceback:\n  File "<python-input>"\nException: '
        if api == "login":
            right = given == {"username": "a@b.c", "password": "it's\n{2}"}
            return '{"access_token": "T"}\n' if right else f"{failed}401 Unauthorized"
        if api == "create_note":
            if given.get("access_token") != "T":
                return f"{failed}You are not authorized."
            self.notes.append(given["title"])
            return "{}\n" + "x" * 1000
        if api == "complete_task":
            if given.get("status") == "odd":
                return f"{failed}422"
            self.done = given
        return "Execution successful."


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "appworld.json"
    tasks = {"train": ["a1_1", "a1_2"], "test_normal": ["n1_1"], "test_challenge": ["c1_1"]}
    path.write_text(json.dumps({"version": "0", "tools": TOOLS, "tasks": tasks}))
    return str(path)


@pytest.fixture
def server():
    with serving(AppWorldServer()) as running:
        yield running


@pytest.fixture
def make(functions, server, monkeypatch):
    """Makes clients of one server; a test's servers and locks are its own."""
    clients = []

    def client(**settings):
        given = {"addresses": (server.address,), "functions": functions, **settings}
        env = AppWorld(AppWorldConfig(**given))
        clients.append(env)
        return env

    connect = AppWorld._connect

    def fast(self, address):
        made = connect(self, address)
        made._timeout, made._pause = 0.4, 0.01
        made.close()
        return made

    monkeypatch.setattr(AppWorld, "_connect", fast)
    yield client
    for env in clients:
        env.close()


def solve(env, title="milk", **completion):
    env.step(call("simple_note__login", username="a@b.c", password="it's\n{2}"))
    env.step(call("simple_note__create_note", title=title, access_token="T"))
    return env.step(call("supervisor__complete_task", **completion))


def test_an_episode(make, server):
    env = make()
    first = env.reset("a1_1")
    assert first == (
        "Write a note 'milk'.\n\nThe task is from Ann Lee (email a@b.c, phone 555). "
        "It is now 2023-05-18T12:00:00."
    )
    step = env.step(call("simple_note__login", username="a@b.c", password="wrong"))
    assert step.observation.endswith("401 Unauthorized")
    assert (step.reward, step.done, step.success) == (0.0, False, False)
    step = env.step(call("simple_note__login", username="a@b.c", password="it's\n{2}"))
    assert step.observation == '{"access_token": "T"}'
    env.step(call("simple_note__create_note", title="milk", access_token="T"))
    assert not env.step(call("supervisor__complete_task", status="odd")).done
    step = env.step(call("supervisor__complete_task", answer=None, status="success"))
    assert step == ("Execution successful.", 1.0, True, True)
    assert server.answer.done == {"answer": None, "status": "success"}
    assert env.evaluation["num_tests"] == 2
    with pytest.raises(ValueError, match="call reset"):
        env.step(call("supervisor__complete_task"))
    assert server.answer.args["experiment_name"] == f"race-jax-{server.server_port}"
    assert server.answer.args["timeout_seconds"] == 100
    env.reset("a1_2")
    assert env.evaluation is None


def test_reward_is_success_or_the_share_of_tests(make):
    env = make()
    env.reset("a1_1")
    step = solve(env, "eggs")
    assert (step.reward, step.done, step.success) == (0.0, True, False)
    env.close()
    env = make(reward="tests")
    env.reset("a1_1")
    assert solve(env, "eggs") == ("Execution successful.", 0.5, True, False)
    env.reset("a1_1")
    assert solve(env).reward == 1.0


def test_calls_become_code():
    assert code(call("api_docs__show_app_descriptions")) == (
        "print(apis.api_docs.show_app_descriptions(**{}))"
    )
    given = {"b": [1, 2.5, None, True, {"k": "v'\"\\"}], "a": "]})) ; import os\n# ü 😀"}
    line = code(call("simple_note__create_note", **given))
    assert "\n" not in line
    app, api, arguments = LINE.fullmatch(line).groups()
    assert (app, api, ast.literal_eval(arguments)) == ("simple_note", "create_note", given)
    assert isinstance(ast.parse(line).body[0].value.args[0], ast.Call)
    for name in ("login", "a__b)", "a.b__c", "a__", "__b", "a__b\n", ""):
        with pytest.raises(ValueError, match="app__function"):
            code(call(name))
    for value in (float("nan"), {1, 2}, b"x"):
        with pytest.raises(ValueError, match="the arguments of a__b are no JSON"):
            code(call("a__b", x=value))


def test_outputs_are_bounded(make):
    assert bounded("x" * 200, 200) == "x" * 200
    cut = bounded("a" * 500 + "b" * 500, 200)
    assert cut == "a" * 70 + "\n[860 characters left out]\n" + "b" * 70
    assert len(bounded("x" * 10**6, 20_000)) <= 20_000
    env = make(max_output=200)
    env.reset("a1_1")
    env.step(call("simple_note__login", username="a@b.c", password="it's\n{2}"))
    step = env.step(call("simple_note__create_note", title="milk", access_token="T"))
    assert "characters left out" in step.observation
    assert len(step.observation) <= 200


def test_only_what_is_offered_can_be_called(make):
    env = make(apps=("simple_note",))
    offered = [tool["function"]["name"] for tool in env.tools]
    assert offered == [tool["function"]["name"] for tool in TOOLS[:-1]]
    env.reset("a1_1")
    with pytest.raises(ValueError, match="no tool 'gmail__login'"):
        env.step(call("gmail__login", username="x", password="y"))
    assert not env.step(call("supervisor__show_account_passwords")).done


def test_splits(make):
    env = make()
    assert env.tasks("train") == ["a1_1", "a1_2"]
    assert env.tasks("test") == ["n1_1"]
    assert make(test="test_challenge").tasks("test") == ["c1_1"]
    with pytest.raises(ValueError, match="no task ids of dev; run `appworld download data`"):
        env.tasks("dev")
    with pytest.raises(ValueError, match="no split 'all'"):
        env.tasks("all")
    for task in ("", "a1", "a1_", "../a_1", "a1_1\n"):
        with pytest.raises(ValueError, match="like 82e2fac_1"):
            env.reset(task)


def test_a_server_is_one_workers_alone(make, functions, server):
    first = make()
    first.reset("a1_1")
    second = make()
    with pytest.raises(ValueError, match="all 1 servers of `addresses` are in use"):
        second.reset("a1_2")
    with serving(AppWorldServer()) as other:
        both = make(addresses=(server.address, other.address))
        both.reset("a1_2")
        assert (server.answer.task, other.answer.task) == ("a1_1", "a1_2")
        both.close()
    first.close()
    second.reset("a1_2")
    assert server.answer.task == "a1_2"


def test_a_worker_that_dies_leaves_its_server(server):
    hold = "import sys, os; from race_jax.envs import appworld; l = appworld._lock(sys.argv[1]);"
    hold += "print(l is not None, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, server.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout.readline() == "True\n"
        assert appworld._lock(server.address) is None
        worker.kill()
        worker.wait()
    lease = appworld._lock(server.address)
    assert lease is not None
    os.close(lease)


@pytest.mark.parametrize("fault", [slow, broken, html, dropped, saying([]), saying({"output": 3})])
def test_a_call_that_fails_is_an_environment_fault(make, server, fault):
    env = make()
    env.reset("a1_1")
    server.faults["/execute"] = [fault]
    with pytest.raises(EnvironmentFault):
        env.step(call("supervisor__show_account_passwords"))
    assert server.routes().count("/execute") == 1
    with pytest.raises(ValueError, match="call reset"):
        env.step(call("supervisor__show_account_passwords"))
    env.reset("a1_1")
    assert solve(env).success


def test_what_only_reads_is_asked_again(make, server):
    env = make()
    server.faults = {route: [broken, dropped] for route in ("/initialize", "/evaluate")}
    server.faults["/task_completed"] = [slow]
    env.reset("a1_1")
    assert solve(env).success
    assert server.routes().count("/execute") == 3


@pytest.mark.parametrize(
    "report",
    [
        None,
        {},
        {"passes": [], "num_tests": 0, "success": True},
        {"passes": [1, 2], "num_tests": 1, "success": True},
        {"passes": [1], "num_tests": 1, "success": "yes"},
    ],
)
def test_reports_that_make_no_sense_are_faults(make, server, report):
    env = make()
    env.reset("a1_1")
    server.faults["/evaluate"] = [saying({"output": report})]
    with pytest.raises(EnvironmentFault, match="of /evaluate"):
        solve(env)


def test_an_initialisation_that_lacks_the_task(make, server):
    server.faults["/initialize"] = [saying({"output": {"instruction": "x"}}), saying({"a": 1})]
    env = make()
    with pytest.raises(EnvironmentFault, match="lacks 'supervisor'"):
        env.reset("a1_1")
    with pytest.raises(EnvironmentFault, match="no `output`, which an AppWorld"):
        env.reset("a1_1")


def test_a_server_that_is_down_is_named(functions, server):
    down = f"http://127.0.0.1:{free_port()}"
    config = AppWorldConfig((server.address, down), functions)
    with pytest.raises(EnvironmentFault, match=rf"{down}.*`appworld serve environment --port \d"):
        AppWorld(config)


def test_an_episode_is_copied_by_replay_on_another_server(make, server):
    calls = [call("simple_note__login", username="a@b.c", password="it's\n{2}")]
    env = make()
    seen = [env.reset("a1_1"), env.step(calls[0]).observation]
    with serving(AppWorldServer()) as other:
        both = (server.address, other.address)
        copy = replay(lambda: make(addresses=both), "a1_1", calls, seen)
        assert other.answer.task == "a1_1"
        copy.close()


def test_scenarios():
    assert scenario_completion({"a_1": True, "a_2": True, "b_1": True, "b_2": False}) == 0.5
    assert scenario_completion({}) == 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"addresses": ()}, "addresses is empty"),
        ({"addresses": "http://a"}, "it must be a list of addresses"),
        ({"addresses": ("http://a", "http://a")}, "names a server twice"),
        ({"test": "dev"}, "test_normal or test_challenge"),
        ({"reward": "f1"}, "success or tests"),
        ({"experiment": "a/b"}, "it names a folder"),
        ({"max_output": 100}, "at least 200"),
        ({"max_interactions": 0}, "at least 1"),
        ({"call_seconds": 0}, "at least 1"),
        ({"timeout": 100}, "must be above call_seconds=100"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ValueError, match=said):
        AppWorldConfig(**{"addresses": ("http://a",), "functions": "f", **settings})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no file of AppWorld's functions"),
        ("[]", "appworld_export.py"),
        ('{"tools": []}', "'tasks'"),
        ('{"tools": [3], "tasks": {}}', "tool 1 is not"),
        ('{"tools": [], "tasks": {}}', "no functions of 'api_docs'"),
        (json.dumps({"tools": [TOOLS[1], *TOOLS], "tasks": {}}), "two tools have the name"),
    ],
)
def test_bad_files_of_functions(tmp_path, text, said):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_functions(path)


def test_apps_that_are_not_there(functions):
    with pytest.raises(ValueError, match=r"no functions of 'maps'; it has api_docs, gmail"):
        read_functions(functions, ["maps"])


COUNTS = {
    "amazon": 66,
    "api_docs": 4,
    "file_system": 26,
    "gmail": 42,
    "phone": 30,
    "simple_note": 17,
    "splitwise": 65,
    "spotify": 91,
    "supervisor": 6,
    "todoist": 56,
    "venmo": 54,
}


installed = pytest.mark.skipif(
    "APPWORLD_PYTHON" not in os.environ,
    reason="APPWORLD_PYTHON does not name the Python of an environment with AppWorld installed",
)


def with_appworld(script, *arguments, folder):
    command = [os.environ["APPWORLD_PYTHON"], script, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=folder, capture_output=True)


@pytest.fixture
def real_server(tmp_path):
    """The released package's own server with a task of our own."""
    with_appworld(appworld_toy.__file__, tmp_path, folder=tmp_path)
    port = free_port()
    command = [str(Path(os.environ["APPWORLD_PYTHON"]).with_name("appworld"))]
    command += ["serve", "environment", "--port", str(port), "--root", str(tmp_path)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as running:
        try:
            for _ in range(300):
                time.sleep(0.1)
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()


@installed
def test_an_episode_on_the_released_package(tmp_path, real_server):
    out = tmp_path / "appworld.json"
    with_appworld(appworld_export.__file__, out, tmp_path, folder=tmp_path)
    env = AppWorld(AppWorldConfig((real_server,), str(out), reward="tests", max_output=300))
    (task,) = env.tasks("train")
    assert env.reset(task) == (
        "Complete this task with the answer 4.\n\nThe task is from Ann Lee (email "
        "ann@example.com, phone 5551234567). It is now 2023-05-18T12:00:00."
    )
    step = env.step(call("supervisor__show_account_passwords"))
    expected = [{"account_name": "spotify", "password": "it's \"Ann's\""}]
    assert json.loads(step.observation) == expected
    wrong = {"username": "ann@example.com", "password": "it's \"Ann's\""}
    step = env.step(call("spotify__login", **wrong))
    assert step.observation.startswith("Execution failed. Traceback:")
    assert "401" in step.observation
    step = env.step(call("api_docs__show_api_descriptions", app_name="spotify"))
    assert len(step.observation) <= 300
    assert (step.reward, step.done) == (0.0, False)
    step = env.step(call("supervisor__complete_task", answer=4))
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    env.reset(task)
    step = env.step(call("supervisor__complete_task", answer=5, status="success"))
    assert (step.reward, step.done, step.success) == (0.5, True, False)
    assert env.evaluation["num_tests"] == 2
    with pytest.raises(EnvironmentFault, match="/initialize: HTTP status 500"):
        env.reset("bbbbbbb_1")
    env.close()


@installed
def test_the_functions_of_the_released_package(tmp_path):
    out = tmp_path / "appworld.json"
    with_appworld(appworld_export.__file__, out, folder=tmp_path)
    tools, _ = read_functions(out)
    names = [tool["function"]["name"] for tool in tools]
    counts = {app: sum(name.startswith(f"{app}__") for name in names) for app in COUNTS}
    assert counts == COUNTS
    assert len(set(names)) == 457
    for tool in tools:
        function = tool["function"]
        assert code(call(function["name"])).startswith("print(apis.")
        assert (
            set(function["parameters"]["required"]) <= function["parameters"]["properties"].keys()
        )
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    # What may be left out has no default in AppWorld's own schemas.
    assert schemas["supervisor__complete_task"]["required"] == []
    assert schemas["spotify__login"]["required"] == ["username", "password"]
    assert "access_token" in schemas["simple_note__create_note"]["required"]
