"""Ids against the families' own chat templates, with the real Qwen tokenizer."""

import json
import re

import pytest

from race_jax.chat import renderer_for
from race_jax.types import Trajectory

TEMPLATES = {"qwen2_5": "qwen2_5", "qwen3": "qwen3", "qwen3_5": "qwen3_5_think"}
BLOCK = re.compile(r"<think>\n.*?</think>\n\n", re.DOTALL)


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"{name} – näh!", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    tool("look", at={"type": "string"}, n={"type": "integer"}),
    tool("mark", b={"type": "boolean"}, o={"type": "object"}, l={"type": "array"}),
)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content, reasoning, *calls):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return {**message, "tool_calls": list(calls)} if calls else message


def tool_reply(content):
    return {"role": "tool", "content": content}


SYSTEM = {"role": "system", "content": "You act in a lab.\n\nBe brief. "}
USER = {"role": "user", "content": "Melt the ice: 2+2?\n\n  It is 10°C 🙂"}
NONE = {"b": True, "o": {"k": None, "f": 1.5}, "l": [1, "ä"], "n": None}
BODY = [
    assistant("", "I think.\n\n1. Look", call("look", at="door", n=2)),
    tool_reply("\tA door.\n\n- wood\n"),
    assistant("Both, then.", "Two.", call("look", at="a\nb"), call("mark", **NONE)),
    tool_reply("ok"),
    tool_reply(""),
    assistant("", "x", call("mark"), call("look", at='"quoted" \\ text')),
    tool_reply("{}"),
    assistant("Done: 4.\n\nBye", "So", call("look", n=-1)),
    tool_reply("no."),
    assistant("  The answer is 4.\n", "last"),
]
CONVERSATIONS = {
    "system, tools": ([SYSTEM, USER, *BODY], TOOLS),
    "tools": ([USER, *BODY], TOOLS),
    "system": ([SYSTEM, USER, BODY[0], tool_reply("x"), BODY[-1]], ()),
    "plain": ([USER, BODY[-1]], ()),
    "empty system, tools": ([{"role": "system", "content": ""}, USER, BODY[-1]], TOOLS),
    "white space": ([USER, assistant("\n\n A\n ", "\n\n r \n\n", call("look", n=1))], TOOLS),
    "ends in an observation": ([SYSTEM, USER, *BODY[:5]], TOOLS),
}


@pytest.fixture(scope="module")
def render(qwen_tokenizer, chat_template):
    def render(family, messages, tools, **options):
        template = chat_template(TEMPLATES.get(family, family))
        return qwen_tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, chat_template=template, tokenize=False, **options
        )

    return render


@pytest.fixture(scope="module")
def encode(qwen_tokenizer):
    return lambda text: qwen_tokenizer.encode(text, add_special_tokens=False)


def ours(tokenizer, family, messages, tools, skip_form="close"):
    renderer = renderer_for(tokenizer, family, skip_form=skip_form)
    tokens = renderer.encode(Trajectory("t", tuple(messages), tuple(tools)))
    return tokens.assemble().tokens.tolist()


def one_shot(text, messages):
    """A template closes the last message with a newline, which no policy ever sees."""
    return text.removesuffix("\n") if messages[-1]["role"] == "assistant" else text


@pytest.mark.parametrize("skip_form", ["close", "template"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_ids_are_those_of_the_one_shot_render(
    qwen_tokenizer, render, encode, family, name, skip_form
):
    messages, tools = CONVERSATIONS[name]
    expected = encode(one_shot(render(family, messages, tools), messages))
    assert ours(qwen_tokenizer, family, messages, tools, skip_form) == expected


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_qwen2_5_is_its_template_with_blocks(qwen_tokenizer, render, encode, name):
    messages, tools = CONVERSATIONS[name]
    ids = ours(qwen_tokenizer, "qwen2_5", messages, tools)
    text = qwen_tokenizer.decode(ids, skip_special_tokens=False)
    assert len(BLOCK.findall(text)) == sum(m["role"] == "assistant" for m in messages)
    expected = one_shot(render("qwen2_5", messages, tools), messages)
    assert BLOCK.sub("", text) == expected
    if name == "white space":
        return  # content that begins with newlines: the fixed boundary keeps them apart
    assert ids == encode(text)
    # Where there is content, the template itself takes the block inside it.
    inside = [
        {**m, "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"}
        if m["role"] == "assistant" and m["content"]
        else m
        for m in messages
    ]
    if all(m["role"] != "assistant" or m["content"] for m in messages):
        assert ids == encode(one_shot(render("qwen2_5", inside, tools), messages))


def test_qwen3_5_keeps_empty_blocks_as_our_template_form_does(qwen_tokenizer, render, encode):
    messages, tools = CONVERSATIONS["system, tools"]
    for skipped in ({2}, {2, 6, 11}, {4, 7, 9}, set(range(12))):
        mixed = [
            {**m, "reasoning_content": ""} if n in skipped and m["role"] == "assistant" else m
            for n, m in enumerate(messages)
        ]
        expected = encode(one_shot(render("qwen3_5", mixed, tools), mixed))
        assert ours(qwen_tokenizer, "qwen3_5", mixed, tools, "template") == expected
        assert ours(qwen_tokenizer, "qwen3_5", mixed, tools, "close") != expected


def test_qwen3_keeps_the_empty_block_of_the_last_turn(qwen_tokenizer, render, encode):
    messages, tools = CONVERSATIONS["system, tools"]
    mixed = [*messages[:-1], {**messages[-1], "reasoning_content": ""}]
    expected = encode(one_shot(render("qwen3", mixed, tools), mixed))
    assert ours(qwen_tokenizer, "qwen3", mixed, tools, "template") == expected


@pytest.mark.parametrize("end", [2, 4, 7])
def test_generation_prompts(qwen_tokenizer, render, encode, end):
    messages, tools = CONVERSATIONS["system, tools"]
    trajectory = Trajectory("t", tuple(messages), tools)

    def context(family, skip_form):
        tokens = renderer_for(qwen_tokenizer, family, skip_form=skip_form).encode(trajectory)
        turn = sum(m["role"] == "assistant" for m in messages[:end])
        laid_out = tokens.assemble()
        return laid_out.tokens[: laid_out.starts[turn]].tolist()

    prompt = {"add_generation_prompt": True}
    for family in ("qwen3", "qwen3_5"):
        skip = list(renderer_for(qwen_tokenizer, family, skip_form="template").skip_ids)
        off = render(family, messages[:end], tools, enable_thinking=False, **prompt)
        assert context(family, "template") + skip == encode(off)
    on = encode(render("qwen3_5", messages[:end], tools, **prompt))
    assert context("qwen3_5", "close") == on
    bare = encode(render("qwen3", messages[:end], tools, **prompt))
    assert context("qwen3", "template") == bare
    # Qwen3's policy would sample the opener; here the prompt has it, in every family.
    assert context("qwen3", "close") == [*bare, 151667, 198]
    small = encode(render("qwen3_5_nothink", messages[:end], tools, **prompt))
    assert context("qwen3_5", "template") + skip == small


def test_prompt_messages_before_the_query(qwen_tokenizer, render, encode):
    canned = {"role": "assistant", "content": "OK, I will.", "loss": False}
    messages = [USER, canned, USER, *BODY]
    for family in ("qwen3", "qwen3_5"):
        expected = encode(one_shot(render(family, messages, TOOLS), messages))
        assert ours(qwen_tokenizer, family, messages, TOOLS) == expected


def test_earlier_reasoning_stays_where_the_template_strips_it(qwen_tokenizer, render):
    messages = [USER, *BODY[:2], assistant("done", "r2"), USER, assistant("again", "r3")]
    for family in ("qwen2_5", "qwen3", "qwen3_5"):
        for skip_form in ("close", "template"):
            ids = ours(qwen_tokenizer, family, messages, TOOLS, skip_form)
            text = qwen_tokenizer.decode(ids, skip_special_tokens=False)
            reasoning = [m["reasoning_content"] for m in messages if "reasoning_content" in m]
            assert BLOCK.findall(text) == [f"<think>\n{r}\n</think>\n\n" for r in reasoning]
            if family != "qwen2_5":
                assert len(BLOCK.findall(render(family, messages, TOOLS))) == 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_real_trajectories(qwen_tokenizer, render, encode, scienceworld_file, family):
    renderer = renderer_for(qwen_tokenizer, family)
    lines = scienceworld_file.read_text().splitlines()
    assert len(lines) == 28
    for line in lines:
        data = json.loads(line)
        messages = data["messages"]
        tokens = renderer.encode(Trajectory(data["id"], tuple(messages), tuple(data["tools"])))
        for message in messages:
            for entry in message.get("tool_calls", ()):
                entry["function"]["arguments"] = json.loads(entry["function"]["arguments"])
            if family == "qwen3_5":  # trims
                message["content"] = message["content"].strip()
        text = one_shot(render(family, messages, data["tools"]), messages)
        # Turns that came without reasoning differ in their empty block only.
        if len(tokens.reasoned) == len(tokens.turns):
            assert tokens.assemble().tokens.tolist() == encode(text)
        else:
            ids = tokens.assemble().tokens.tolist()
            assert BLOCK.sub("", qwen_tokenizer.decode(ids)) == BLOCK.sub("", text)
        assert renderer.decode(tokens) == messages
