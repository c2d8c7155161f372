"""The page of rollouts: what it shows, that no text becomes markup, and log-probs on demand."""

import json
import math
import re

import pytest
from chromium import CHROMIUM, Browser

from race_jax.report_rollouts import is_rollouts, write_rollouts
from race_jax.rollout.results import Rollout, TurnNote
from race_jax.train.report_cli import report
from race_jax.types import TokenTrajectory, TokenTurn

ATTACK = "</script></noscript><script>window.broken=1</script><img src=x onerror=1>\x1b[31m</think>"


def make_rollout(name="shop/1/0", **changes):
    tokens = TokenTrajectory(
        name,
        (1, 2),
        (TokenTurn((3, 4), (), (5, 6), (7,)), TokenTurn((), (8,), (5, 9), ())),
    )
    values = {
        "id": name,
        "env": "shop",
        "task": "1",
        "sample": 0,
        "messages": (
            {"role": "user", "content": "Make gold."},
            {"role": "assistant", "content": "Stir.", "reasoning_content": "First think."},
            {"role": "user", "content": ATTACK},
            {"role": "assistant", "content": "Done."},
        ),
        "tools": (),
        "reward": 0.5,
        "success": True,
        "stop": "done",
        "error": None,
        "tokens": tokens,
        "notes": (
            TurnNote((-0.5, -1.0, -3.0, -7.5), 2, False, 1),
            # The first id was given, not sampled.
            TurnNote((-0.25, -math.inf), 0, True, 0, (f"no such tool {ATTACK}",), forced=1),
        ),
    }
    return Rollout(**{**values, **changes})


def write(tmp_path, rollouts, **options):
    out = tmp_path / "page.html"
    write_rollouts(rollouts, out, **options)
    return out, out.read_text(encoding="utf-8")


def test_turns_totals_and_packed_log_probs(tmp_path):
    failed = make_rollout("shop/2/0", success=False, reward=0.0, stop="invalid_calls")
    _, page = write(tmp_path, [make_rollout(), failed], decode=lambda i: f"<{i}>")
    plain = re.sub(r"\s+", " ", re.sub("<[^>]*>", "", page))
    assert "50.0 % (1 of 2)" in plain and "done 1, invalid_calls 1" in plain
    assert "First think." in plain and "Not carried out: no such tool" in plain
    assert "Tokens: reasoning 2, action 2, observation 1; 1 call carried out" in plain
    assert "log-prob per token −3, lowest −7.5" in plain
    # The page holds thousandths of a nat, and each text once.
    assert 'data-cut="2" data-t="0 1 2 3" data-p="500 1000 3000 7500"' in page
    assert 'data-cut="0" data-t="2 4" data-p="250 99999"' in page
    assert page.count("&lt;5&gt;") == 1


def test_without_tokenizer_only_means(tmp_path):
    _, page = write(tmp_path, [make_rollout()])
    assert "log-prob per token −3" in page and 'id="lp"' not in page and "data-p=" not in page


def test_nothing_that_an_episode_says_is_markup(tmp_path):
    rollout = make_rollout(ATTACK, error=ATTACK, stop="env_error")
    _, page = write(tmp_path, [rollout], title=ATTACK, source=ATTACK, decode=lambda _: ATTACK)
    assert page.count("<script>") == page.count("</script>") == 1
    assert page.count("</noscript>") == 1 and "<img" not in page and "\x1b" not in page


def test_command_tells_the_kinds_of_files_apart(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    lines = [
        json.dumps(make_rollout(f"shop/{n}/0", notes=make_rollout().notes).record())
        for n in range(3)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert is_rollouts(path) and not is_rollouts(tmp_path / "none.jsonl")
    out = tmp_path / "page.html"
    assert report(str(path), str(out), max_trajectories=2) == 0
    assert "done 3" in capsys.readouterr().out
    assert "The first 2 of 3 trajectories" in out.read_text(encoding="utf-8")
    path.write_text('{"id": "a", "epsilon": 0.1, "turns": []}\n', encoding="utf-8")
    assert not is_rollouts(path)


def test_refuses_nothing_to_show(tmp_path):
    with pytest.raises(ValueError, match="no rollouts"):
        write(tmp_path, [])
    with pytest.raises(ValueError, match="at least 1"):
        write(tmp_path, [make_rollout()], max_trajectories=0)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_colours_come_on_demand_and_by_keyboard(tmp_path):
    rollouts = [make_rollout(f"shop/{n}/0") for n in range(200)]
    out, _ = write(tmp_path, rollouts, decode=lambda i: f"{ATTACK}{i}")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(out)
        spans = "document.querySelectorAll('.toks > span').length"
        browser.run("document.getElementById('lp').click()")
        assert browser.run(spans) == 0
        browser.run("location.hash = '#r150-1'")
        browser.settle()
        assert browser.run(spans) == 6
        classes = "[...document.querySelectorAll('#r150-1 .toks > span')].map((e) => e.className)"
        assert browser.run(classes) == ["b", "c", "d cut", "f"]
        browser.run("document.querySelector('#r150-1 .toks > span').focus()")
        browser.press("ArrowRight")
        said = browser.run("document.querySelector('#r150-1 .read').textContent")
        assert said.endswith("log-prob −1.000 nats")
        assert browser.run("window.broken === undefined")
        assert not browser.named("Log.entryAdded")
    finally:
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_list_is_ordered_and_filtered_by_keyboard(tmp_path):
    part = make_rollout("shop/1/0#part1", parts=())
    rollouts = [
        make_rollout("shop/10/0", task="10", reward=0.5, parts=(part,)),
        make_rollout("shop/2/0", task="2", reward=-1.0, stop="invalid_calls", success=False),
        make_rollout("shop/1/" + "x" * 90, task="1", reward=0.5, stop="max_turns"),
    ]
    out, _ = write(tmp_path, rollouts, decode=lambda i: f"<{i}>")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(out)
        shown = "[...document.querySelectorAll('#list > li')].filter((x) => !x.hidden)"
        tasks = f"{shown}.map((x) => x.dataset.task).join(' ')"

        def typed(name, key):
            """Choose in a list by what a keyboard would type into it."""
            browser.run(f"document.getElementById('{name}').focus()")
            browser.send("Input.dispatchKeyEvent", type="char", text=key)
            # After a second, the next letter begins a new word.
            browser.run("new Promise((done) => setTimeout(done, 1200))")
            return browser.run(tasks)

        assert browser.run(tasks) == "10 2 1"
        assert typed("order", "b") == "1 2 10"
        assert typed("order", "h") == "10 1 2"
        assert typed("order", "l") == "2 10 1"
        # The first has a part, so twice the tokens.
        assert browser.run("document.getElementById('r0').dataset.sampled") == "12"
        assert typed("stop", "m") == "1"
        assert browser.run("document.getElementById('count').textContent") == "1 of 3 shown"
        assert typed("stop", "a") == "2 10 1"
        for width in (320, 700, 1200):
            browser.open(out, width=width, dark=width == 320)
            browser.run("location.hash = '#r0'")
            browser.settle()
            assert browser.run("document.documentElement.scrollWidth") <= width
            # Every number is shown and named: in place on a phone, by its column's head elsewhere.
            cells = "[...document.querySelectorAll('#r0 .row > span')].map((x) => x.offsetWidth)"
            assert len(browser.run(cells)) == 6 and all(browser.run(cells))
            named = (
                "[...document.querySelectorAll('#r0 .row .lbl')].every((x) => x.offsetWidth > 9)"
            )
            heads = "document.querySelector('.heads').offsetHeight > 0"
            assert (browser.run(named), browser.run(heads)) == (width == 320, width > 320)
            assert "Part 2: shop/1/0#part1" in browser.run("document.body.innerText")
        assert browser.named("Runtime.exceptionThrown") == []
    finally:
        browser.close()
