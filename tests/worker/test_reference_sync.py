import pytest
import torch

from tests.ranks import run_ranks
from tests.tensors import whole_of
from tests.worker.test_policy import batch
from tests.worker.test_worker import AR, call, mini_batch, place, plan_of, same, weights
from verl_memopt.algorithms.rows import GlobalCounts
from verl_memopt.distributed.device import leave_process_group
from verl_memopt.distributed.file_records import record_folder
from verl_memopt.errors import CheckpointError, ConfigError
from verl_memopt.model.tiny import TinyShape, make_tiny_model
from verl_memopt.model.weights import named_weights
from verl_memopt.worker.trained_model import MiniBatch
from verl_memopt.worker.worker import Worker

FOLLOWS = {f"{AR}.actor.use_kl_loss": True, f"{AR}.ref.sync_every_steps": 1, f"{AR}.ref.sync_mixup_alpha": 0.7}
PLACES = {
    "both on the device": {},
    "the reference rests": {f"{AR}.ref.fsdp_config.param_offload": True},
    "the policy rests": {f"{AR}.actor.fsdp_config.param_offload": True},
    "both rest": {f"{AR}.{role}.fsdp_config.param_offload": True for role in ("actor", "ref")},
    "the reference streams": {f"{AR}.ref.fsdp_config.param_offload": "stream", f"{AR}.actor.fsdp_config.param_offload": True},
    "fsdp offloads the reference": {f"{AR}.ref.fsdp_config.offload_policy": True},
    "fsdp offloads both": {f"{AR}.{role}.fsdp_config.offload_policy": True for role in ("actor", "ref")},
}


def follows(folder, more=None):
    return plan_of(folder, FOLLOWS | (more or {}), reference_folder=str(folder))


def reference_weights(worker):
    """Gives the whole weights of the reference, brought to the device as its pass does."""
    with worker.residency.phase("ref"):
        return {name: whole_of(parameter).detach().clone() for name, parameter in named_weights(worker.reference)}


def policy_weights(worker):
    with worker.residency.phase("update_actor"):
        return weights(worker)


def sync(worker):
    return worker.call("sync_ref", True, "sync_reference").memory


@pytest.fixture
def following(made, tiny_folder):
    """Builds workers whose reference follows the policy, one after another."""

    def build(more=None, folder=tiny_folder):
        return made(FOLLOWS | (more or {}), folder, reference_folder=str(folder))

    return build


@pytest.mark.parametrize("where", PLACES)
def test_the_reference_is_the_moving_average_to_the_bit_wherever_the_two_rest(following, where):
    worker = following(PLACES[where])
    before = reference_weights(worker)
    for _ in range(2):
        call(worker, "update_actor", [mini_batch()])
        sync(worker)
        policy = policy_weights(worker)
        expected = {name: weight.mul(1 - 0.7).add(policy[name], alpha=0.7) for name, weight in before.items()}
        before = reference_weights(worker)
        assert same(before, expected)
        assert not same(before, policy)


@pytest.mark.parametrize("where", ["both rest", "the reference streams"])
def test_the_next_reference_pass_reads_the_new_weights(following, where):
    worker = following(PLACES[where])
    first = call(worker, "ref_log_probs", batch(rows=2), [[0, 1]]).log_probs
    call(worker, "update_actor", [mini_batch()])
    again = call(worker, "ref_log_probs", batch(rows=2), [[0, 1]]).log_probs
    assert torch.equal(again, first)
    sync(worker)
    policy = call(worker, "old_log_probs", batch(rows=2), [[0, 1]], False).log_probs
    moved = call(worker, "ref_log_probs", batch(rows=2), [[0, 1]]).log_probs
    assert not torch.equal(moved, first)
    assert (moved - policy).abs().sum() < (first - policy).abs().sum()


@pytest.mark.parametrize("where", ["both rest", "the reference streams"])
def test_a_resting_reference_follows_without_a_byte_on_the_device(following, where):
    worker = following(PLACES[where])
    call(worker, "update_actor", [mini_batch()])
    memory = sync(worker)
    norm = worker.reference.decoder.norm.weight.nbytes  # the one weight of a reference that streams that stays
    assert memory.kinds.get("params", 0) == (norm if where == "the reference streams" else 0)
    assert memory.kinds.get("moving average", 0) == 0
    assert not worker.residency.find("reference params").on_device


@pytest.mark.parametrize("where", ["the reference rests", "the policy rests", "both on the device"])
def test_what_stays_on_the_device_is_joined_by_no_copy(following, where):
    worker = following(PLACES[where])
    call(worker, "update_actor", [mini_batch()])
    model = sum(parameter.nbytes for parameter in worker.reference.parameters())
    memory = sync(worker)
    assert memory.kind_peaks.get("moving average", 0) == 0
    assert memory.kind_peaks["params"] == (2 * model if where == "both on the device" else model)


def test_twenty_moves_allocate_no_further_host_memory(following):
    worker = following(PLACES["both rest"])
    held = [sync(worker).peak_allocated_bytes for _ in range(20)]
    assert len(set(held)) == 1


def two_ranks(rank, folder, out):
    worker = Worker(follows(folder, PLACES["both rest"]), place(rank, 2))
    whole = batch(rows=4)
    counts = GlobalCounts(float(whole.responses.lengths.sum()), 4.0)
    mini = MiniBatch(whole.select([2 * rank, 2 * rank + 1]), [[0, 1]], counts)
    worker.call("update_actor", False, "update_actor", [mini])
    sync(worker)
    policy, reference = policy_weights(worker), reference_weights(worker)
    worker.call("save_checkpoint", False, "save_reference", str(out / "two"), [])
    return policy, reference


def test_the_shards_of_two_ranks_make_the_reference_of_one(following, tiny_folder, tmp_path):
    worker = following()
    before = reference_weights(worker)
    call(worker, "update_actor", [mini_batch()])
    sync(worker)
    of_one = reference_weights(worker)
    for policy, reference in run_ranks(two_ranks, 2, tiny_folder, tmp_path):
        expected = {name: weight.mul(1 - 0.7).add(policy[name], alpha=0.7) for name, weight in before.items()}
        assert same(reference, expected)
        for name, weight in reference.items():
            torch.testing.assert_close(weight, of_one[name], rtol=0, atol=2e-5)
    back = following()
    back.call("load_checkpoint", False, "load_reference", str(tmp_path / "two"), [])
    assert same(reference_weights(back), expected)


@pytest.mark.parametrize("where", ["both on the device", "both rest", "the reference streams", "fsdp offloads both"])
def test_a_saved_reference_comes_back_to_the_bit(following, tmp_path, where):
    worker = following(PLACES[where])
    call(worker, "update_actor", [mini_batch()])
    sync(worker)
    records = worker.call("save_checkpoint", False, "save_reference", str(tmp_path / "ref"), []).value
    assert records == record_folder(tmp_path / "ref", tmp_path / "ref")
    expected = reference_weights(worker)
    other = following(PLACES[where])
    assert not same(reference_weights(other), expected)
    other.call("load_checkpoint", False, "load_reference", str(tmp_path / "ref"), [])
    assert same(reference_weights(other), expected)


def test_a_damaged_reference_is_named(following, tmp_path):
    worker = following()
    worker.call("save_checkpoint", False, "save_reference", str(tmp_path / "ref"), [])
    for path in (tmp_path / "ref" / "dcp").glob("*.distcp"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"ref: the weights could not be read"):
        worker.call("load_checkpoint", False, "load_reference", str(tmp_path / "ref"), [])


def test_a_reference_of_another_shape_is_refused(tiny_folder, tmp_path):
    leave_process_group()
    other = make_tiny_model(tmp_path / "wide", TinyShape(intermediate_size=96), seed=1)
    with pytest.raises(ConfigError, match=r"ref\.model\.path=.*wide: .* and a reference that follows the policy needs the same"):
        Worker(plan_of(tiny_folder, FOLLOWS, reference_folder=str(other)), place())
    leave_process_group()
