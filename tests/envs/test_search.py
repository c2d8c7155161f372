import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from env_servers import broken, cut, dropped, free_port, gateway, html, saying, serving, slow

from race_jax.envs.base import EnvironmentFault, Step, replay
from race_jax.envs.factory import make_environment
from race_jax.envs.search import ANSWERED, FAILED, NOTHING, DeepSearch, DeepSearchConfig
from race_jax.envs.search_index import SAMPLE, Document, SearchIndex, load_corpus
from race_jax.envs.search_server import SearchServer

SPLITS = ("train", "dev", "test")


@contextlib.contextmanager
def running(index, **settings):
    with SearchServer(index, port=0, **settings) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def index():
    return SearchIndex(load_corpus(SAMPLE))


@pytest.fixture(scope="module")
def server(index):
    with running(index) as started:
        yield started


def search(query):
    return {"name": "search", "arguments": {"query": query}}


def answer(text):
    return {"name": "answer", "arguments": {"text": text}}


def world(address, **settings):
    return DeepSearch(
        DeepSearchConfig(address, **{"timeout": 0.4, "attempts": 3, "pause": 0.01, **settings})
    )


# An episode


def test_an_episode_over_http(server):
    env = world(server.address)
    assert env.reset("search_test/test_0") == (
        "Where was the first climber of the highest mountain of Velmora from?"
    )
    seen = env.step(search("highest mountain of Velmora first climbed"))
    assert seen[1:] == (0.0, False, False)
    assert seen.observation.startswith('Doc 1(Title: "Mount Quenby") Mount Quenby in the province')
    assert "\nDoc 3(Title: " in seen.observation and "Doc 4" not in seen.observation
    assert "map maker from Fennick" in env.step(search("Ida Marrable")).observation
    assert env.step(answer("the Fennick.")) == Step(ANSWERED, 1.0, True, True)
    assert (env.searches, env.failed_searches, env.last_fault) == (2, 0, "")
    with pytest.raises(ValueError, match="the episode is over; call reset"):
        env.step(search("Ostrin"))


def test_the_reward_is_by_setting_and_success_is_an_exact_match(server):
    # "two sorts of quince" and "two kinds of quince": 3 words of 4 in common; "quince": 1 of 1.
    for reward, expected in (("f1", 0.75), ("set_f1", 0.75), ("em", 0.0)):
        env = world(server.address, reward=reward)
        env.reset("search_test/test_3")
        assert env.step(answer("two sorts of quince")) == Step(ANSWERED, expected, True, False)
        env.reset("search_test/test_3")
        assert env.step(answer("Quinces")) == Step(ANSWERED, 1.0, True, True)


def test_an_episode_can_be_replayed(server):
    env = world(server.address)
    calls = [search("Lake Ellin bridge"), search("zzz qqq"), answer("x")]
    seen = [env.reset("search_train/train_4")] + [env.step(one).observation for one in calls]
    replay(lambda: world(server.address), "search_train/train_4", calls, seen)


def test_every_sample_question_has_its_answer_in_the_sample_corpus(server):
    env = world(server.address)
    text = " ".join(document.contents for document in load_corpus(SAMPLE)).lower()
    tasks = [task for split in SPLITS for task in env.tasks(split)]
    assert len(tasks) == len(set(tasks)) == 12 and len(load_corpus(SAMPLE)) == 30
    for task in tasks:
        assert env.reset(task).endswith("?")
        assert any(gold.lower() in text for gold in env._question.golden)


def test_an_observation_is_bounded_and_shared_by_its_documents():
    long = [Document(str(n), f'"T{n}"\n' + "word " * 5000) for n in range(3)]
    with running(SearchIndex(long)) as server:
        env = world(server.address, max_chars=302)
        env.reset("search_dev/dev_0")
        seen = env.step(search("word")).observation
        assert len(seen) == 302 and seen.count("...") == 3
        assert [line[:15] for line in seen.split("\n")] == [
            f'Doc {n + 1}(Title: "T' for n in range(3)
        ]


def test_a_query_that_finds_nothing_says_so(server):
    env = world(server.address)
    env.reset("search_dev/dev_0")
    for query in ("", "the of", "xyzzy", "?!"):
        assert env.step(search(query)).observation == NOTHING
    assert (env.searches, env.failed_searches) == (4, 0)


# Servers that fail


FOUND = {"result": [[{"document": {"id": "0", "contents": '"T"\nfound'}, "score": 1.0}]]}


@pytest.mark.parametrize("fault", [slow, broken, gateway, dropped, cut])
def test_a_passing_fault_is_hidden_by_another_try(fault):
    with serving(lambda *_: FOUND) as stub:
        env = world(stub.address)
        stub.seen.clear()
        stub.faults["/retrieve"] = [fault, fault]
        env.reset("search_dev/dev_0")
        assert env.step(search("q")).observation == 'Doc 1(Title: "T") found'
        assert stub.routes() == ["/retrieve"] * 3 and env.failed_searches == 0
        assert stub.seen[0][2] == {"queries": ["q"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize("fault", [slow, broken, gateway, dropped, cut])
def test_a_lasting_fault_is_told_and_counted_and_the_episode_goes_on(fault):
    with serving(lambda *_: FOUND) as stub:
        env = world(stub.address)
        env.reset("search_dev/dev_0")
        stub.faults["/retrieve"] = [fault] * 3
        assert env.step(search("q")) == Step(FAILED, 0.0, False, False)
        assert (env.searches, env.failed_searches) == (1, 1)
        assert f"{stub.address}/retrieve" in env.last_fault and "in 3 attempts" in env.last_fault
        assert env.step(search("q")).observation == 'Doc 1(Title: "T") found'
        assert env.step(answer("2764")).success


@pytest.mark.parametrize(
    "fault",
    [
        html,
        saying({"result": []}),
        saying({"result": [[], []]}),
        saying({"result": None}),
        saying({"results": [[]]}),
        saying([]),
        saying({"error": "no index"}),
        saying({"result": [[{"document": {"id": "0"}}]]}),
        saying({"result": [["text"]]}),
        saying({"result": [[{"contents": 3}]]}),
    ],
)
def test_a_reply_that_is_none_fails_the_search(fault):
    with serving(lambda *_: FOUND) as stub:
        env = world(stub.address)
        stub.faults["/retrieve"] = [fault]
        env.reset("search_dev/dev_0")
        assert env.step(search("q")).observation == FAILED
        assert env.failed_searches == 1 and f"{stub.address}/retrieve: " in env.last_fault
        env.reset("search_dev/dev_0")
        assert (env.searches, env.failed_searches, env.last_fault) == (0, 0, "")


def test_fewer_documents_than_asked_for_are_no_fault_and_more_are_cut():
    documents = [{"id": str(n), "contents": f'"T{n}"\nbody'} for n in range(5)]
    with serving(lambda *_: {"result": [documents]}) as stub:
        env = world(stub.address, topk=2)
        env.reset("search_dev/dev_0")
        assert env.step(search("q")).observation == (
            'Doc 1(Title: "T0") body\nDoc 2(Title: "T1") body'
        )
        stub.answer = lambda *_: {"result": [documents[:1]]}
        assert env.step(search("q")).observation == 'Doc 1(Title: "T0") body'


def test_a_server_that_is_down_at_the_start_is_named_at_once():
    address = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=f"{address} .*start one with: race-jax search-serv"):
        world(address, timeout=30, pause=10)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("fault", [slow, broken, html, saying({"results": []})])
def test_a_server_that_does_not_search_is_named_at_the_start(fault):
    with serving(lambda *_: FOUND) as stub:
        stub.faults["/retrieve"] = [fault] * 3
        with pytest.raises(EnvironmentFault, match=f"{stub.address}/retrieve: "):
            world(stub.address)


def test_a_server_that_goes_down_fails_searches_only(index):
    with running(index) as server:
        env = world(server.address)
        env.reset("search_dev/dev_1")
        assert "1893" in env.step(search("Northern Line railway")).observation
    env.close()
    env.reset("search_dev/dev_1")
    assert env.step(search("Northern Line railway")).observation == FAILED
    assert env.step(answer("1893")).success


# Questions


def write(path, *rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def test_a_split_can_be_several_files(server, tmp_path):
    first = write(tmp_path / "nq.jsonl", {"id": 7, "question": "who", "golden_answers": ["a b"]})
    second = write(tmp_path / "pop.jsonl", {"question": "what?", "answer": "c"}, "")
    env = world(server.address, train=[first, second], dev=second)
    assert env.tasks("train") == ["nq/7", "pop/0"] and env.tasks("dev") == ["pop/0"]
    assert env.reset("nq/7") == "who?"
    assert env.reset("pop/0") == "what?"
    assert env.step(answer("C")).success


GOOD = {"id": "1", "question": "who?", "golden_answers": ["x"]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"id": "2", "golden_answers": ["x"]}, "there is no `question`"),
        ({"id": "2", "question": " ", "golden_answers": ["x"]}, "there is no `question`"),
        ({"id": "2", "question": "who?"}, "there is no right answer"),
        ({"id": "2", "question": "who?", "golden_answers": []}, "there is no right answer"),
        ({"id": "2", "question": "who?", "golden_answers": ["x", ""]}, "there is no right answer"),
        ({"id": "2", "question": "who?", "answer": 3}, "there is no right answer"),
        (GOOD, "a second question is named 'set/1'"),
        ("[1]", "not a JSON object, which each line must be"),
        ("{", "not valid JSON"),
    ],
)
def test_faulty_questions_are_named_with_file_and_line(server, tmp_path, row, why):
    path = write(tmp_path / "set.jsonl", GOOD, row)
    with pytest.raises(ValueError, match=f"{path}, line 2: {why}"):
        world(server.address, dev=path).tasks("dev")


def test_names_splits_and_files_that_are_not_there(server, tmp_path):
    env = world(server.address, dev=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="no split 'all'; DeepSearch has train, dev, test"):
        env.tasks("all")
    with pytest.raises(ValueError, match=r"none\.jsonl is no file; name a JSONL file of questions"):
        env.tasks("dev")
    with pytest.raises(ValueError, match="no task 'search_test/9'"):
        env.reset("search_test/9")
    env.reset("search_test/test_1")
    with pytest.raises(ValueError, match="no tool 'find'; it has search and answer"):
        env.step({"name": "find", "arguments": {}})


def test_one_name_for_two_questions_in_two_splits_is_refused(server, tmp_path):
    (tmp_path / "b").mkdir()
    left = write(tmp_path / "set.jsonl", GOOD)
    right = write(tmp_path / "b" / "set.jsonl", {**GOOD, "question": "what?"})
    env = world(server.address, train=left, test=right)
    with pytest.raises(ValueError, match="'set/1' is one question in train and another in test"):
        env.reset("set/1")
    assert world(server.address, train=left, test=left).reset("set/1") == "who?"


@pytest.mark.parametrize(
    ("name", "value"),
    [("reward", "bleu"), ("topk", 0), ("max_chars", 99), ("timeout", 0.0), ("attempts", 0)],
)
def test_bad_settings_are_named(server, name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; it"):
        world(server.address, **{name: value})


# The server


def ask(server, body, **kwargs):
    return httpx.post(f"{server.address}/retrieve", json=body, **kwargs)


def test_the_routes_form_of_replies(server):
    body = {"queries": ["Hask Observatory", "nothing of it"], "topk": 2, "return_scores": True}
    first, second = ask(server, body).json()["result"]
    assert [sorted(item) for item in first] == [["document", "score"]] * 2
    assert first[0]["document"]["contents"].startswith('"Hask Observatory"\n')
    assert first[0]["score"] >= first[1]["score"] > 0 and second == []
    (plain,) = ask(server, {"queries": ["Hask Observatory"], "topk": 2}).json()["result"]
    assert plain == [item["document"] for item in first]
    (three,) = ask(server, {"queries": ["Velmora"], "topk": None}).json()["result"]
    assert len(three) == 3
    assert ask(server, {"queries": []}).json() == {"result": []}
    assert httpx.get(server.address).json() == {"documents": 30}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "no JSON object"),
        ({}, "`queries` must be a list of texts"),
        ({"queries": "Ostrin"}, "`queries` must be a list of texts"),
        ({"queries": ["a", 1]}, "`queries` must be a list of texts"),
        ({"queries": ["a"], "topk": 0}, "`topk` is 0; it can be 1 to 100"),
        ({"queries": ["a"], "topk": True}, "`topk` is True"),
        ({"queries": ["a"], "return_scores": "yes"}, "`return_scores` must be true or false"),
    ],
)
def test_faulty_requests_get_a_reason(server, body, why):
    reply = ask(server, body)
    assert reply.status_code == 400 and why in reply.json()["error"]


def test_requests_that_are_none(server):
    with httpx.Client(base_url=server.address) as client:
        assert client.post("/retrieve", content=b"{").status_code == 400
        assert client.post("/other", json={}).status_code == 404
        assert client.get("/retrieve").status_code == 404
        assert client.post("/retrieve", json={"queries": ["Ostrin"]}).status_code == 200
    for length in ("Content-Length: 99999999\r\n", "Content-Length: -1\r\n", ""):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as raw:
            raw.sendall(f"POST /retrieve HTTP/1.1\r\nHost: x\r\n{length}\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] == b"413"


def test_many_clients_at_once_get_what_one_gets(server, index):
    queries = ["Ostrin bridge", "glass museum founder", "lantern festival", "comet"] * 5
    expected = [[hit.document.id for hit in index.search(query, 3)] for query in queries]
    found = [None] * len(queries)

    def client(n):
        (items,) = ask(server, {"queries": [queries[n]]}).json()["result"]
        found[n] = [item["id"] for item in items]

    threads = [threading.Thread(target=client, args=(n,)) for n in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == expected


def test_a_port_that_is_taken_and_numbers_out_of_range(server, index):
    with pytest.raises(ValueError, match=f"port {server.server_port} .*name another port"):
        SearchServer(index, port=server.server_port)
    with pytest.raises(ValueError, match="topk is 0; it can be 1 to 100"):
        SearchServer(index, port=0, topk=0)
    with pytest.raises(ValueError, match="port is 70000"):
        SearchServer(index, port=70000)


# The index


def test_scores_are_bm25_with_lucenes_formula():
    documents = [Document("0", "red red lamp"), Document("1", "blue lamp"), Document("2", "green")]
    hits = SearchIndex(documents).search("red lamp", 3)
    # N 3; "red" in 1 document, "lamp" in 2: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), which is
    # ln(8/3) and ln(8/5). k1 0.9, b 0.4, mean length 2: a word with count f in a document of
    # length L weighs f / (f + 0.9 (0.6 + 0.4 L / 2)), where Lucene leaves out the factor k1 + 1.
    first = 0.9808 * 2 / (2 + 0.9 * 1.2) + 0.4700 * 1 / (1 + 0.9 * 1.2)
    second = 0.4700 * 1 / (1 + 0.9 * 1.0)
    assert [(hit.document.id, pytest.approx(hit.score, abs=1e-3)) for hit in hits] == [
        ("0", first),
        ("1", second),
    ]


def test_words_are_stemmed_and_equal_scores_keep_the_order_of_the_corpus():
    documents = [Document(str(n), "a bridge") for n in range(20)]
    hits = SearchIndex(documents).search("Bridges!", 3)
    assert [hit.document.id for hit in hits] == ["0", "1", "2"]


def test_a_corpus_in_both_forms(tmp_path):
    path = write(
        tmp_path / "corpus.jsonl",
        {"id": 5, "contents": '"A"\nfirst'},
        {"title": "B", "text": "second"},
    )
    assert load_corpus(path) == [Document("5", '"A"\nfirst'), Document("1", '"B"\nsecond')]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "1"},
        {"id": "1", "contents": " "},
        {"id": "1", "contents": None},
        {"id": "1", "contents": ["a"]},
        {"id": "1", "title": "T", "text": ""},
    ],
)
def test_a_document_without_text_is_named_with_file_and_line(tmp_path, row):
    path = write(tmp_path / "corpus.jsonl", {"id": "0", "contents": "x"}, row)
    with pytest.raises(ValueError, match=f"{path}, line 2: the document has no text; give it"):
        load_corpus(path)


def test_files_that_hold_no_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl is no file; name a JSONL file of documents"):
        load_corpus(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no line; it must hold documents"):
        load_corpus(write(tmp_path / "empty.jsonl", "", " "))


def test_it_is_built_by_name_from_settings(server):
    env = make_environment("search", {"address": server.address, "reward": "em", "topk": 1})
    assert env.reset("search_train/train_0") == "What is the capital of Velmora?"
    assert env.step(answer("Ostrin")).success
