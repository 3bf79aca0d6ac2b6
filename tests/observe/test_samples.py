"""Dump rows."""

from pathlib import Path

from verl_memopt.observe.files import read_rows
from verl_memopt.observe.samples import SCHEMA, Sample, dump_samples

SAMPLE = Sample("u1", "toy", "1+1=", "2", "2", 1.0, [5, 6], [7], {"acc": 1, "score": "own"}, "stop", [-0.5], {"level": 3})


def test_a_dump_row_holds_what_a_replay_needs_and_every_reward_key(tmp_path: Path) -> None:
    path = dump_samples(tmp_path / "rollouts", 3, [SAMPLE])
    assert path.name == "3.jsonl"
    assert read_rows(path) == [
        {
            "input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 3, "uid": "u1", "data_source": "toy",
            "prompt_ids": [5, 6], "response_ids": [7], "schema": SCHEMA, "acc": 1, "reward_extra/score": "own",
        }
    ]  # fmt: skip


def test_dumping_a_step_again_replaces_it(tmp_path: Path) -> None:
    dump_samples(tmp_path, 1, [SAMPLE, SAMPLE])
    assert len(read_rows(dump_samples(tmp_path, 1, [SAMPLE]))) == 1
