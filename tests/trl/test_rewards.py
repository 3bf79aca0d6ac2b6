"""TRL's reward functions. Expected values are those of ``trl.rewards`` in TRL 1.16 for the same arguments."""

import pickle
import threading

import pytest

from verl_memopt.trl import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

THIRD = r"\frac{1}{3}"
ANSWERS = [
    (r"so \boxed{\frac{2}{6}}", 1.0),
    (r"\boxed{1} or \boxed{\frac{1}{3}}", 0.0),
    ("so the answer is $1/3$.", 1.0),
    ("so $1/3$", 0.0),  # no words that announce an answer
    ("the answer is 1/3", 0.0),  # no LaTeX
    ("", 0.0),
]
THOUGHTS = {
    "<think>a</think>": 1.0,
    "<think>\n</think>\nb": 1.0,
    "<think></think>": 1.0,
    "<think>a</think>b</think>": 1.0,
    "<think>a</think>\n<think>b</think>": 0.0,
    "\n<think>a</think>": 0.0,
    "<THINK>a</THINK>": 0.0,
    "<think>a": 0.0,
}


def turns(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_thoughts_stand_once_and_first():
    assert think_format_reward(turns(THOUGHTS)) == list(THOUGHTS.values())
    assert think_format_reward(list(THOUGHTS), answer=["x"]) == list(THOUGHTS.values())


def test_an_answer_is_compared_by_value_and_a_solution_that_cannot_be_read_has_none():
    pytest.importorskip("math_verify")
    logged = {}
    texts, expected = [text for text, _ in ANSWERS], [score for _, score in ANSWERS]
    assert accuracy_reward(turns(texts), [f"${THIRD}$"] * 6, log_extra=logged.__setitem__) == expected
    assert logged["answer_parsed"][3:] == ["[unparseable]"] * 3
    assert accuracy_reward(turns(texts[:1]), [""], log_extra=logged.__setitem__) == [None]
    assert logged == {"solution": [""], "gold_parsed": ["[unparseable]"], "answer_parsed": ["[skipped]"]}


def test_an_answer_is_compared_in_a_thread_too():
    pytest.importorskip("math_verify")
    found = []
    thread = threading.Thread(target=lambda: found.append(accuracy_reward(turns([r"\boxed{2}"]), ["2"])))
    thread.start()
    thread.join()
    assert found == [[1.0]]


def test_the_answer_after_the_reasoning_counts_and_none_before_its_end():
    pytest.importorskip("math_verify")
    texts = [r"<think>\boxed{1}</think>\boxed{2}", r"<think>\boxed{2}", r"a|\boxed{2}</think>b|\boxed{3}", r"\boxed{2}</think>"]
    assert reasoning_accuracy_reward(turns(texts), ["2", "2", "2", ""]) == [1.0, 0.0, 0.0, None]
    assert reasoning_accuracy_reward(turns(texts), ["2", "2", "3", ""], ["|", "</think>"]) == [1.0, 0.0, 1.0, None]


def test_a_cosine_prefers_short_right_answers_and_long_wrong_ones():
    pytest.importorskip("math_verify")
    texts, lengths = [r"\boxed{2}", r"\boxed{2}", r"\boxed{2}", r"\boxed{3}", r"\boxed{3}"], [0, 50, 300, 0, 50]
    scaled = get_cosine_scaled_reward(100)
    assert scaled(turns(texts), ["2"] * 5, [[1] * n for n in lengths]) == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75])
    assert scaled(turns(texts[:1]), [""], [[1]]) == [None]


def test_repeated_tokens_and_long_answers_are_punished():
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [5], []]
    assert get_repetition_penalty_reward(2)(ids) == [0.0, -0.75, 0.0, 0.0]
    assert get_repetition_penalty_reward(1, -2.0)(ids) == pytest.approx([0.0, -1.6, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"max_penalty=0\.5"):
        get_repetition_penalty_reward(max_penalty=0.5)
    overlong = get_soft_overlong_punishment(100, 20)
    assert overlong([[1] * n for n in (80, 90, 100, 101)]) == [0.0, -0.5, -1.0, -1.0]
    assert get_soft_overlong_punishment(3, 0)([[1] * 3, [1] * 4]) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (get_cosine_scaled_reward(9), "cosine_scaled_reward"),
        (get_repetition_penalty_reward(), "repetition_penalty_reward"),
        (get_soft_overlong_punishment(9, 3), "soft_overlong_punishment_reward"),
    ],
)
def test_a_function_with_settings_can_be_sent_to_another_process_and_keeps_the_name_of_its_metric(function, name):
    assert pickle.loads(pickle.dumps(function)).__name__ == name
