"""The page: what it shows of each decision, and that no text can become markup."""

import base64
import hashlib
import json
import re

from report_samples import make_page, make_record, make_turn, simulate, write_lines

from race_jax.report import summarise
from race_jax.report_view import visible


def test_page_shows_decisions_reasons_and_texts(tmp_path):
    page = make_page(tmp_path, [make_record()], source="covers.jsonl")
    one, two, three = page.find("section", class_="turn")
    assert "THINK" in one["text"] and "SKIP" not in one["text"]
    assert "SKIP" in two["text"] and "THINK" not in two["text"]
    assert "Removed reasoning" in two["text"] and "Go on." in two["text"]
    assert "Removed reasoning" not in three["text"]
    assert "would lose 0.41 nats per token" in three["text"]
    assert "go(to: room 3)" in re.sub(r"\s+", " ", three["text"])
    assert "You are in room 3." in three["text"]
    assert [e["attrs"]["class"] for e in (one, two, three)] == ["turn k0", "turn s0", "turn k0"]
    (totals,) = page.find("table", class_="sum")
    (row,) = page.find("tr", class_="r0")
    cells = page.texts("td", row)
    assert cells == ["33.3 %", "33.3 %", "60", "40", "0", "2", "3", "1", "330", "300", "900"]
    assert "Exact minimum" in totals["text"]
    header = page.find("header")[0]["text"]
    for fact in ("covers.jsonl", "tiny", "float32", "close", "2e−5"):
        assert fact in header


def test_links_lead_somewhere_and_ids_are_unique(tmp_path):
    records = [make_record(id=f"t/{n}", epsilon=e) for n in range(3) for e in (0.001, 0.1)]
    page = make_page(tmp_path, records)
    ids = [e["attrs"]["id"] for e in page.elements if "id" in e["attrs"]]
    assert len(ids) == len(set(ids))
    links = {e["attrs"]["href"] for e in page.find("a")}
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    protector = page.find("section", id="r2-2")[0]
    assert "the most: turn 3" in protector["text"]


def test_several_thresholds_share_one_transcript(tmp_path):
    tight = make_record(epsilon=0.0001)
    tight["turns"] = [make_turn(n, "THINK", 10, tested=n > 1) for n in (1, 2, 3)]
    page = make_page(tmp_path, [make_record(), tight])
    assert len(page.find("section", class_="turn")) == 3
    assert page.find("section", id="r0-2")[0]["attrs"]["class"] == "turn k0 s1"
    radios = page.find("input", type="radio")
    # The page opens at the smallest threshold that removed something.
    assert [("checked" in r["attrs"]) for r in radios] == [False, True]
    item = page.find("li", id="r0")[0]["attrs"]
    assert item["class"].split() == ["h0", "h1"]
    assert item["data-skip"] == "0.0 0.333333"


def test_removed_text_is_found_in_another_record(tmp_path):
    full = make_record(epsilon=0.0001, original_reasoning=None)
    full["messages"][3]["reasoning_content"] = "Only here."
    cut = make_record(original_reasoning=None)
    assert "Only here." in make_page(tmp_path, [cut, full]).find(id="r0-2")[0]["text"]
    alone = make_page(tmp_path, [cut]).find(id="r0-2")[0]["text"]
    assert "20 reasoning tokens; the file does not hold their text" in alone


def test_optional_keys_may_be_absent(tmp_path):
    bare = {"id": "x", "epsilon": 0.0, "turns": [{"decision": "THINK"}, {"decision": "SKIP"}]}
    page = make_page(tmp_path, [bare, make_record(epsilon=0.1)])
    assert len(page.find("section", class_="turn")) == 5
    assert "holds no messages" in page.find("li", id="r0")[0]["text"]
    assert page.find("li", id="r0")[0]["attrs"]["data-skip"] == "0.5 x"


def test_prompt_turns_and_odd_messages(tmp_path):
    record = make_record()
    record["messages"][1:1] = [
        {"role": "assistant", "content": "OK.", "loss": False},
        {"role": "user", "content": [{"type": "text", "text": "part one"}, "part two"]},
    ]
    record["messages"][-2]["tool_calls"] = [
        {"function": {"name": "raw", "arguments": "{not json"}},
        {"function": {"name": "code", "arguments": {"source": "a\nb", "n": 1}}},
        {"name": "flat", "arguments": [1]},
        "junk",
    ]
    page = make_page(tmp_path, [record])
    assert len(page.find("section", class_="turn")) == 3
    assert "part one\npart two" in page.find("li", id="r0")[0]["text"]
    last = page.find(id="r0-3")[0]["text"]
    for piece in ("{not json", "a\nb", "flat", "[1]", "junk"):
        assert piece in last
    assert "do not have one assistant message per turn" not in page.source
    record["messages"] = record["messages"][:-2]
    assert "do not have one assistant message per turn" in make_page(tmp_path, [record]).source


def test_long_observation_is_clipped_and_whole(tmp_path):
    record = make_record()
    lines = [f"line {n}" for n in range(60)]
    record["messages"][2]["content"] = "\n".join(lines)
    text = make_page(tmp_path, [record]).find(id="r0-1")[0]["text"]
    assert "show all of the observation" in text
    assert [f"line {n}" for n in map(int, re.findall(r"line (\d+)", text))] == lines


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</noscript></details><h1>out</h1>",
    '" onfocus="alert(1)" x="',
    "' autofocus onfocus=alert(1) '",
    "{{ 7 * 7 }}{% raw %}{# x #}",
    "<!-- --!> <![CDATA[ ]]> &lt;b&gt; &amp;",
    "nul \x00 bell \x07 escape \x1b[31m delete \x7f c1 \x9b cr \r end",
    "bidi \u202e override \u2066 isolate \ufeff",
    "lone \ud800 surrogate \udfff",
    "</style><style>*{display:none}</style>",
    "javascript:alert(1) https://example.com/x.js",
]


def test_every_text_is_escaped_wherever_it_stands(tmp_path):
    hostile = "\n".join(HOSTILE)
    record = make_record(
        id=hostile,
        model=hostile,
        dtype=hostile,
        skip_form=hostile,
        original_reasoning=[hostile] * 3,
    )
    for message in record["messages"]:
        message["content"] = hostile
        if message["role"] == "assistant":
            calls = [
                {"function": {"name": hostile, "arguments": json.dumps({hostile: hostile})}},
                {"function": {"name": "f", "arguments": hostile}},
            ]
            message |= {"reasoning_content": hostile, "tool_calls": calls}
        else:
            message["name"] = hostile
    record["messages"][0]["role"] = "user"
    record["messages"].insert(0, {"role": hostile, "content": hostile})
    record = json.loads(json.dumps(record))
    page = make_page(tmp_path, [record], title=hostile, source=hostile, faults=[hostile, hostile])
    tags = {e["tag"] for e in page.elements}
    assert not tags & {"img", "iframe", "object", "link", "base", "embed"}
    assert len(page.find("script")) == 1 and len(page.find("style")) == 1
    assert len(page.find("h1")) == 1
    for element in page.elements:
        for name, value in element["attrs"].items():
            assert not name.startswith("on") and name not in ("style", "autofocus")
            if name in ("href", "src", "action"):
                assert value.startswith("#")
    clean = str(visible(hostile))
    assert "␀" in clean and "␛[31m" in clean and "[U+202E]" in clean and "\\ud800" in clean
    shown = page.find("section", id="r0-2")[0]["text"]
    assert shown.count(clean) >= 3  # reasoning, observation, argument
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", page.source)


def test_page_is_self_contained_and_its_policy_admits_its_own_code(tmp_path):
    page = make_page(tmp_path, [make_record(), make_record(epsilon=0.1)])
    policy = page.find("meta", **{"http-equiv": "Content-Security-Policy"})[0]["attrs"]["content"]
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "&lt;" not in text and "&#39;" not in text
    assert not re.search(r"https?://|url\(|@import|\bsrc=|<link", page.source)


def _luminance(colour):
    digits = colour.lstrip("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one, other):
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_meet_wcag_aa_in_light_and_dark(tmp_path):
    css = make_page(tmp_path, [make_record()]).find("style")[0]["text"]
    blocks = re.findall(r":root\{([^}]*)\}", css)
    assert len(blocks) == 2
    text = [("ink", b) for b in ("bg", "panel", "think-wash", "a", "b", "c", "d")]
    text += [("soft", b) for b in ("bg", "panel", "skip-wash")]
    text += [("think-ink", "think"), ("skip", "bg"), ("link", "bg"), ("link", "panel")]
    text += [("mark-ink", "mark"), ("e-ink", "e"), ("f-ink", "f"), ("bg", "ink")]
    shapes = [
        ("think", "bg"),
        ("skip", "bg"),
        ("edge", "bg"),
        ("think", "panel"),
        ("skip", "panel"),
    ]
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+):(#[0-9a-f]+)", block))
        for front, back in text:
            assert _contrast(colours[front], colours[back]) >= 4.5, (front, back)
        for front, back in shapes:
            assert _contrast(colours[front], colours[back]) >= 3.0, (front, back)


def test_real_trajectories_make_a_page_of_about_the_data_size(scienceworld_file, tmp_path):
    trajectories = [json.loads(line) for line in scienceworld_file.read_text().splitlines()]
    records = [r for t in trajectories for r in simulate(t, (0.001, 0.01, 0.1))]
    path = write_lines(tmp_path / "covers.jsonl", records)
    page = make_page(tmp_path, records)
    assert len(page.source.encode()) < 1.5 * path.stat().st_size
    turns = sum(m["role"] == "assistant" for t in trajectories for m in t["messages"])
    assert len(page.find("section", class_="turn")) == turns
    text = page.find("main")[0]["text"]
    for trajectory in trajectories:
        for message in trajectory["messages"]:
            assert str(message.get("reasoning_content") or "").strip() in text
    shares = [row.skip_share for row in summarise(records)]
    assert shares == sorted(shares) and shares[0] < shares[-1]
