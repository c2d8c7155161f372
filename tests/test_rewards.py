import pytest

from race_jax.rewards import (
    exact_match,
    extract_answer,
    f1,
    format_reward,
    normalize_answer,
    set_f1,
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("The  Eiffel\tTower.", "eiffel tower"),
        ("U.S.", "us"),
        ("An Athena, a theatre", "athena theatre"),  # articles only as whole words
        ("well-known", "wellknown"),
        ("“Café”", "“café”"),  # only ASCII punctuation goes
        ("a an the", ""),
    ],
)
def test_normalisation(text, kept):
    assert normalize_answer(text) == kept


def test_exact_match_with_any_golden_answer():
    assert exact_match("the Eiffel tower!", ["Tour Eiffel", "Eiffel Tower"]) == 1.0
    assert exact_match("Eiffel", ["Tour Eiffel", "Eiffel Tower"]) == 0.0


def test_an_empty_answer_matches_nothing_that_is_said():
    assert exact_match("", ["The The"]) == 0.0
    assert exact_match("the", ["A"]) == 0.0
    assert exact_match(" The the ", ["The The"]) == 1.0
    assert f1("", ["The The"]) == 0.0
    assert set_f1("", ["!"]) == 0.0


def test_f1_counts_words_as_often_as_they_occur():
    # "new york city new" and "new new york": common new 2 + york 1 = 3; p = 3/4, r = 3/3,
    # F1 = 2 * 0.75 * 1 / 1.75 = 6/7.
    assert f1("the New York City, new", ["new new york"]) == pytest.approx(6 / 7)
    # As sets {the, new, york, city} and {new, york}: p = 2/4, r = 2/2, F1 = 2/3.
    assert set_f1("the New York City, new", ["new new york"]) == pytest.approx(2 / 3)


def test_the_best_golden_answer_counts():
    # Against "york": p = 1/2, r = 1, F1 = 2/3; against "boston": 0.
    assert f1("new york", ["boston", "york"]) == pytest.approx(2 / 3)
    assert f1("paris", ["boston", "york"]) == 0.0


def test_f1_is_one_exactly_where_exact_match_is():
    for answer in ("42", "the Long Lake", "yes"):
        assert f1(answer, [answer.upper() + "."]) == exact_match(answer, [answer.upper()]) == 1.0


def test_the_set_form_keeps_articles_splits_at_punctuation_and_reads_booleans():
    # {the, who} and {who}: p = 1/2, r = 1.
    assert set_f1("The Who", ["Who"]) == pytest.approx(2 / 3)
    assert set_f1("well-known", ["well known"]) == 1.0
    assert set_f1("True", ["yes"]) == set_f1("no", ["False"]) == 1.0
    # {北, 京, 市} and {北, 京}: p = 2/3, r = 1, F1 = 4/5.
    assert set_f1("北京市", ["北京"]) == pytest.approx(4 / 5)


def test_the_last_whole_block_is_the_answer():
    assert extract_answer("<answer> Rome </answer> no, <answer>\nParis\n</answer>") == "Paris"
    assert extract_answer("only one: <answer>Oslo</answer>") == "Oslo"
    assert extract_answer("<answer>Rome</answer> or <answer>cut off") == "Rome"
    assert extract_answer("<answer>cut off") is None
    assert extract_answer("no tags at all") is None


def test_the_example_in_the_instructions_is_no_answer():
    instructions = "Put it in tags, for example <answer> Beijing </answer>. Where is the Louvre?"
    response = "It stands in Paris."
    assert extract_answer(instructions + response) == "Beijing"  # which is why it takes one text
    assert extract_answer(response) is None


@pytest.mark.parametrize("score", [exact_match, f1, set_f1])
def test_golden_answers_are_a_list_with_something_in_it(score):
    with pytest.raises(ValueError, match="golden is the text 'Paris'; give a list"):
        score("Paris", "Paris")
    with pytest.raises(ValueError, match="golden is empty"):
        score("Paris", [])


@pytest.mark.parametrize(
    ("generation", "kept"),
    [
        ("I think so.</think>\n<search>Louvre</search>", 1.0),
        ("<think>So.</think> <answer>Paris</answer>", 1.0),
        ("no action at all", 1.0),
        ("<search>Louvre", 0.0),  # one opening, no closing
        ("Louvre</search>", 0.0),
        ("<search>a</search><search>b</search>", 0.0),  # two actions
        ("<search>a</search><answer>b</answer>", 0.0),
        ("a</think>b</think><answer>c</answer>", 0.0),  # two closings
        ("<answer>b</answer>\nassistant\n", 0.0),  # the next speaker is played too
        ("<answer>b</answer> Assistant:", 0.0),
    ],
)
def test_the_format_of_each_generation(generation, kept):
    assert format_reward([generation]) == kept
    assert format_reward(["<search>a</search>", generation, "<answer>b</answer>"]) == kept


def test_the_format_counts_the_actions_that_are_named():
    two = "<tool_call>a</tool_call><tool_call>b</tool_call>"
    assert format_reward([two]) == 1.0
    assert format_reward([two], ("tool_call",)) == 0.0
    assert format_reward(["<search>"], ("tool_call",)) == 1.0
    assert format_reward([]) == 1.0


def test_the_product_of_format_and_f1():
    # "in Paris" and "Paris": p = 1/2, r = 1, F1 = 2/3; the second generation acts twice.
    good = ["<search>Louvre</search>", "<answer>in Paris</answer>"]
    bad = ["<search>Louvre</search><search>x</search>", "<answer>in Paris</answer>"]
    for generations, reward in ((good, 2 / 3), (bad, 0.0)):
        answer = extract_answer(generations[-1])
        assert format_reward(generations) * f1(answer, ["Paris"]) == pytest.approx(reward)
