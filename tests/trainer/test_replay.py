import json
from dataclasses import replace

import pytest

from verl_memopt.config.keys import replaced
from verl_memopt.config.schema import Settings
from verl_memopt.data.prompts import StepPrompts
from verl_memopt.errors import DataError
from verl_memopt.model.tiny import build_tokenizer
from verl_memopt.observe.samples import Sample, dump_samples
from verl_memopt.trainer.replay import Forge, NoPrompts, Replay, check_same_prompts, dump_folder

PROMPTS = [[5, 6], [7, 8, 9]]
SAMPLES = [
    Sample(
        uid=str(10 + prompt), data_source="toy", input="text", output=f"answer {sample}", gts="2", score=0.5 * sample,
        prompt_ids=PROMPTS[prompt], response_ids=[3] * (1 + sample), extra={"acc": sample, "score": 9}, finish_reason="length",
        rollout_log_probs=[-1.0] * (1 + sample), extra_info={"level": prompt}, failed=sample == 1,
        messages=[{"role": "user", "content": "text"}],
    )
    for prompt in range(2)
    for sample in range(2)
]  # fmt: skip


@pytest.fixture
def replay(tmp_path):
    dump_samples(tmp_path, 1, SAMPLES, "hash")
    return replay_in(tmp_path, "train_only", {"algorithm.rollout_correction.rollout_is": "token"})


def replay_in(folder, mode, more=None):
    """Gives what replays a dump in steps of two prompts with two responses each."""
    rollout = {"actor_rollout_ref.rollout.n": 2, "actor_rollout_ref.rollout.skip_dump_dir": str(folder)}
    data = {"data.train_batch_size": 2, "data.max_prompt_length": 3, "data.max_response_length": 2}
    return Replay(replaced(Settings(), {"debug.mode": mode, **rollout, **data, **(more or {})}), "hash", 100)


def rewrite(replay, change):
    """Write the rows of step 1 again after ``change`` has changed them."""
    path = replay.folder / "1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_step_comes_back_as_it_was_written(replay):
    replayed = replay.read(1)
    answers = replayed.answers
    assert replayed.prompts.prompt_ids == answers.prompt_ids == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert [row.index for row in replayed.prompts.prompts] == [10, 11]
    assert [row.extra_info for row in answers.rows] == [sample.extra_info for sample in SAMPLES]
    assert [row.messages for row in answers.rows] == [sample.messages for sample in SAMPLES]
    assert answers.texts == [sample.output for sample in SAMPLES]
    assert answers.generation.response_ids == [sample.response_ids for sample in SAMPLES]
    assert answers.generation.log_probs == [sample.rollout_log_probs for sample in SAMPLES]
    assert answers.generation.finish_reasons == ["length"] * 4
    assert [(one.score, one.extra, one.failed) for one in replayed.results] == [
        (sample.score, sample.extra, sample.failed) for sample in SAMPLES
    ]


def test_rows_of_one_prompt_share_their_row_as_those_of_a_run_do(replay):
    rows = replay.read(1).answers.rows
    assert rows[0] is rows[1]
    assert rows[1] is not rows[2]


def drop(*numbers):
    return lambda rows: [rows.pop(number) for number in sorted(numbers, reverse=True)]


def put(number, **values):
    return lambda rows: rows[number].update(values)


@pytest.mark.parametrize(
    ("change", "row", "says"),
    [
        (put(2, schema=1), 3, "a dump of schema 1 cannot be replayed; this version reads schema 3"),
        (put(1, schema=None), 2, "schema None"),
        (put(1, tokenizer="other"), 2, "another tokenizer"),
        (drop(1), 2, "the file should have row 2 of 4 here, and has row 3 of 4"),
        (drop(3), 4, "rows are missing: 3 of 4"),
        (drop(0, 1, 2, 3), 1, "rows are missing: 0"),
        (lambda rows: rows[3].pop("gts"), 4, "the key 'gts' is missing"),
        (put(0, response_ids=[1, 100]), 1, "response_ids must be token ids from 0 to 99"),
        (put(0, prompt_ids=[1, -1]), 1, "prompt_ids must be token ids"),
        (put(0, response_ids=[1, True]), 1, "response_ids must be token ids"),
        (put(0, prompt_ids="12"), 1, "prompt_ids must be token ids"),
        (put(1, rollout_log_probs=[-1.0]), 2, "not one log-prob for each response token"),
        (put(0, prompt_ids=[]), 1, "it has no prompt"),
        (put(2, score=None), 3, "it has no score. Score the dump first with debug=score_only"),
        (put(2, rollout_log_probs=None), 3, "it has no log-probs of the engine"),
        (put(1, prompt_ids=[5, 7]), 2, "it answers another prompt than the first row of its group"),
        (put(3, uid="10"), 4, "it answers another prompt"),
        (put(3, response_ids=[1] * 3, rollout_log_probs=[0] * 3), 4, "the response has 3 tokens, and data.max_response_length=2"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_replayed_is_named_with_its_file(replay, change, row, says):
    rewrite(replay, change)
    with pytest.raises(DataError) as refused:
        replay.read(1)
    assert str(refused.value).startswith(f"{replay.folder}/1.jsonl, row {row}: ")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"actor_rollout_ref.rollout.n": 3}, "row 3: it answers another prompt than the first row of its group"),
        ({"data.train_batch_size": 4}, "row 4: the file ends after 2 prompts, but data.train_batch_size=4"),
        ({"data.max_prompt_length": 2}, "row 3: the prompt has 3 tokens, and data.max_prompt_length=2"),
    ],
)
def test_settings_other_than_those_of_the_dump_are_named(replay, settings, says):
    with pytest.raises(DataError, match=says):
        replace(replay, settings=replaced(replay.settings, settings)).read(1)


def test_a_token_that_the_model_does_not_have_is_named(replay):
    with pytest.raises(DataError, match="row 3: prompt_ids must be token ids from 0 to 8"):
        replace(replay, num_tokens=9).read(1)


def test_samples_that_leave_a_rest_are_refused(tmp_path):
    dump_samples(tmp_path, 1, SAMPLES[:2] + SAMPLES[:1], "hash")
    with pytest.raises(DataError, match="the 3 rows of the file cannot be split into groups of 2"):
        replay_in(tmp_path, "train_only").read(1)


def test_without_scores_and_log_probs_a_dump_can_still_be_scored(tmp_path):
    bare = [replace(sample, score=None, rollout_log_probs=None) for sample in SAMPLES]
    dump_samples(tmp_path, 1, bare, "hash")
    replayed = replay_in(tmp_path, "score_only").read(1)
    assert replayed.results is None
    assert replayed.answers.generation.log_probs is None


def test_the_last_step_is_that_of_the_dump(replay):
    dump_samples(replay.folder, 7, SAMPLES, "hash")
    (replay.folder / "notes.jsonl").write_text("")
    assert replay.last_step(1) == 7
    with pytest.raises(DataError, match="there is no dump of step 8 or later"):
        replay.last_step(8)
    with pytest.raises(DataError, match=r"3\.jsonl: there is no such file, so step 3 cannot be replayed"):
        replay.read(3)


def test_a_dump_of_other_prompts_names_the_first_row_that_differs(replay):
    replayed = replay.read(1)
    own = replayed.prompts.prompt_ids
    check_same_prompts(replayed, StepPrompts([], own, 0, 0))
    with pytest.raises(DataError, match=r"1\.jsonl, row 3: it does not answer row 3"):
        check_same_prompts(replayed, StepPrompts([], [*own[:2], [1], [1]], 0, 0))
    with pytest.raises(DataError, match="the dump: it does not answer row 5"):
        check_same_prompts(replayed, StepPrompts([], [*own, [1]], 0, 0))


def test_the_dump_follows_the_key_that_writes_one(settled, tmp_path):
    key = "actor_rollout_ref.rollout.skip_dump_dir"
    assert dump_folder(settled()) == tmp_path / "run" / "rollouts"
    assert dump_folder(settled({"trainer.rollout_data_dir": str(tmp_path / "a")})) == tmp_path / "a"
    assert dump_folder(settled({"trainer.rollout_data_dir": str(tmp_path / "a"), key: str(tmp_path / "b")})) == tmp_path / "b"


def test_a_run_without_prompts_has_no_state():
    prompts = NoPrompts()
    prompts.give_back()
    prompts.close()
    assert (prompts.state_dict(), prompts.epoch) == ({}, 0)


@pytest.fixture
def forge(settled):
    return Forge(settled({"data.seed": 1, "actor_rollout_ref.rollout.calculate_log_probs": True}), build_tokenizer(), 50)


def test_forged_rows_have_the_largest_lengths_share_their_prompt_and_have_scores_that_differ(forge):
    data = forge.settings.data
    answers, results = forge.read(1).answers, forge.read(1).results
    assert {len(ids) for ids in answers.prompt_ids} == {data.max_prompt_length} == {12}
    assert {len(ids) for ids in answers.generation.response_ids} == {data.max_response_length} == {4}
    assert {len(row) for row in answers.generation.log_probs} == {4}
    assert {token for ids in (*answers.prompt_ids, *answers.generation.response_ids) for token in ids} <= set(range(50))
    assert len(answers.rows) == 8
    assert answers.prompt_ids[0] is answers.prompt_ids[1]
    assert answers.rows[0] is answers.rows[1]
    assert len({tuple(ids) for ids in answers.prompt_ids}) == 4
    assert len({tuple(ids) for ids in answers.generation.response_ids}) == 8
    assert len({result.score for result in results}) == 8
    assert all(0 <= result.score < 1 for result in results)


def test_a_forged_step_depends_on_seed_and_number_alone_and_has_log_probs_where_the_engine_gives_them(forge):
    assert forge.read(2) == forge.read(2) != forge.read(3)
    assert forge.read(2) != replace(forge, settings=replaced(forge.settings, {"data.seed": 2})).read(2)
    without = replaced(forge.settings, {"actor_rollout_ref.rollout.calculate_log_probs": False})
    assert replace(forge, settings=without).read(1).answers.generation.log_probs is None


def test_forged_scores_count_unless_a_model_scores(forge):
    assert forge.scored
    assert not replace(forge, settings=replaced(forge.settings, {"reward_model.enable": True})).scored


def test_a_recipe_finds_a_question_of_each_prompt_and_a_solution_in_forged_rows(forge):
    rows, word = forge.read(1).answers.rows, forge.text_of(1)
    assert {row.extra_info["question"].removesuffix(forge.text_of(6)) for row in rows} == {"0", "1", "2", "3"}
    assert {row.extra_info["solution"] for row in rows} == {row.ground_truth for row in rows} == {forge.text_of(3)}
    assert set(forge.read(1).answers.texts) == {forge.text_of(4)}
    assert word.strip()


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_a_forged_text_has_about_as_many_tokens_as_asked_for(forge, tokens):
    assert len(forge.tokenizer(forge.text_of(tokens), add_special_tokens=False)["input_ids"]) == pytest.approx(tokens, abs=4)
