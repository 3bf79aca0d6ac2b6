import json

import torch

from benchmarks.update_guard.__main__ import Unguarded, main, mini_batch, policy_of
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.worker.trained_model import TrainedModel

SMALL = ["--layers", "1", "--hidden", "64", "--vocabulary", "320", "--rows", "4", "--tokens", "8", "--steps", "2"]


def test_both_sides_are_measured_in_one_process_and_their_ratio_is_given(capsys):
    assert main(SMALL) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratio"] == found["guarded_seconds"] / found["unguarded_seconds"] > 0


def test_both_sides_do_the_same_update(one_rank, tmp_path):
    folder = make_tiny_model(tmp_path / "model", TinyShape(num_layers=1), seed=0)
    sides = [policy_of(kind, folder, torch.device("cpu")) for kind in (TrainedModel, Unguarded)]
    found = [side.update([mini_batch(4, 8, 320, 2)], 1.0) for side in sides]
    assert found[0] == found[1]
    for one, other in zip(*(side.model.parameters() for side in sides), strict=True):
        assert torch.equal(one, other)
