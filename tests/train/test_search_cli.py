import json
import signal
import subprocess
import sys

import httpx
import pytest

from race_jax.train.cli import main


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_one_command_serves_a_corpus(tmp_path, stop):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "a", "contents": '"Tin"\nTin melts at 232 degrees.'}))
    command = [sys.executable, "-m", "race_jax.train.cli", "search-server", "--port", "0"]
    with subprocess.Popen(
        [*command, "--corpus", str(corpus)], stdout=subprocess.PIPE, text=True
    ) as server:
        said = server.stdout.readline().split()
        assert said[:3] == ["1", "documents", "at"]
        found = httpx.post(said[3], json={"queries": ["melting of tin"], "topk": 1}).json()
        server.send_signal(stop)
        assert server.wait(10) == (0 if stop == signal.SIGINT else -signal.SIGTERM)
    assert found == {"result": [[{"id": "a", "contents": '"Tin"\nTin melts at 232 degrees.'}]]}


def test_a_faulty_corpus_is_one_message(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a"}\n')
    assert main(["search-server", "--corpus", str(corpus), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{corpus}, line 1: the document has no text" in said
