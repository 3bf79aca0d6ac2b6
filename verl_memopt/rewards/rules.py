"""Rule rewards: small functions of a response and its ground truth, selected by ``data_source``."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from verl_memopt.config.reward_limits import URL
from verl_memopt.errors import DataError, RewardError
from verl_memopt.rewards.code_task import CODE_SOURCES
from verl_memopt.rewards.math_answers import math_answer

Rule = Callable[[str, Any], Any]
"""Called with a response and its ground truth. Returns the score, or a dict with ``score``."""

LAST_CHARACTERS = 300
"""Number of characters at the end of a response that verl's rules for GSM8K and DAPO read."""

_STRICT_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_FINAL_ANSWER = re.compile(r"####\s*(\$?-?[0-9][0-9.,]*)")
_THINK_THEN_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)


def exact_match(solution: str, ground_truth: Any) -> float:
    """Return 1.0 if the response equals the ground truth, apart from surrounding white space; else 0.0."""
    return float(solution.strip() == str(ground_truth).strip())


def final_answer(solution: str) -> str | None:
    """Return the number of the last ``#### x`` in a text, or None.

    Thousands separators, a currency sign and a final dot are removed.
    """
    answers = _FINAL_ANSWER.findall(solution)
    return _plain_number(answers[-1]) if answers else None


def gsm8k(solution: str, ground_truth: Any) -> float:
    """Return 1.0 if the last ``#### x`` in the last 300 characters is the ground truth, apart from commas; else 0.0.

    This is verl's rule: a currency sign, a final dot or another form of the number scores 0.0.
    """
    answers = _STRICT_ANSWER.findall(solution[-LAST_CHARACTERS:])
    return float(bool(answers) and answers[-1].replace(",", "") == str(ground_truth))


def tolerant_gsm8k(solution: str, ground_truth: Any) -> float:
    """Return 1.0 if the last ``#### x`` is the ground truth, apart from commas, a currency sign and a final dot; else 0.0."""
    return float(final_answer(solution) == _plain_number(str(ground_truth)))


def final_answer_format(solution: str, ground_truth: Any) -> float:
    """Return 1.0 if the response has exactly one ``#### x`` and ends with it, right or wrong; else 0.0."""
    matches = list(_FINAL_ANSWER.finditer(solution))
    return float(len(matches) == 1 and not solution[matches[0].end() :].strip())


def think_format(solution: str, ground_truth: Any) -> float:
    """Return 1.0 if the response is one ``<think>..</think>`` and then one ``<answer>..</answer>``; else 0.0."""
    return float(_THINK_THEN_ANSWER.fullmatch(solution) is not None)


def boxed_answer(solution: str, ground_truth: Any) -> float:
    r"""Return 1.0 if the last ``\boxed{...}`` of a response is the ground truth, after both are normalised; else 0.0.

    This is verl's rule for MATH, from the code of that data set (arXiv 2103.03874). Texts are compared, not values: ``\frac12``
    equals ``1/2`` and ``0.5``, but ``\frac{2}{4}`` equals none of them.
    """
    _, spaced, rest = solution.rpartition("\\boxed ")
    answer, expected = rest.partition("$")[0] if spaced else _last_box(solution), str(ground_truth)
    if answer is None:
        return 0.0
    try:
        return float(_one_form(answer) == _one_form(expected))
    except ValueError:
        return float(answer == expected)


def _last_box(text: str, command: str = "\\boxed") -> str | None:
    """Return the contents of the last box in a text, or None if it is not closed. ``command`` begins a box."""
    start, depth = text.rfind(command), 0
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


def _one_form(text: str) -> str:
    """Normalise LaTeX, so that some different spellings of a value become the same text.

    Raises:
        ValueError: A fraction, a root or a unit is incomplete.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for part in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(part, "")
    text, *units = text.split("\\text{ ")  # only units begin with a space
    if len(units) > 1:
        raise ValueError("two units")
    text = text.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    name, *values = text.split("=")
    if len(values) == 1 and len(name) <= 2:
        text = values[0]
    if text.endswith("\\sqrt"):
        raise ValueError("a root of nothing")
    text = _with_fractions(re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text)
    return text if ratio is None else f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"


def _with_fractions(text: str) -> str:
    r"""Add missing braces: ``\frac12`` becomes ``\frac{1}{2}``."""
    first, *others = text.split("\\frac")
    parts = [first]
    for other in others:
        if not other:
            raise ValueError("a fraction of nothing")
        if other[0] == "{":
            parts.append(other)
        elif len(other) < 2:
            return text
        else:
            parts.append(f"{{{other[0]}}}" + (other[1:] if other[1] == "{" else f"{{{other[1]}}}{other[2:]}"))
    return "\\frac".join(parts)


def dapo_answer(solution: str, ground_truth: Any) -> dict[str, Any]:
    r"""Return the score of a DAPO problem: 1.0 for a right answer and -1.0 for a wrong one, with ``acc`` and ``pred``.

    The answer is the last ``Answer: x`` in the last 300 characters, normalised. If there is none, it is the contents of the last
    ``\boxed{}`` in the last 100 characters. Source: verl's ``math_dapo``, after Minerva (arXiv 2206.14858, appendix D.1).
    """
    expected, tail = str(ground_truth), solution[-LAST_CHARACTERS:]
    answers = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", tail)
    answer = _minerva_form(answers[-1]) if answers else "[INVALID]"
    right = answer == _minerva_form(expected)
    box = _last_box(tail[-100:], "\\boxed{") if answer == "[INVALID]" else None
    if box is not None:
        answer, right = box, box == expected
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


_MINERVA_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_PATTERNS = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"), (r"(\\text\{)(.*?)(\})", r"\2"), (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"), (r"(\\boxed\{)(.*)(\})", r"\2"), (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)  # fmt: skip
"""Minerva's normalisation of an answer, in this order: remove units and filler words, then unify LaTeX."""


def _minerva_form(answer: str) -> str:
    answer = answer.split("=")[-1]
    for before, after in (*_MINERVA_REPLACED, *((word, "") for word in _MINERVA_REMOVED)):
        answer = answer.replace(before, after)
    for pattern, after in _MINERVA_PATTERNS:
        answer = re.sub(pattern, after, answer)
    answer = answer.replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip()


_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
"""Sources of mathematical problems in the data sets Eurus-2-RL and NuminaMath."""

_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
"""Names of the data set MATH."""

RULES: dict[str, Rule] = {
    "toy/arithmetic": exact_match,
    "openai/gsm8k": gsm8k,
    "format/final_answer": final_answer_format,
    "format/think": think_format,
    "math/answer": math_answer,
    **dict.fromkeys(_MATH, boxed_answer),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), dapo_answer),
    **{f"numina_{name}": math_answer for name in _NUMINA},
}
"""Data source -> rule. A source that verl scores has verl's rule, except for the sources of NuminaMath. Sources that begin with
``aime`` are scored as ``math_dapo``, as in verl."""

TOLERANT_RULES: dict[str, Rule] = {"openai/gsm8k": tolerant_gsm8k, **dict.fromkeys(_MATH, math_answer)}
"""Data source -> a rule that is more lenient than verl's."""


def rule_of(source: str, tolerant: bool = False) -> Rule | None:
    if tolerant and source in TOLERANT_RULES:
        return TOLERANT_RULES[source]
    return RULES.get("math_dapo" if source.startswith("aime") else source)


_RIGHT_ANSWERS: dict[Rule, str] = {
    exact_match: "{}",
    gsm8k: "#### {}",
    tolerant_gsm8k: "#### {}",
    boxed_answer: "\\boxed{{{}}}",
    dapo_answer: "Answer: {}",
    math_answer: "\\boxed{{{}}}",
}
"""Rule -> a response whose answer is the ground truth. A rule that is missing here does not use the ground truth."""

MOST_READ = 200
"""Largest number of ground truths that math-verify checks before a run. Each takes up to 0.1 s."""


def check_rows(rows: Iterable[tuple[str, str, Any, str]], sandbox: bool = False, tolerant: bool = False) -> None:
    """Check that each row has a rule, and a ground truth that an answer can equal. For runs without a custom function.

    ``rows`` are (data_source, address, ground_truth, prompt). ``sandbox``: a service runs the programs of code tasks.

    Raises:
        DataError: A data source has no rule, the package that its rule needs is missing, or every answer to a row would be wrong.
            The message names the first such row.
    """
    read = set[tuple[str, str]]()
    for source, address, truth, prompt in rows:
        if source in CODE_SOURCES and sandbox:
            continue
        rule = rule_of(source, tolerant)
        if rule is None:
            raise DataError(f"{address}: {_no_rule(source)}")
        if rule is math_answer and find_spec("math_verify") is None:
            raise DataError(
                f"{address}: data_source {source!r} needs math-verify, which is not installed. "
                "Install it (pip install 'verl-memopt[math]'), or set custom_reward_function.path."
            )
        if rule is think_format and prompt.rstrip().endswith("<think>"):
            raise DataError(
                f"{address}: data_source {source!r} needs a response that begins with <think>, but the prompt already ends with "
                "<think>, so every answer would be wrong. Set another template with "
                "actor_rollout_ref.model.custom_chat_template, or custom_reward_function.path."
            )
        if rule not in _RIGHT_ANSWERS:
            continue
        try:
            key = source, plain_truth(truth)
            if key not in read and not (rule is math_answer and len(read) >= MOST_READ):
                read.add(key)
                _check_truth(rule, key[1])
        except RewardError as problem:
            raise DataError(f"{address}: data_source {source!r}: {problem}") from problem


def _check_truth(rule: Rule, truth: str) -> None:
    response = _RIGHT_ANSWERS[rule].format(truth)
    result = rule(response, truth)
    if (result["score"] if isinstance(result, dict) else result) <= 0:
        number = _plain_number((_FINAL_ANSWER.findall(truth) or [truth])[-1]).strip(" %")
        way_out = f"Write it as {number}" if re.fullmatch(r"-?\d+(\.\d+)?", number) else "Write the answer alone"
        raise RewardError(
            f"the ground truth {truth!r:.200} is no answer that the rule can find in a response, so every answer would be "
            f"wrong. {way_out}, or set custom_reward_function.path."
        )


def plain_truth(truth: Any) -> str:
    """Return a ground truth as the text that rules compare: "65" for 65.0, and for a list of one entry the text of that entry.

    Raises:
        RewardError: The ground truth is neither a text nor a number.
    """
    if hasattr(truth, "tolist"):  # a value of numpy
        truth = truth.tolist()
    if isinstance(truth, list | tuple) and len(truth) == 1:
        return plain_truth(truth[0])
    if isinstance(truth, float) and math.isfinite(truth):
        return str(int(truth)) if truth.is_integer() else repr(truth)
    if isinstance(truth, str) or (isinstance(truth, numbers.Real | Decimal) and math.isfinite(truth)):
        return str(truth)
    raise RewardError(
        f"the ground truth {truth!r:.200} of type {type(truth).__name__} is no single answer. Give a text or a number, or set "
        "custom_reward_function.path."
    )


def score_by_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, tolerant: bool = False
) -> Any:
    """Score a response by the rule of ``data_source``. Returns a number, or a dict with ``score``."""
    rule = rule_of(data_source, tolerant)
    if rule is None:
        raise RewardError(f"cannot score this row: {_no_rule(data_source)}")
    return rule(solution_str, plain_truth(ground_truth) if rule in _RIGHT_ANSWERS else ground_truth)


def score_batch_by_rule(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    tolerant: bool = False,
) -> list[Any]:
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [score_by_rule(*row, tolerant=tolerant) for row in rows]


def _no_rule(source: str) -> str:
    if source in CODE_SOURCES:
        return (
            f"data_source {source!r} has code tasks, and only a sandbox service runs the programs of responses. Set {URL} to "
            "the address of a SandboxFusion service, or set custom_reward_function.path."
        )
    return (
        f"data_source {source!r} has no rule. There are rules for {', '.join([*RULES, *CODE_SOURCES])}. "
        "Use one of these, or set custom_reward_function.path."
    )


def _plain_number(text: str) -> str:
    return text.strip().replace(",", "").replace("$", "").rstrip(".")
