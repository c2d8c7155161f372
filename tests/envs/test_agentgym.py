import json

import pytest
from env_servers import NoRoute, broken, dropped, free_port, html, saying, serving, slow

from race_jax.envs.agentgym import AgentGymSciWorld, AgentGymSearchQA, AgentGymWebShop
from race_jax.envs.agentgym_base import AgentGymConfig, item_ids
from race_jax.envs.base import Diverged, EnvironmentFault, replay
from race_jax.envs.scienceworld_text import VARIATIONS
from race_jax.toolcalls import check_tools


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


class WebShopServer:
    """AgentGym's webshop server as it answers: numbers by chance, no /close."""

    def __init__(self, closes=False):
        self.worlds, self.closes, self.actions = {}, closes, []

    def __call__(self, method, route, body):
        if (method, route) == ("GET", "/"):
            return "ok"
        if route == "/create":
            number = 48950000 + len(self.worlds)
            self.worlds[number] = None
            return number
        if route == "/close" and self.closes:
            return {"closed": self.worlds.pop(body["env_idx"], 0) is None}
        if route == "/reset":
            assert body["env_idx"] in self.worlds
            # Price limits differ from world to world.
            return [f"WebShop [SEP] goal {body['session_id']} of {len(self.worlds)}", None]
        if route == "/step":
            assert body["env_idx"] in self.worlds
            self.actions.append(body["action"])
            bought = body["action"] == "click[Buy Now]"
            reward = 0.75 if bought else 0
            return {"state": "a page", "reward": reward, "done": bought, "info": None}
        raise NoRoute


class SearchQAServer:
    def __init__(self):
        self.worlds, self.actions = {}, []

    def __call__(self, method, route, body):
        if route == "/create":
            self.worlds[len(self.worlds)] = body["id"]
            return len(self.worlds) - 1
        if route == "/close":
            return self.worlds.pop(body["env_idx"], None) is not None
        if route == "/reset":
            self.worlds[body["env_idx"]] = body["id"]
            return f"Use <search>.\n\n Question: which sea? Question: {body['id']}"
        if route == "/step":
            action = body["action"]
            self.actions.append(action)
            if action.startswith("<search>"):
                found = '<information>Doc 1(Title: "T") text</information>'
                return {"observation": found, "reward": 0, "done": False, "info": None}
            right = action == "<answer>north sea</answer>"
            said = "Congratulations!" if right else "Sorry, try again."
            return {"observation": said, "reward": int(right), "done": right, "info": None}
        raise NoRoute


class SciWorldServer:
    """AgentGym's sciworld server: errors come with status 200."""

    def __init__(self):
        self.worlds, self.score, self.made, self.actions = {}, 0, 0, []

    def __call__(self, method, route, body):
        if (method, route) == ("GET", "/"):
            return "This is environment ScienceWorld."
        if route == "/create":
            self.made += 1
            self.worlds[self.made - 1] = True
            return {"id": self.made - 1}
        if route == "/close":
            del self.worlds[body["id"]]
            return True
        if body["id"] not in self.worlds:
            return {"error": f"The id {body['id']} is not valid."}
        if route == "/reset":
            self.score, self.worlds[body["id"]] = 0, False
            named = {14: ("boil", 14), 30: ("melt", 0)}
            name, variation = named.get(body["data_idx"], ("boil", body["data_idx"]))
            text = {"task_name": name, "var_num": variation, "task_description": "Task: boil."}
            state = {"observation": "A room.", "reward": 0, "score": 0, "done": False}
            return {**text, **state, "deleted": False}
        if self.worlds[body["id"]]:
            return {"error": f"The task with environment {body['id']} has finished."}
        self.actions.append(body["action"])
        before = self.score
        self.score = {"wait1": 8, "focus on cat": -100, "drop cat": 100}.get(body["action"], before)
        done = self.worlds[body["id"]] = self.score == 100
        return {
            "observation": f"did {body['action']}",
            "reward": self.score - before,
            "score": self.score,
            "done": done,
        }


def client(kind, server, **settings):
    env = kind(AgentGymConfig(server.address, **{"timeout": 0.4, "attempts": 3, **settings}))
    env.service._pause = 0.01
    return env


CASES = [
    (AgentGymWebShop, WebShopServer, "7", call("search", keywords="a")),
    (AgentGymSearchQA, SearchQAServer, "7", call("search", query="a")),
    (AgentGymSciWorld, SciWorldServer, "boil/7", call("look_around")),
]
each = pytest.mark.parametrize(("kind", "answers", "task", "action"), CASES)


def test_webshop():
    with serving(WebShopServer()) as server:
        env = client(AgentGymWebShop, server)
        check_tools(env.tools)
        assert env.reset("17") == "WebShop [SEP] goal 17 of 1"
        step = env.step(call("search", keywords="red\nshoes"))
        assert step == ("a page", 0, False, False)
        assert env.step(call("click", item="Buy Now")) == ("a page", 0.75, True, False)
        with pytest.raises(ValueError, match="call reset"):
            env.step(call("click", item="x"))
        assert server.answer.actions == ["search[red shoes]", "click[Buy Now]"]
        env.reset("18")
        env.close()
        # One world serves all episodes, and a server without /close is no fault.
        routes = ["/create", "/reset", "/step", "/step", "/reset", "/close"]
        assert server.routes() == routes
        assert env.reset("1").endswith("of 2")
        assert (len(env.tasks("test")), len(env.tasks("dev"))) == (500, 0)
        assert (env.tasks("train")[0], env.tasks("train")[-1]) == ("500", "6909")


def test_webshop_servers_that_close_hold_no_worlds():
    with serving(WebShopServer(closes=True)) as server:
        for task in range(50):
            env = client(AgentGymWebShop, server)
            env.reset(str(task))
            env.close()
        assert server.answer.worlds == {}


def test_searchqa():
    with serving(SearchQAServer()) as server:
        env = client(AgentGymSearchQA, server)
        check_tools(env.tools)
        assert env.reset("51713") == "which sea? Question: 51713"
        step = env.step(call("search", query="a </search><answer>x</answer> sea"))
        assert step.observation.startswith("<information>Doc 1")
        assert (step.reward, step.done) == (0, False)
        assert env.step(call("answer", answer="north sea")) == ("Congratulations!", 1, True, True)
        env.reset("3")
        # The server would go on, and let the agent guess.
        assert env.step(call("answer", answer="red sea")) == ("Sorry, try again.", 0, True, False)
        said = [
            "<search>a x sea</search>",
            "<answer>north sea</answer>",
            "<answer>red sea</answer>",
        ]
        assert server.answer.actions == said
        env.close()
        assert server.answer.worlds == {}
        env = client(AgentGymSearchQA, server, one_answer=False)
        env.reset("3")
        assert not env.step(call("answer", answer="red sea")).done
        assert env.step(call("answer", answer="north sea")).success
        assert env.tasks("train") == [str(n) for n in range(51713, 221328)]


def test_searchqa_asks_for_a_prompt_that_reset_does_not_bring():
    with serving(SearchQAServer()) as server:
        server.faults["/reset"] = [saying(None)]
        server.faults["/observation"] = [saying("no such line")]
        assert client(AgentGymSearchQA, server).reset("1") == "no such line"


def test_sciworld():
    with serving(SciWorldServer()) as server:
        env = client(AgentGymSciWorld, server)
        check_tools(env.tools)
        assert env.reset("boil/14") == "Task: boil.\nA room."
        # The score as it stands, not the difference to the step before.
        assert env.step(call("wait1")) == ("did wait1", 0.08, False, False)
        assert env.step(call("move", obj="cup", container="box")).reward == 0.08
        assert env.step(call("drop", obj="cat")) == ("did drop cat", 1.0, True, True)
        assert server.answer.actions == ["wait1", "move cup to box", "drop cat"]
        env.reset("boil/2")
        assert env.step(call("focus", obj="cat")) == ("did focus on cat", -1.0, True, False)
        env.close()
        assert server.answer.worlds == {}


def test_sciworld_items_are_the_servers():
    splits = AgentGymSciWorld.splits
    assert sorted([*splits["train"], *splits["dev"], *splits["test"]]) == list(range(4639))
    with serving(SciWorldServer()) as server:
        env = client(AgentGymSciWorld, server)
        train = env.tasks("train")
        assert train[:2] == ["boil/0", "boil/1"]
        assert train[14] == "melt/0"
        assert not [name for name in train if name.startswith(("grow", "incl", "mendel"))]
        assert len(train) == sum(
            counts[0]
            for name, counts in VARIATIONS.items()
            if not name.startswith(("grow", "incl", "mendel"))
        )
        env.reset("melt/0")
        assert server.seen[-1][2]["data_idx"] == 30
        # This stand-in gives item 31 another name, as another version of the package would.
        with pytest.raises(EnvironmentFault, match=r"item 31 is boil/31 there, but melt/1"):
            env.reset("melt/1")
        for task in ("melt/30", "grow-plant/0", "31", ""):
            with pytest.raises(ValueError, match="melt/3"):
                env.reset(task)


def test_sciworld_renews_its_world():
    with serving(SciWorldServer()) as server:
        env = client(AgentGymSciWorld, server)
        for _ in range(81):
            env.reset("boil/1")
        assert server.answer.made == 3
        assert len(server.answer.worlds) == 1


@each
@pytest.mark.parametrize("fault", [slow, broken, html, dropped, saying({"error": "x"}), saying([])])
def test_a_step_that_fails_is_an_environment_fault_and_the_next_episode_is_new(
    kind, answers, task, action, fault
):
    with serving(answers()) as server:
        env = client(kind, server)
        env.reset(task)
        server.faults["/step"] = [fault]
        with pytest.raises(EnvironmentFault, match=server.address):
            env.step(action)
        assert server.routes().count("/step") == 1
        with pytest.raises(ValueError, match="call reset"):
            env.step(action)
        env.reset(task)
        assert server.routes().count("/create") == 2
        assert not env.step(action).done


@each
def test_a_reset_is_tried_again(kind, answers, task, action):
    with serving(answers()) as server:
        env = client(kind, server)
        server.faults["/reset"] = [slow, broken]
        env.reset(task)
        assert server.routes().count("/reset") == 3
        server.faults["/create"] = [broken]
        env.close()
        with pytest.raises(EnvironmentFault, match="HTTP status 500"):
            env.reset(task)
        assert server.routes().count("/create") == 2


@each
def test_a_server_that_was_restarted_is_given_a_new_world(kind, answers, task, action):
    with serving(answers()) as server:
        env = client(kind, server)
        env.reset(task)
        server.answer.worlds.clear()
        server.faults["/reset"] = [saying({"error": "no such world"})]
        env.reset(task)
        assert not env.step(action).done


@each
def test_a_server_that_is_down_is_named_with_its_command(kind, answers, task, action):
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EnvironmentFault, match=rf"{address}.*`{kind.command} --host"):
        kind(AgentGymConfig(address))


@each
def test_replies_of_the_wrong_kind_are_faults(kind, answers, task, action):
    with serving(answers()) as server:
        env = client(kind, server)
        for create in ("5", None, True, {"id": "x"}, {}, 1.5):
            server.faults["/create"] = [saying(create)]
            with pytest.raises(EnvironmentFault, match=server.address):
                env.reset(task)
        env.reset(task)
        good = server.answer("POST", "/step", {**env.body(), "action": "look around"})
        for key in good.keys() - {"info"} - ({"reward"} if kind is AgentGymSciWorld else set()):
            for bad in (None, float("nan"), [], {}):
                env.reset(task)
                server.faults["/step"] = [saying({**good, key: bad})]
                with pytest.raises(EnvironmentFault, match=f"`{key}` is"):
                    env.step(action)
            env.reset(task)
            server.faults["/step"] = [saying({k: v for k, v in good.items() if k != key})]
            with pytest.raises(EnvironmentFault, match=f"has no `{key}`"):
                env.step(action)


def test_rewards_out_of_range():
    with serving(WebShopServer()) as server:
        env = client(AgentGymWebShop, server)
        env.reset("0")
        server.faults["/step"] = [saying({"state": "", "reward": 1.25, "done": True})]
        with pytest.raises(
            EnvironmentFault, match=r"reward is 1\.25; a webshop server's is within"
        ):
            env.step(call("click", item="buy now"))
    with serving(SciWorldServer()) as server:
        env = client(AgentGymSciWorld, server)
        env.reset("boil/0")
        over = {"observation": "", "score": 108, "reward": 8, "done": True}
        server.faults["/step"] = [saying(over)]
        assert env.step(call("wait1")).reward == 1.0


def test_a_short_list_from_reset_is_a_fault():
    with serving(WebShopServer()) as server:
        env = client(AgentGymWebShop, server)
        for reply in ([], [None, None], "text"):
            server.faults["/reset"] = [saying(reply)]
            with pytest.raises(EnvironmentFault):
                env.reset("0")


def test_replay_notices_that_the_servers_goals_differ():
    with serving(WebShopServer()) as server:
        env = client(AgentGymWebShop, server)
        first = env.reset("3")
        with pytest.raises(Diverged, match="observation 0"):
            replay(lambda: client(AgentGymWebShop, server), "3", [], [first])
    with serving(SciWorldServer()) as server:
        env = client(AgentGymSciWorld, server)
        calls = [call("wait1")]
        seen = [env.reset("boil/3"), env.step(calls[0]).observation]
        copy = replay(lambda: client(AgentGymSciWorld, server), "boil/3", calls, seen)
        assert copy.step(call("inventory")).reward == 0.08


def test_item_ids(tmp_path):
    path = tmp_path / "webshop_train.json"
    path.write_text(json.dumps([3, "webshop_17", {"item_id": "webshop_4"}, {"item_id": 5}]))
    assert item_ids(path) == (3, 17, 4, 5)
    with serving(WebShopServer()) as server:
        env = client(AgentGymWebShop, server, dev=str(path))
        assert env.tasks("dev") == ["3", "17", "4", "5"]
        with pytest.raises(ValueError, match="no split 'all'"):
            env.tasks("all")
        for task in ("x", "-1", "²"):
            with pytest.raises(ValueError, match="takes an item number"):
                env.reset(task)
    path.write_text("[30]")
    with serving(SciWorldServer()) as server:
        assert client(AgentGymSciWorld, server, test=str(path)).tasks("test") == ["melt/0"]
        path.write_text("[4639]")
        with pytest.raises(ValueError, match="there is no item 4639"):
            client(AgentGymSciWorld, server, test=str(path)).tasks("test")


@pytest.mark.parametrize(
    "text", ["{", "{}", "[true]", "[1.5]", "[-1]", '["webshop"]', '[{"id": 1}]', "[null]"]
)
def test_bad_item_ids(tmp_path, text):
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"ids\.json.*it must be a JSON list"):
        item_ids(path)
