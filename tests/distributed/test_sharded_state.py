import pytest
import torch

from tests.distributed.test_sharding import CPU, sharded
from tests.ranks import run_ranks
from tests.tensors import like, whole_of
from verl_memopt.config.schema import Optim
from verl_memopt.distributed.process_group import training_mesh
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.errors import CheckpointError
from verl_memopt.models.build import named_weights
from verl_memopt.workers.schedule import build_optimizer, build_schedule

ALL = ["model", "optimizer", "extra"]


def parts(folder, mesh):
    policy = sharded(folder, mesh, dtype="fp32")
    optim = Optim(lr=0.01, lr_scheduler_type="cosine")
    optimizer = build_optimizer(policy.parameters(), optim)
    return policy, optimizer, build_schedule(optimizer, optim, 10)


def step(policy, optimizer, schedule, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        full = torch.randn(parameter.shape, generator=generator)
        parameter.grad = like(parameter, full)
    optimizer.step()
    schedule.step()


def full(policy):
    return {name: whole_of(parameter).detach().clone() for name, parameter in named_weights(policy)}


def test_a_loaded_run_takes_the_same_next_step_bit_for_bit(tiny_folder, one_rank, tmp_path):
    one = parts(tiny_folder, one_rank)
    step(*one, seed=1)
    save_training_state(tmp_path, *one, CPU, ALL)
    step(*one, seed=2)
    other = parts(tiny_folder, one_rank)
    load_training_state(tmp_path, *other, CPU, ALL)
    assert other[2].get_last_lr()[0] == pytest.approx(0.01 * 0.9755282581475768, rel=1e-12)  # cosine at step 1 of 10
    step(*other, seed=2)
    expected = full(one[0])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full(other[0]).items())


def test_the_generator_continues_where_it_was(tiny_folder, one_rank, tmp_path):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ALL)
    expected = torch.rand(3)
    torch.manual_seed(99)
    load_training_state(tmp_path, *run, CPU, ALL)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_chosen_parts_are_read(tiny_folder, one_rank, tmp_path):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ALL)
    saved = full(run[0])
    step(*run, seed=3)
    load_training_state(tmp_path, *run, CPU, ["model"])
    assert all(torch.equal(tensor, saved[name]) for name, tensor in full(run[0]).items())
    assert run[2].last_epoch == 1


def test_a_torn_file_is_an_error_that_names_the_folder(tiny_folder, one_rank, tmp_path):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ALL)
    shard = next((tmp_path / "dcp").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="could not be read"):
        load_training_state(tmp_path, *run, CPU, ALL)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tiny_folder, one_rank, tmp_path):
    (tmp_path / "dcp").write_text("a file where a folder must be")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_training_state(tmp_path, *parts(tiny_folder, one_rank), CPU, ALL)


def two_ranks(rank, folder, out):
    run = parts(folder, training_mesh("cpu", 2, -1))
    load_training_state(out / "one", *run, CPU, ALL)
    loaded = full(run[0])
    save_training_state(out / "two", *run, CPU, ALL)
    return {name: tensor.numpy() for name, tensor in loaded.items()}


def test_another_number_of_ranks_loads_the_same_weights(tiny_folder, one_rank, tmp_path):
    one = parts(tiny_folder, one_rank)
    step(*one, seed=1)
    save_training_state(tmp_path / "one", *one, CPU, ALL)
    expected = full(one[0])
    for loaded in run_ranks(two_ranks, 2, tiny_folder, tmp_path):
        assert all((expected[name].numpy() == array).all() for name, array in loaded.items())
    back = parts(tiny_folder, one_rank)
    load_training_state(tmp_path / "two", *back, CPU, ALL)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full(back[0]).items())
