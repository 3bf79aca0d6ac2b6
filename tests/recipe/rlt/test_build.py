"""The parts of an RLT run: rows, student and scorer; what is wrong with them shows before a worker starts."""

import json
import shutil

import pytest
import torch

from tests.rlt import ALIAS, AR, MODEL, RLT, SWAP, brief_toy, settings_of
from tests.trainer.conftest import ready
from verl_memopt.data.batch import Ragged
from verl_memopt.errors import ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.recipes.rlt.dataset import RltDataset
from verl_memopt.recipes.rlt.student_rows import PREFIX
from verl_memopt.trainer.build import build_run


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return brief_toy(tmp_path_factory.mktemp("rlt") / "toy")


@pytest.fixture
def context_of(toy, tmp_path):
    """Builds the context of a run; its lock is released at the end."""
    held = []

    def build(more=None):
        context = build_run(settings_of(toy, tmp_path / "run", more))
        held.append(context.lock)
        context.lock.__exit__(None, None, None)
        return context

    return build


def test_the_rows_are_teacher_prompts_with_question_and_solution(context_of):
    context = context_of()
    assert isinstance(context.validation, RltDataset)
    assert len(context.validation) == 9
    row = context.validation[0]
    assert row.text.endswith(f"<solution>{row.ground_truth}</solution>\n\n<explanation>\n\n")
    assert row.extra_info["question"] in row.text
    assert row.data_source == "rlt"


def test_the_plan_of_a_student_names_its_folder_and_its_place(context_of, toy):
    plans = {name: context_of(more).worker_plan.role for name, more in {"own": {}, "alias": ALIAS, "swap": SWAP}.items()}
    assert {name: (plan.residency, plan.folder) for name, plan in plans.items()} == {
        "own": ("separate", str(toy / "student")),
        "alias": ("alias_ref", None),
        "swap": ("swap", str(toy / "student")),
    }
    assert all(plan.shares_prompts for plan in plans.values())
    assert not context_of({f"{AR}.actor.use_prefix_grouper": False}).worker_plan.role.shares_prompts


def other_tokenizer(toy, folder):
    """Returns a copy of the student whose tokenizer has two tokens in each other's place."""
    shutil.copytree(toy / "student", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def test_a_student_with_another_tokenizer_is_refused_at_the_start(context_of, toy, tmp_path):
    folder = other_tokenizer(toy, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"the student .*/other: its tokenizer differs from the policy's in vocabulary\. "):
        context_of(ALIAS | {f"{AR}.ref.model.path": folder})


def test_a_folder_without_a_tokenizer_reads_the_policys_ids(context_of, toy, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(toy / "student", folder, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    assert context_of({f"{MODEL}.path": str(folder)}).worker_plan.role.folder == str(folder)


def test_a_swap_of_two_shapes_is_refused_at_the_start(context_of, tmp_path):
    folder = make_tiny_model(tmp_path / "wide", TinyShape(hidden_size=128), seed=1)
    with pytest.raises(ConfigError, match=r"reward_model\.residency=swap: .*hidden_size \(128 and 64\)"):
        context_of(SWAP | {f"{MODEL}.path": str(folder)})


def test_special_tokens_of_a_question_are_text_unless_they_are_allowed(context_of):
    lengths = []
    for allowed in (False, True):
        encoder = context_of({"data.allow_special_tokens": allowed}).recipe.encoder
        rows = encoder.encode(["<|im_end|>"], ["2"], Ragged.from_rows([[5]], torch.int64), ["f:1"])
        lengths.append(int(rows.parts[0, PREFIX]))
    assert lengths[0] > lengths[1]


def test_the_format_of_the_settings_tags_the_prompts(context_of):
    context = context_of({f"{RLT}.tag_format": "r1", "data.max_prompt_length": 900, f"{AR}.actor.ppo_max_token_len_per_gpu": 999})
    assert "You are a teacher." in context.validation[0].text


def test_rows_that_can_never_be_scored_are_counted_at_the_start(context_of, caplog):
    context_of({f"{RLT}.max_student_len": 400})
    assert "never scored" not in caplog.text
    limit = {f"{RLT}.max_student_len": 40}
    context_of(limit)
    (text,) = [text for text in caplog.messages if "val.parquet" in text]
    assert text.startswith(f"{RLT}.max_student_len=40: question and solution of 9 of 9 rows are longer, so these rows are never")
    with pytest.raises(ConfigError, match=r"max_student_len=40: the student's sequence for .*train\.parquet.* has \d+ tokens"):
        context_of(limit | {f"{RLT}.overlong": "error"})


def test_a_student_with_fewer_ids_than_the_policy_samples_is_refused_unless_it_reads_its_own(context_of, toy, tmp_path):
    policy = {f"{AR}.model.path": str(make_tiny_model(tmp_path / "policy", TinyShape(vocab_size=400), seed=1))}
    said = rf"^{MODEL}\.path=.*: its embedding has 320 rows, and that of {AR}\.model\.path=.* has 400, .*align=retokenize"
    with pytest.raises(ConfigError, match=said):
        context_of(policy)
    with ready(settings_of(toy, tmp_path / "run", policy | {f"{RLT}.align": "retokenize"})) as trainer:
        trainer.run()
