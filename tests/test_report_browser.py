"""The page in a real browser, where one is installed: layout, keys, scripts on and off."""

import pytest
from chromium import CHROMIUM, Browser
from report_samples import make_record, make_turn

from race_jax.report import write_report


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two trajectories, one of 30 turns with unbreakable text, at two thresholds."""
    attack = "<img src=x onerror='window.broken=1'></noscript><script>window.broken=1</script>"
    records = []
    for epsilon, skip in ((0.001, 0), (0.1, 1)):
        count = 30
        turns = [make_turn(t, "THINK", tested=t > 1) for t in range(1, count + 1)]
        for turn in turns[5 : 5 + 20 * skip]:
            turn["decision"] = "SKIP"
        messages = [{"role": "user", "content": "W" * 500 + attack}]
        for t in range(count):
            call = {"function": {"name": "say", "arguments": {"x": "v" * 300, "n": t}}}
            messages += [
                {"role": "assistant", "reasoning_content": f"r{t} " + attack, "tool_calls": [call]},
                {"role": "tool", "content": "o" * 3000 + attack},
            ]
        values = {str(t): [0.2 / j for j in range(t, count + 1)] for t in range(2, count + 1)}
        long = make_record(
            id="long/" + "x" * 120,
            epsilon=epsilon,
            turns=turns,
            messages=messages,
            decreases=values,
            original_reasoning=None,
            success=False,
        )
        records += [make_record(epsilon=epsilon), long]
    out = tmp_path_factory.mktemp("page") / "page.html"
    write_report(records, out)
    return out


def test_nothing_is_loaded_and_no_text_runs(browser, page):
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    browser.settle()
    assert browser.run("document.querySelectorAll('.turn').length") == 33
    assert browser.run("window.broken") is None
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.named("Log.entryAdded") == []
    assert browser.named("Runtime.exceptionThrown") == []
    asked = [request["request"]["url"] for request in browser.named("Network.requestWillBeSent")]
    assert asked == [f"file://{page}"]


@pytest.mark.parametrize("width", [320, 375, 768, 1200])
def test_no_sideways_scroll(browser, page, width):
    browser.open(page, width=width)
    for anchor in ("", "#r0", "#r1", "#r1-7"):
        browser.run(f"location.hash = '{anchor}'")
        browser.settle()
        assert browser.run("document.documentElement.scrollWidth") <= width, anchor
    assert browser.run("document.querySelectorAll('.turn').length") == 33
    # The heat map of 30 turns is wider than any of these; it scrolls inside its box.
    box = "document.querySelector('#r1 .heat.v0 .box')"
    assert browser.run(f"{box}.scrollWidth > {box}.clientWidth") is True


def test_threshold_switch_changes_what_is_shown(browser, page):
    browser.open(page)
    shown = (
        "[...document.querySelectorAll('#r1-8 .tag, #r1-8 .reason summary > span')]"
        ".filter((e) => e.offsetParent).map((e) => e.textContent)"
    )
    browser.run("location.hash = '#r1-8'")
    browser.settle()
    assert browser.run(shown) == ["THINK", "Reasoning"]
    browser.run("document.getElementById('eps-1').click()")
    assert browser.run(shown) == ["SKIP", "Removed reasoning"]
    strike = "getComputedStyle(document.querySelector('#r1-8 .think')).textDecorationLine"
    assert browser.run(strike) == "line-through"
    browser.run("document.getElementById('hide').click()")
    assert browser.run(shown) == ["SKIP"]


def test_filter_and_sort(browser, page):
    browser.open(page)
    order = "[...document.querySelectorAll('#list > li')].filter((e) => !e.hidden).map((e) => e.id)"
    change = (
        "(id, value) => { const e = document.getElementById(id); e.value = value;"
        " e.dispatchEvent(new Event('input')); }"
    )
    assert browser.run(order) == ["r0", "r1"]
    browser.run(f"({change})('sort', 'turns -1')")
    assert browser.run(order) == ["r1", "r0"]
    browser.run(f"({change})('only', 'yes')")
    assert browser.run(order) == ["r0"]
    browser.run(f"({change})('find', 'nothing like it')")
    assert browser.run(order) == []
    assert browser.run("document.getElementById('count').textContent") == "0 of 2 shown"


def test_heat_map_by_keyboard(browser, page):
    browser.open(page)
    browser.run("location.hash = '#r1'")
    browser.settle()
    said = "document.querySelector('#r1 .heat.v0 .read').textContent"
    assert browser.run("document.querySelectorAll('#r1 .heat.v0 td[tabindex=\"0\"]').length") == 1
    browser.run("document.querySelector('#r1 .heat.v0 td[tabindex=\"0\"]').focus()")
    assert browser.run(said) == (
        "Without the reasoning of turn 2, the action of turn 2 loses 0.1 nats per token."
    )
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "End"):
        browser.press(key)
    assert "reasoning of turn 3, the action of turn 30 loses 0.0067" in browser.run(said)
    browser.press("Home")
    browser.press("Enter")
    browser.settle()
    assert browser.run("location.hash") == "#r1-3"
    assert browser.run("document.activeElement.id") == "r1-3"


def test_readable_without_scripts(browser, page):
    browser.open(page, scripts=False)
    assert browser.run("document.documentElement.classList.contains('js')") is False
    assert browser.run("document.querySelectorAll('noscript .turn').length") == 33
    box = browser.run(
        "(() => { const d = document.querySelector('#r0 details'); d.open = true;"
        " const r = document.getElementById('r0-2').getBoundingClientRect();"
        " return [r.width > 300, r.height > 50]; })()"
    )
    assert box == [True, True]
    browser.run("document.getElementById('eps-1').checked = true")
    hidden = "getComputedStyle(document.querySelector('#r0-2 .v0')).display"
    assert browser.run(hidden) == "none"
