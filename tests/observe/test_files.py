from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_memopt.errors import DataError, UserError
from verl_memopt.observe.files import append_rows, keep_rows, read_rows, replace_text
from verl_memopt.observe.samples import SCHEMA, Sample, dump_samples, dumped_steps, read_samples


def test_a_line_that_was_cut_short_is_left_out_and_whole_ones_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_rows(path, [{"step": 1}, {"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_keeping_rows_drops_the_others_and_leaves_the_kept_bytes_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1,  "spaced": 1}\n{"step": 2}\n{"step": 3')
    keep_rows(path, lambda row: row["step"] <= 1)
    assert path.read_text() == '{"step": 1,  "spaced": 1}\n'
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_damaged_line_is_named_with_its_file_and_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not JSON"):
        read_rows(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected an object"):
        read_rows(path)


def test_text_with_line_separators_inside_stays_one_row(tmp_path):
    path = tmp_path / "generations.jsonl"
    row = {"output": "a\u2028b\nc\x0b\x1c\x85d"}
    append_rows(path, [row])
    assert read_rows(path) == [row]


def test_numbers_of_numpy_and_torch_are_written_as_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_rows(path, [{"a": np.float32(0.5), "b": torch.tensor(2), "c": np.array([1, 2]), "d": float("nan")}])
    row = read_rows(path)[0]
    assert (row["a"], row["b"], row["c"]) == (0.5, 2, [1, 2])
    assert row["d"] != row["d"]


def test_a_replacement_that_fails_leaves_the_old_text_and_one_that_the_disk_refuses_is_named(tmp_path):
    (tmp_path / "folder").mkdir()  # no file can take the place of a folder
    with pytest.raises(UserError, match=r"folder: cannot be written \(Is a directory; \d+ MiB free\)"):
        replace_text(tmp_path / "folder", "new")
    (tmp_path / "folder").rmdir()
    path = tmp_path / "summary.json"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"


SAMPLE = Sample("u1", "toy", "1+1=", "2", "2", 1.0, [5, 6], [7], {"acc": 1, "score": "own"}, "stop", [-0.5], {"level": 3})


def test_a_dump_row_holds_what_a_replay_needs_and_every_reward_key(tmp_path):
    path = dump_samples(tmp_path / "rollouts", 3, [SAMPLE])
    assert path.name == "3.jsonl"
    assert read_rows(path) == [
        {
            "input": "1+1=",
            "output": "2",
            "gts": "2",
            "score": 1.0,
            "step": 3,
            "uid": "u1",
            "data_source": "toy",
            "prompt_ids": [5, 6],
            "response_ids": [7],
            "finish_reason": "stop",
            "rollout_log_probs": [-0.5],
            "failed": False,
            "extra_info": {"level": 3},
            "messages": None,
            "turns": None,
            "conversation": None,
            "ended": None,
            "schema": SCHEMA,
            "acc": 1,
            "reward_extra/score": "own",
            "tokenizer": "",
            "row": 1,
            "rows": 1,
        }
    ]


def test_a_sample_is_read_as_it_was_written(tmp_path):
    others = replace(SAMPLE, score=None, rollout_log_probs=None, extra={"row": 3, "tokenizer": "own", "input": 1})
    dump_samples(tmp_path, 3, [SAMPLE, others], "hash")
    assert read_samples(tmp_path, 3, "hash", 10) == [SAMPLE, others]
    assert [read.address for read in read_samples(tmp_path, 3, "hash", 10)] == [
        f"{tmp_path}/3.jsonl, row 1",
        f"{tmp_path}/3.jsonl, row 2",
    ]


def test_the_steps_of_a_dump_are_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 9, 2, 2):
        assert len(read_rows(dump_samples(tmp_path, step, [SAMPLE]))) == 1, "a step again replaces it"
    (tmp_path / "other.jsonl").write_text("")
    assert dumped_steps(tmp_path) == [2, 9, 10]
