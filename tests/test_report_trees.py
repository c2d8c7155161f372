"""Trees on the page of rollouts: where things stand, what they say, and how a person walks them."""

import dataclasses
import re

import numpy as np
import pytest
from carl_samples import grow
from chromium import CHROMIUM, Browser

from race_jax.carl.tree import Node, Tree, credit_trees, rebuild
from race_jax.report_rollouts import write_rollouts
from race_jax.report_trees import COLUMN, MARGIN, ROW, view_tree

ATTACK = "</script></noscript><script>window.broken=1</script><img src=x onerror=1>\x1b[31m"


@pytest.fixture(scope="module")
def rollouts():
    return grow()[0]


def write(tmp_path, rollouts, **options):
    out = tmp_path / "page.html"
    write_rollouts(rollouts, out, **options)
    return out, out.read_text(encoding="utf-8")


def attacked(rollout):
    """The same episode, with markup wherever an environment or a model writes text."""
    messages = tuple(
        {
            **m,
            "content": ATTACK,
            **({"reasoning_content": ATTACK} if m["role"] == "assistant" else {}),
        }
        for m in rollout.messages
    )
    return dataclasses.replace(rollout, messages=messages, task=ATTACK)


def test_an_episode_goes_on_in_its_row_and_a_fork_begins_one(rollouts):
    tree = rebuild(rollouts)["a"]
    (credit,) = credit_trees([tree])
    view = view_tree(0, tree, credit, {})
    seen = {(x["x"], x["y"]) for x in view["nodes"]}
    assert len(seen) == len(tree.nodes)
    leaves = sorted(x["y"] for x in view["nodes"] if x["leaf"])
    assert leaves == [MARGIN + ROW * n for n in range(len(tree.rollouts))]
    for x in view["nodes"]:
        assert x["x"] == MARGIN + COLUMN * x["node"].turn
        assert x["advantage"] == pytest.approx(float(credit.advantages[x["index"]]))
        parent = x["node"].parent
        first = parent >= 0 and x["index"] == min(
            n for n, node in enumerate(tree.nodes) if node.parent == parent
        )
        if first:
            assert x["y"] == view["nodes"][parent]["y"]
        elif parent >= 0:
            assert x["y"] > view["nodes"][parent]["y"]
    assert max(x["x"] for x in view["nodes"]) < view["width"]


def test_a_state_tells_its_numbers_and_links_to_its_turn(rollouts, tmp_path):
    _, page = write(tmp_path, rollouts)
    tree = rebuild(rollouts)["a"]
    (credit,) = credit_trees([tree])
    places = {r.id: n for n, r in enumerate(rollouts)}
    for n in np.flatnonzero(credit.trainable):
        node = tree.nodes[n]
        link = f"r{places[tree.rollouts[node.sample].id]}-{node.turn}"
        label = re.search(rf'href="#{link}" id="t\d+-{n}" [^>]*aria-label="([^"]*)"', page)
        assert label and f"after turn {node.turn}, value " in label[1]
        assert label[1].endswith(", trained") and "advantage" in label[1]
        assert ("density" in label[1]) == (node.reward is None)
        assert f'id="{link}"' in page
    assert page.count("</svg>") == 2


def test_without_forks_there_are_no_trees_and_a_missing_episode_is_told(rollouts, tmp_path):
    _, page = write(tmp_path, [r for r in rollouts if not r.fork])
    assert 'id="trees"' not in page and "tree-list" not in page
    _, page = write(tmp_path, [r for r in rollouts if r.fork])
    assert "The trees cannot be drawn: digits/" in page and "no such sample" in page


def test_nodes_without_a_transcript_have_no_link(rollouts, tmp_path):
    _, page = write(tmp_path, rollouts, max_trajectories=1)
    assert "have no transcript on this page" in page
    links = set(re.findall(r'<a href="#(r\d+)-', page))
    assert links == {"r0"}


def test_nothing_that_an_episode_says_is_markup(rollouts, tmp_path):
    mine = [attacked(r) for r in rollouts if r.task == "a"]
    _, page = write(tmp_path, mine, title=ATTACK)
    assert page.count("<script>") == page.count("</script>") == 1
    assert page.count("</noscript>") == len(mine) + 1
    assert "<img" not in page and "\x1b" not in page


def test_a_chain_of_ten_thousand_is_laid_out_without_recursion():
    tree = Tree("env", "long")
    tree.nodes = [Node(n - 1, 0, n, 0.1, 1, 0.1) for n in range(10_000)]
    tree.nodes[-1].reward = 1.0
    tree.rollouts = {0: grow(("a",))[0][0]}
    (credit,) = credit_trees([tree])
    view = view_tree(0, tree, credit, {})
    assert {x["y"] for x in view["nodes"]} == {MARGIN}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_states_are_read_by_click_and_by_keyboard(rollouts, tmp_path):
    mine = [attacked(r) for r in rollouts if r.task == "a"]
    out, _ = write(tmp_path, mine)
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(out, width=375)
        assert browser.run("document.querySelectorAll('.tree a').length") == 0
        browser.run("document.querySelector('#tree-list details').open = true")
        browser.settle()
        assert browser.run("document.documentElement.scrollWidth") <= 375
        assert browser.run("document.querySelectorAll('.tree a[tabindex=\"0\"]').length") == 1
        browser.run("document.querySelector('.tree a').focus()")
        browser.press("ArrowRight")
        panel = "document.querySelector('.tr-panel').textContent"
        said = browser.run(panel)
        assert said.startswith("After turn 1, value ") and "Turn 1" in said
        assert "<img src=x onerror=1>" in said and "Action" in said
        assert browser.run("document.activeElement.dataset.p") == "0"
        browser.press("ArrowLeft")
        assert browser.run(panel).startswith("The beginning, value ")
        browser.run(
            "document.querySelectorAll('.tree a')[2].dispatchEvent("
            "new MouseEvent('click', {bubbles: true, cancelable: true, detail: 1}))"
        )
        assert browser.run(panel).startswith("After turn 2, value ")
        assert browser.run("location.hash") == ""
        browser.run(
            "(() => { const e = document.getElementById('tr-number'); e.value = 'd';"
            " e.dispatchEvent(new Event('input')); })()"
        )
        node = "document.querySelectorAll('.tree a')[1]"
        assert browser.run(f"{node}.querySelector('.tr-num').textContent === {node}.dataset.d")
        assert browser.run("window.broken") is None and not browser.named("Log.entryAdded")
        assert not browser.named("Runtime.exceptionThrown")
    finally:
        browser.close()
