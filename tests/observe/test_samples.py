"""Dump rows."""

from dataclasses import replace

from verl_memopt.observe.files import read_rows
from verl_memopt.observe.samples import SCHEMA, Sample, dump_samples, dumped_steps, read_samples

SAMPLE = Sample("u1", "toy", "1+1=", "2", "2", 1.0, [5, 6], [7], {"acc": 1, "score": "own"}, "stop", [-0.5], {"level": 3})


def test_a_dump_row_holds_what_a_replay_needs_and_every_reward_key(tmp_path):
    path = dump_samples(tmp_path / "rollouts", 3, [SAMPLE])
    assert path.name == "3.jsonl"
    assert read_rows(path) == [
        {
            "input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 3, "uid": "u1", "data_source": "toy",
            "prompt_ids": [5, 6], "response_ids": [7], "finish_reason": "stop", "rollout_log_probs": [-0.5], "failed": False,
            "extra_info": {"level": 3}, "messages": None, "schema": SCHEMA, "acc": 1, "reward_extra/score": "own",
            "tokenizer": "", "row": 1, "rows": 1,
        }
    ]  # fmt: skip


def test_a_sample_is_read_as_it_was_written(tmp_path):
    others = replace(SAMPLE, score=None, rollout_log_probs=None, extra={"row": 3, "tokenizer": "own", "input": 1})
    dump_samples(tmp_path, 3, [SAMPLE, others], "hash")
    assert [read.sample for read in read_samples(tmp_path, 3, "hash", 10)] == [SAMPLE, others]
    assert [read.address for read in read_samples(tmp_path, 3, "hash", 10)] == [
        f"{tmp_path}/3.jsonl, row 1",
        f"{tmp_path}/3.jsonl, row 2",
    ]


def test_the_steps_of_a_dump_are_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 9, 2):
        dump_samples(tmp_path, step, [SAMPLE])
    (tmp_path / "other.jsonl").write_text("")
    assert dumped_steps(tmp_path) == [2, 9, 10]


def test_dumping_a_step_again_replaces_it(tmp_path):
    dump_samples(tmp_path, 1, [SAMPLE, SAMPLE])
    assert len(read_rows(dump_samples(tmp_path, 1, [SAMPLE]))) == 1
