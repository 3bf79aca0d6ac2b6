import gc

import pytest
import torch

from tests.memory.sharded import CPU, assert_equal_runs, fake_ranks, load, local, policy_of, save, share, three_steps, wide_model
from tests.ranks import run_ranks
from tests.tensors import Operations, whole_of
from tests.virtual_gpu.late_streams import late_streams
from verl_memopt.distributed.device import training_mesh
from verl_memopt.errors import ConfigError
from verl_memopt.memory.host_buffers import host_allocator, host_limits
from verl_memopt.memory.residency import CRITIC, POLICY, REFERENCE, OffloadedParams, Residency
from verl_memopt.memory.weight_buckets_torch import full_weights
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import DEVICE, HOST, ByteTracker


def home_of(policy):
    return OffloadedParams(POLICY, policy.model.parameters(), CPU)


def resting_run(folder, mesh, rank=0, world_size=1):
    policy = policy_of(folder, mesh, world_size=world_size)
    residency = Residency(CPU)
    residency.add(home_of(policy))

    def around(phase):
        residency.rest()
        return residency.phase(phase)

    return three_steps(policy, share(rank, world_size), around)


def both_runs(rank, folder, world_size):
    mesh = training_mesh("cpu", world_size, -1)
    return resting_run(folder, mesh, rank, world_size), three_steps(
        policy_of(folder, mesh, world_size=world_size), share(rank, world_size)
    )


def test_offloading_between_phases_changes_no_bit_of_three_steps(untied_folder, one_rank):
    assert_equal_runs(*both_runs(0, untied_folder, 1))


def test_offloading_changes_no_bit_at_two_ranks_and_saves_and_syncs_from_the_host(untied_folder, tmp_path):
    for answer in run_ranks(two_ranks, 2, untied_folder, tmp_path):
        assert answer == "equal"


def two_ranks(rank, folder, aside):
    assert_equal_runs(*both_runs(rank, folder, 2))
    mesh = training_mesh("cpu", 2, -1)
    policy, other = policy_of(folder, mesh, world_size=2), policy_of(folder, mesh, world_size=2)
    policy.update([share(rank, 2)], 0.9)
    expected = {name: whole_of(weight) for name, weight in policy.model.state_dict().items()}
    home = home_of(policy)
    home.to_host()
    with home.readable():
        save(policy, aside / "saved")
        for name, whole in full_weights(named_weights(policy.model), torch.float32, 1):
            assert torch.equal(whole, expected[f"lm.{name}"]), name
    load(other, aside / "saved")
    for name, weight in other.model.state_dict().items():
        assert torch.equal(whole_of(weight), expected[name]), name
    return "equal"


def test_twenty_cycles_return_the_same_bits_through_one_host_buffer(untied_folder, one_rank):
    policy = policy_of(untied_folder, one_rank)
    before = {name: local(p).clone() for name, p in policy.model.named_parameters()}
    home, held = home_of(policy), []
    assert home.to_device() == 0
    with ByteTracker() as tracker:
        for _ in range(20):
            assert home.to_host() == home.num_bytes
            assert home.to_host() == 0
            held.append((host_allocator().held_bytes, tracker.total(HOST)))
            assert home.to_device() == home.num_bytes
    assert len(set(held)) == 1
    assert tracker.peaks[HOST].bytes == home.num_bytes
    assert all(torch.equal(local(p), before[name]) for name, p in policy.model.named_parameters())


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bfloat16", 2)])
def test_a_shard_at_rest_costs_the_device_nothing_and_the_host_its_bytes(untied_folder, world_size, dtype, width):
    with fake_ranks(world_size) as mesh:
        policy = policy_of(untied_folder, mesh, {"model_dtype": dtype}, world_size)
        shard = sum(parameter.numel() for parameter in policy.model.parameters()) * width // world_size
        with ByteTracker() as tracker:
            tracker.mark("params", policy.model.parameters())
            home = home_of(policy)
            assert tracker.kinds(DEVICE) == {"params": shard}
            assert home.to_host() == shard
            assert (tracker.kinds(DEVICE), tracker.kinds(HOST)) == ({}, {"params": shard})
            tracker.enter("back")
            home.to_device()
            assert tracker.peaks[DEVICE].bytes == tracker.total(DEVICE) == shard
            assert tracker.peaks[HOST].bytes == shard


def test_a_state_dict_taken_earlier_keeps_no_device_byte_and_is_valid_again_afterwards(untied_folder, one_rank):
    policy = policy_of(untied_folder, one_rank)
    policy.compute_log_probs(share().batch, share().micro_batches, 0.9, False)
    with ByteTracker() as tracker:
        tracker.mark("params", policy.model.parameters())
        taken = policy.model.state_dict()
        before = {name: local(tensor).clone() for name, tensor in taken.items()}
        copies = sum(tensor.nbytes for tensor in before.values())
        home = home_of(policy)
        home.to_host()
        assert tracker.total(DEVICE) == copies
        home.to_device()
    assert all(torch.equal(local(tensor), before[name]) for name, tensor in taken.items())


def test_a_checkpoint_is_written_from_the_host_and_the_device_holds_nothing_for_it(untied_folder, one_rank, tmp_path):
    policy, other = policy_of(untied_folder, one_rank), policy_of(untied_folder, one_rank, {"seed": 1})
    policy.update([share()], 0.9)
    expected = {name: local(p).clone() for name, p in policy.model.named_parameters()}
    home = home_of(policy)
    home.to_host()
    with ByteTracker() as tracker, home.readable():
        save(policy, tmp_path, ["model"])
        assert tracker.peaks[DEVICE].kinds.get("params", 0) == 0
    assert all(local(p).untyped_storage().nbytes() == 0 for p in policy.model.parameters())
    load(other, tmp_path, ["model"])
    assert all(torch.equal(local(p), expected[name]) for name, p in other.model.named_parameters())


def test_a_frozen_model_is_copied_to_the_host_once_unless_it_is_told_to_have_changed(untied_folder, one_rank):
    policy = policy_of(untied_folder, one_rank)
    policy.model.requires_grad_(False)
    home = home_of(policy)
    home.to_host()
    home.to_device()
    weight = local(next(policy.model.parameters()))
    before = weight.clone()
    weight.zero_()
    home.to_host()
    home.to_device()
    assert torch.equal(weight, before), "it came back from the first copy"
    weight.zero_()
    home.changed()
    home.to_host()
    home.to_device()
    assert not weight.any()


def test_a_host_limit_that_is_too_low_leaves_the_parameters_where_they_are(untied_folder, one_rank):
    policy = policy_of(untied_folder, one_rank)
    before = {name: local(p).clone() for name, p in policy.model.named_parameters()}
    home = home_of(policy)
    with host_limits(home.num_bytes - 1 + host_allocator().held_bytes, None), pytest.raises(ConfigError, match="host_limit_gb"):
        home.to_host()
    assert home.on_device
    assert all(torch.equal(local(p), before[name]) for name, p in policy.model.named_parameters())


def test_a_return_that_fails_half_way_leaves_nothing_on_the_device():
    parameters = [torch.nn.Parameter(torch.ones(4), requires_grad=False) for _ in range(3)]
    home = OffloadedParams("broken", parameters, CPU, mapped=[torch.ones(4), torch.ones(9), torch.ones(4)])
    home.to_host()
    with pytest.raises(RuntimeError):
        home.to_device()
    assert not home.on_device
    assert [parameter.untyped_storage().nbytes() for parameter in parameters] == [0, 0, 0]


def test_tied_weights_leave_once(tiny_folder, one_rank):
    policy = policy_of(tiny_folder, one_rank)
    assert home_of(policy).num_bytes == sum(p.numel() for p in policy.model.parameters()) * 4


def test_a_shard_that_is_padded_returns_whole(tmp_path):
    folder = wide_model(tmp_path, vocab_size=321)
    with fake_ranks(4) as mesh:
        policy = policy_of(folder, mesh, world_size=4)
        before = {name: local(p).clone() for name, p in policy.model.named_parameters()}
        home = home_of(policy)
        home.to_host()
        with home.readable():
            assert all(torch.equal(local(p), before[name]) for name, p in policy.model.named_parameters())
        home.to_device()
        assert all(torch.equal(local(p), before[name]) for name, p in policy.model.named_parameters())


def test_parameters_that_are_parts_of_one_storage_are_read_from_their_places_on_the_host():
    storage = torch.arange(10.0)
    parts = [torch.nn.Parameter(storage[4:8]), torch.nn.Parameter(storage[1:3])]
    home = OffloadedParams("parts", [torch.nn.Parameter(torch.ones(3)), *parts], CPU)
    assert home.num_bytes == 13 * 4
    home.to_host()
    with home.readable():
        assert [part.tolist() for part in parts] == [[4.0, 5.0, 6.0, 7.0], [1.0, 2.0]]
    home.to_device()
    assert [part.tolist() for part in parts] == [[4.0, 5.0, 6.0, 7.0], [1.0, 2.0]]


def at_copies(note):
    """Watch copies: ``note`` is called with whether each makes the host wait."""

    def look(func, args, kwargs):
        if func is torch.ops.aten.copy_.default:
            note(not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))

    return Operations(look)


def test_the_copies_of_a_move_do_not_wait_for_one_another():
    home = OffloadedParams("two", [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))], CPU)
    waits = []
    with at_copies(waits.append):
        home.to_host()
        home.to_device()
    assert waits == [False] * 4


def test_what_has_not_changed_is_copied_to_the_host_once_and_what_an_update_changes_again():
    trained, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    residency = Residency(CPU)
    residency.add(OffloadedParams(POLICY, [trained, frozen], CPU))
    copied, waits = [], []
    for phase in ("old_log_prob", "gen", "old_log_prob", "ref", "update_actor", "gen", "update_actor", "update_weights"):
        waits.clear()
        with at_copies(waits.append), residency.phase(phase):
            if phase == "update_actor":
                trained.data += 1
            if phase == "update_weights":
                residency.copy_out()
            copied.append(len(waits))
    waits.clear()
    with at_copies(waits.append), residency.phase("gen"):
        pass
    # Two out, once; two back each time; the trained one out after each update, in the sync that reads it where there is one.
    assert (copied, waits) == ([0, 2, 2, 0, 2, 1, 2, 1], [])
    with residency.phase("update_weights"):
        assert (trained.tolist(), frozen.tolist()) == ([3.0] * 3, [1.0] * 2)


MIB = 2**20


def of_units(name, sizes):
    """Gives a model of one matrix a unit, MIB each, in its place of the residency table."""
    units = torch.nn.ModuleList(torch.nn.Linear(2**18 * size, 1, bias=False) for size in sizes)
    model = torch.nn.Sequential(*units)
    return model, OffloadedParams(name, model.parameters(), CPU, None, [model, *model])


def test_each_unit_that_comes_takes_the_room_of_those_that_leave(caplog):
    (policy, at_home), (reference, other) = of_units(POLICY, [1, 1, 1]), of_units(REFERENCE, [1, 1])
    residency = Residency(CPU)
    residency.add(at_home)
    residency.add(other)
    assert residency.rest() == 5 * MIB
    assert residency.rest() == 0
    with residency.phase("ref"):
        assert not at_home.on_device
    with residency.phase("update_actor"):
        pass
    there, found = [*policy.parameters(), *reference.parameters()], []  # MiB on the device at each copy
    moved = at_copies(lambda _: found.append(sum(each.untyped_storage().nbytes() for each in there) / MIB))
    with caplog.at_level("INFO"), moved, residency.phase("ref"):
        assert sum(each.untyped_storage().nbytes() for each in reference.parameters()) == 2 * MIB
    # Three copies to the host, for an update changes what is there; then a unit goes and a unit comes, twice.
    assert found == [3, 3, 3, 3, 3]
    with moved, residency.phase("update_actor"):
        pass
    assert found[5:] == [1, 2, 3]  # a reference that has not changed leaves before the policy comes
    assert at_home.num_bytes == residency.rest() == 3 * MIB


def test_the_log_says_what_an_update_moved_off_the_device(caplog):
    residency = Residency(CPU)
    for name, sizes in ((POLICY, [1, 1, 1]), (CRITIC, [1, 1])):
        residency.add(of_units(name, sizes)[1])
    residency.rest()
    with caplog.at_level("INFO"):
        for phase in ("update_critic", "update_actor"):
            with residency.phase(phase):
                pass
    assert [record.message for record in caplog.records] == [
        "update_critic: 2.0 MiB to the device, 0.0 MiB off it, from now on once per step",
        "update_actor: 3.0 MiB to the device, 2.0 MiB off it, from now on once per step",
    ]


def test_a_phase_that_does_not_begin_with_a_forward_has_all_parameters_at_once():
    model, ids = Blocks(), torch.arange(6)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    with late_streams():
        home = OffloadedParams(POLICY, model.parameters(), CPU, None, [model, *model.blocks, model.head])
        residency = Residency(CPU)
        residency.add(home)
        for phase, is_there in (("old_log_prob", False), ("update_weights", True), ("update_actor", False)):
            residency.rest()
            with residency.phase(phase):
                same = all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))
                assert same == is_there
                model(ids)
                assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected, strict=True))


class Blocks(torch.nn.Module):
    """A model whose first matrix is its last one too, with a norm that no block has."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(6, 4), torch.nn.LayerNorm(4)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3))
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_forward_computes_unit_by_unit_what_it_computes_at_once_however_late_copies_are(ahead):
    torch.manual_seed(0)
    model, ids = Blocks(), torch.arange(6)
    expected = model(ids)
    with late_streams() as streams:
        home = OffloadedParams("blocks", model.parameters(), CPU, None, [model, *model.blocks, model.head], ahead)
        for _ in range(2):
            home.to_host()
            home.to_device()
            there = []
            hooks = [
                block.register_forward_hook(lambda *_, there=there: there.append(len(home._coming))) for block in model.blocks
            ]
            assert torch.equal(model(ids), expected)
            # The head's matrix comes first, as the embedding.
            assert there == [max(3 - ahead - block, 0) for block in (1, 2, 3)]
            for hook in hooks:
                hook.remove()
        assert not home._coming
        assert streams.copies == 2 * len(home._places) + len(home._places)
    home.to_host()
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())


def test_a_model_that_is_dropped_is_freed_with_its_place_on_the_host():
    held, model = host_allocator().held_bytes, Blocks()
    home = OffloadedParams("blocks", model.parameters(), CPU, None, [model, *model.blocks, model.head])
    home.to_host()
    gc.disable()
    try:
        del home
        assert host_allocator().held_bytes == held
    finally:
        gc.enable()
    assert model is not None


def test_parameters_of_odd_sizes_and_several_dtypes_are_read_where_they_rest():
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32)
    parameters = [torch.nn.Parameter(torch.arange(1, 4).to(dtype)) for dtype in dtypes]
    home = OffloadedParams("mixed", parameters, CPU)
    home.to_host()
    with home.readable():
        assert all(parameter.tolist() == [1, 2, 3] for parameter in parameters)
    home.to_device()
    assert all(parameter.tolist() == [1, 2, 3] for parameter in parameters)


def two_in_one_place():
    """Returns a frozen parameter and the homes of two models that use its storage, with the values 1 and 2."""
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    one, two = (OffloadedParams(name, [parameter], CPU) for name in ("one", "two"))
    one.to_host()
    one.to_device()
    parameter.fill_(2)
    two.to_host()
    one.on_device = False
    return parameter, one, two


def test_a_model_takes_over_the_storages_of_another_in_place():
    parameter, one, two = two_in_one_place()
    two.to_device()
    address = parameter.data_ptr()
    assert parameter.tolist() == [2, 2, 2]
    assert one.take_over(two) == 12
    assert (parameter.tolist(), parameter.data_ptr(), one.on_device, two.on_device) == ([1, 1, 1], address, True, False)
    two.take_over(one)
    assert (parameter.tolist(), parameter.data_ptr(), one.on_device, two.on_device) == ([2, 2, 2], address, False, True)
    assert (two.to_host(), parameter.untyped_storage().nbytes()) == (12, 0)


def test_values_that_changed_on_the_device_reach_the_host_before_they_are_copied_over():
    parameter, one, two = two_in_one_place()
    two.to_device()
    parameter.fill_(3)
    two.changed()
    one.take_over(two)
    assert parameter.tolist() == [1, 1, 1]
    two.take_over(one)
    assert parameter.tolist() == [3, 3, 3]


def test_a_copy_that_fails_leaves_both_models_on_the_host():
    parameter, one, two = two_in_one_place()
    two.to_device()
    place = next(iter(one._places.values()))
    whole, place.slot = place.slot, torch.ones(5, dtype=torch.uint8)
    place.flat = place.flat[:4]  # 5 bytes do not fit
    with pytest.raises(RuntimeError):
        one.take_over(two)
    assert (one.on_device, two.on_device, parameter.untyped_storage().nbytes()) == (False, False, 0)
    assert whole.numel() == 12
    two.to_device()
    assert parameter.tolist() == [2, 2, 2]
