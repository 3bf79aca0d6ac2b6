import copy
import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from tests.distributed.test_sharding import CPU, sharded
from tests.ranks import run_ranks
from tests.tensors import like, whole_of
from verl_memopt.config.schema import Optim
from verl_memopt.distributed import sharded_state
from verl_memopt.distributed.device import training_mesh
from verl_memopt.distributed.file_records import record_folder
from verl_memopt.distributed.sharded_state import (
    HashingFileSystem,
    StoredTensors,
    check_index,
    detached,
    load_training_state,
    load_weights,
    save_training_state,
    save_weights,
)
from verl_memopt.errors import CheckpointError
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import ByteTracker
from verl_memopt.worker.optimizer import build_optimizer, build_schedule

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


def test_weights_that_no_optimizer_trains_come_back_bit_for_bit(tiny_folder, one_rank, tmp_path):
    policy = sharded(tiny_folder, one_rank, dtype="fp32").requires_grad_(False)
    saved = full(policy)
    records = save_weights(tmp_path, policy)
    assert records == record_folder(tmp_path, tmp_path)
    assert records
    for parameter in policy.parameters():
        parameter.zero_()
    load_weights(tmp_path, policy)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in full(policy).items())


class Apart:
    """fp32 masters that lie apart from a model's bfloat16 parameters: twice their values, or zeros until they are set."""

    def __init__(self, policy, factor):
        self.of = {id(each): factor * local_part(each).float() for each in policy.parameters()}

    def master(self, parameter, on_host=False):
        assert on_host
        values = self.of[id(parameter)]
        return (
            DTensor.from_local(values, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else values
        )

    def set_master(self, parameter, values, first=0):
        self.of[id(parameter)].view(-1)[first : first + values.numel()] = values.view(-1)


def local_part(parameter):
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


@pytest.mark.parametrize("is_sharded", [True, False])
def test_masters_that_lie_apart_are_saved_for_the_parameters_and_come_back(tiny_folder, one_rank, tmp_path, is_sharded):
    def run(factor):
        policy = sharded(tiny_folder, one_rank, dtype="fp32", offload_policy=is_sharded).to(torch.bfloat16)
        assert is_sharded == any(isinstance(each, DTensor) for each in policy.parameters())
        optimizer = build_optimizer(policy.parameters(), Optim())
        return (policy, optimizer, build_schedule(optimizer, Optim(), 10)), Apart(policy, factor)

    saved, masters = run(2.0)
    save_training_state(tmp_path, *saved, CPU, ALL, masters)
    stored = StoredTensors(tmp_path)
    for name, parameter in saved[0].named_parameters():
        read = stored.read(name)
        assert read.dtype == torch.float32
        assert torch.equal(read, masters.of[id(parameter)])
    loaded, found = run(0.0)
    load_training_state(tmp_path, *loaded, CPU, ALL, found)
    for one, other in zip(saved[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(masters.of[id(one)], found.of[id(other)])


def test_a_master_that_comes_in_parts_lands_at_its_rows():
    weights = {"matrix": torch.nn.Parameter(torch.zeros(5, 2, 3)), "vector": torch.nn.Parameter(torch.zeros(6))}
    weights["number"] = torch.nn.Parameter(torch.zeros(()))
    policy = torch.nn.ParameterList(weights.values())
    masters = Apart(policy, 0.0)
    planner = sharded_state._LoadedMasters(weights, masters)
    for name, offsets, values in (
        ("matrix", (2, 0, 0), torch.ones(3, 2, 3)), ("vector", (4,), torch.ones(2)), ("number", (), torch.ones(())),
    ):  # fmt: skip
        index, offsets = MetadataIndex(name), torch.Size(offsets)
        item = ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, values.shape)
        room = planner.resolve_tensor(item)
        assert (room.dtype, room.shape) == (torch.float32, values.shape)
        planner.commit_tensor(item, values)
    found = [masters.of[id(weight)].tolist() for weight in policy]
    assert found == [[[[0.0] * 3] * 2] * 2 + [[[1.0] * 3] * 2] * 3, [0.0] * 4 + [1.0] * 2, 1.0]


def test_a_detached_parameter_has_the_same_shard_outside_of_autograd(tiny_folder, one_rank):
    for parameter in sharded(tiny_folder, one_rank, offload_policy=True).parameters():
        found = detached(parameter)
        assert not found.requires_grad
        assert (found.shape, found.placements, found.device_mesh) == (
            parameter.shape,
            parameter.placements,
            parameter.device_mesh,
        )
        assert found.to_local().data_ptr() == parameter.to_local().data_ptr()


def test_parameters_of_another_device_whose_shards_rest_on_the_host_are_written_from_there(tiny_folder, one_rank, tmp_path):
    policy = sharded(tiny_folder, one_rank, offload_policy=True)
    expected, at_rest = full(policy), {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in at_rest:
                shard = parameter.to_local().detach()
                wrapper = DTensor(torch.empty_like(shard, device="meta"), parameter._spec, requires_grad=False)
                at_rest[parameter] = torch.nn.Parameter(wrapper)
                at_rest[parameter]._local_tensor = shard
            module._parameters[name] = at_rest[parameter]
    there = dict(policy.named_parameters(remove_duplicate=False))
    assert {each.device.type for each in there.values()} == {"meta"}
    save_weights(tmp_path, policy)
    after = dict(policy.named_parameters(remove_duplicate=False))
    assert there.keys() == after.keys()
    assert all(after[name] is each for name, each in there.items())
    other = sharded(tiny_folder, one_rank, dtype="fp32")
    for parameter in other.parameters():
        parameter.data.zero_()
    load_weights(tmp_path, other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in full(other).items())


def test_one_process_reads_each_saved_tensor_alone_in_its_dtype(tiny_folder, one_rank, tmp_path, recwarn):
    run = parts(tiny_folder, one_rank)
    run[0].to(torch.bfloat16)
    save_training_state(tmp_path, *run, CPU, ALL)
    stored, saved = StoredTensors(tmp_path), {name: whole_of(each).detach() for name, each in run[0].named_parameters()}
    assert stored.names.keys() >= saved.keys()
    for name, tensor in saved.items():
        read = stored.read(name)
        assert read.dtype == torch.bfloat16
        assert torch.equal(read, tensor)
    assert not [warned for warned in recwarn if "distributed is disabled" in str(warned.message)]
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: the model could not be read: .*__0_0.distcp"):
        stored.read(next(iter(saved)))


def test_a_weight_that_is_a_part_of_a_larger_one_is_written_without_the_rest(one_rank, tmp_path):
    whole = torch.arange(2.0**16)
    model = torch.nn.ParameterList([torch.nn.Parameter(whole[:64], requires_grad=False)])
    (record,) = [each for name, each in save_weights(tmp_path, model).items() if name.endswith(".distcp")]
    assert record.size < 4096
    whole.zero_()
    load_weights(tmp_path, model)
    assert torch.equal(whole[:66], torch.tensor([*range(64), 0, 0]).float())


def test_weights_that_cannot_be_written_or_read_are_errors_that_name_the_folder(tiny_folder, one_rank, tmp_path):
    policy = sharded(tiny_folder, one_rank, dtype="fp32")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/none: the weights could not be read: \w+Error: .*none"):
        load_weights(tmp_path / "none", policy)
    (tmp_path / "dcp").write_text("a file where a folder must be")
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: the weights could not be written: \w+Error: .*dcp"):
        save_weights(tmp_path, policy)


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


def test_a_collective_error_is_told_as_the_errors_of_its_ranks():
    failures = {0: (OSError("full"), None), 1: (ValueError("bad"), None), 2: (OSError("full"), None)}
    assert sharded_state._root(CheckpointException("save", failures)) == "OSError: full; ValueError: bad"
    assert sharded_state._root(EOFError("cut")) == "EOFError: cut"


def test_only_what_was_written_has_a_record_until_it_is_removed_and_files_of_others_are_read_and_removed(tmp_path):
    storage = HashingFileSystem(tmp_path)
    with storage.create_stream(tmp_path / "own", "wb") as stream:
        stream.write(b"x")
    (tmp_path / "other").write_bytes(b"x")
    with storage.create_stream(tmp_path / "other", "rb") as stream:
        assert stream.read() == b"x"
    assert storage.records.keys() == {"own"}
    for name in ("own", "other"):
        storage.rm_file(tmp_path / name)
    assert (storage.records, list(tmp_path.iterdir())) == ({}, [])


def test_a_gpus_generator_continues_where_it_was_and_a_cpus_run_has_none(tiny_folder, one_rank, monkeypatch):
    generators = {0: torch.tensor([1, 2], dtype=torch.uint8), 1: torch.tensor([3, 4], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device.index].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: generators.update({device.index: state}))
    schedule = parts(tiny_folder, one_rank)[2]
    assert sharded_state._extra(schedule, CPU).keys() == {"schedule_steps", "rng"}
    saved = sharded_state._extra(schedule, torch.device("cuda", 1))
    assert saved["device_rng"].tolist() == [3, 4]
    generators[1] = torch.zeros(2, dtype=torch.uint8)
    sharded_state._restore_extra(saved, schedule, torch.device("cuda", 1))
    assert {index: state.tolist() for index, state in generators.items()} == {0: [1, 2], 1: [3, 4]}


class Runs:
    """An object whose unpickling runs code: it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def in_the_state_of_a_rank(folder, code):
    torch.save({"schedule_steps": code}, folder / "extra_rank_0.pt")


def in_the_index(folder, code):
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(code))


def in_an_entry(folder, code):
    """Puts the code where the index says that a learning rate is."""
    index = folder / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    place = next(each for key, each in metadata.storage_data.items() if key.fqn.endswith(".lr"))
    shard, payload = folder / "dcp" / place.relative_path, io.BytesIO()
    torch.save(code, payload)
    place.offset, place.length = shard.stat().st_size, len(payload.getvalue())
    shard.write_bytes(shard.read_bytes() + payload.getvalue())
    index.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("put", [in_the_state_of_a_rank, in_the_index, in_an_entry])
def test_code_in_a_checkpoint_is_not_run(tiny_folder, one_rank, tmp_path, put):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ALL)
    put(tmp_path, Runs(tmp_path / "it ran"))
    with pytest.raises(CheckpointError, match=r"could not be read: .*(UnpicklingError|which no checkpoint needs)"):
        load_training_state(tmp_path, *run, CPU, ALL)
    if put is in_the_index:
        with pytest.raises(CheckpointError, match=r"could not be read: .*(UnpicklingError|which no checkpoint needs)"):
            StoredTensors(tmp_path)
    assert not (tmp_path / "it ran").exists()


def without_parts(stored):
    stored.chunks.clear()


def twice_the_first_half(stored):
    half = stored.chunks[0]
    rows = half.sizes[0] // 2
    half.sizes = torch.Size((rows, *half.sizes[1:]))
    stored.chunks.append(copy.deepcopy(half))


def beyond_its_end(stored):
    stored.chunks[0].offsets = torch.Size((1, *stored.chunks[0].offsets[1:]))


@pytest.mark.parametrize("change", [without_parts, twice_the_first_half, beyond_its_end])
def test_an_index_whose_parts_do_not_make_up_a_tensor_is_refused(tiny_folder, one_rank, tmp_path, change):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ALL)
    index = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    key = next(key for key in metadata.state_dict_metadata if key.endswith("embed_tokens.weight"))
    change(metadata.state_dict_metadata[key])
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="do not make up the tensor"):
        load_training_state(tmp_path, *run, CPU, ALL)
    with pytest.raises(CheckpointError, match="do not make up the tensor"):
        StoredTensors(tmp_path)


def index_of(*boxes):
    """The index of one tensor of 4 rows and 2 columns, in parts: (row, column) of its first entry, and (rows, columns)."""
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
    return Metadata({"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((4, 2)), chunks)})


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (4, 2))],
        [((2, 0), (2, 2)), ((0, 0), (2, 2))],
        [((0, 0), (3, 2)), ((3, 0), (1, 1)), ((3, 1), (1, 1))],
        [((0, 0), (4, 2)), ((4, 0), (0, 2))],  # a rank without rows
    ],
)
def test_an_index_may_list_parts_in_any_order_and_empty_ones(boxes):
    check_index(index_of(*boxes))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (3, 2))],
        [((0, 0), (4, 1)), ((0, 0), (4, 1))],
        [((0, 0), (3, 2)), ((3, 1), (1, 1)), ((2, 1), (1, 1))],
        [((-1, 0), (4, 2))],
        [((0, 1), (4, 2))],
        [((0,), (4,)), ((0,), (4,))],
        [((0, 0), (4, 2)), ((0, 0), (-1, 2)), ((0, 0), (1, 2))],
    ],
)
def test_an_index_whose_parts_leave_something_out_overlap_or_lie_outside_is_refused(boxes):
    with pytest.raises(ValueError, match=r"parts of w that do not make up the tensor"):
        check_index(index_of(*boxes))


def test_an_interrupt_during_a_save_is_an_interrupt(tiny_folder, one_rank, tmp_path, monkeypatch):
    def interrupted(descriptor):
        raise KeyboardInterrupt

    run = parts(tiny_folder, one_rank)
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_training_state(tmp_path, *run, CPU, ALL)


def test_a_rank_reads_its_own_file_and_rank_0s_where_it_has_none(tiny_folder, one_rank, tmp_path, monkeypatch):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ["extra"])
    first = torch.get_rng_state()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 3)
    torch.manual_seed(99)
    load_training_state(tmp_path, *run, CPU, ["extra"])
    assert torch.equal(torch.get_rng_state(), first)
    torch.manual_seed(7)
    save_training_state(tmp_path, *run, CPU, ["extra"])
    seventh = torch.get_rng_state()
    torch.manual_seed(99)
    load_training_state(tmp_path, *run, CPU, ["extra"])
    assert torch.equal(torch.get_rng_state(), seventh)


def test_a_checkpoint_names_its_parts_and_leaves_out_what_is_frozen(tiny_folder, one_rank, tmp_path):
    run = parts(tiny_folder, one_rank)
    (first, _), *_, (name, frozen) = run[0].named_parameters()
    frozen.requires_grad_(False)
    save_training_state(tmp_path / "new" / "folder", *run, CPU, ALL)
    names = FileSystemReader(tmp_path / "new" / "folder" / "dcp").read_metadata().state_dict_metadata.keys()
    assert {name.split(".")[0] for name in names} == {"model", "optimizer"}
    assert f"model.{first}" in names
    assert f"model.{name}" not in names


def test_an_error_of_the_disk_is_named_by_its_kind(tiny_folder, one_rank, tmp_path):
    (tmp_path / "extra_rank_0.pt").mkdir()
    run = parts(tiny_folder, one_rank)
    with pytest.raises(CheckpointError, match=r"could not be written: IsADirectoryError: "):
        save_training_state(tmp_path, *run, CPU, ["extra"])
    with pytest.raises(CheckpointError, match=r"could not be read: IsADirectoryError: "):
        load_training_state(tmp_path, *run, CPU, ["extra"])


@pytest.mark.parametrize(
    ("contents", "files"), [(ALL, {"dcp/.metadata", "dcp/__0_0.distcp", "extra_rank_0.pt"}), (["extra"], {"extra_rank_0.pt"})]
)
def test_each_file_is_on_disk_in_a_new_folder_as_its_writer_recorded_it(tiny_folder, one_rank, tmp_path, contents, files):
    folder = tmp_path / "new" / "folder"
    records = save_training_state(folder, *parts(tiny_folder, one_rank), CPU, contents)
    assert records.keys() == files
    assert records == record_folder(folder, folder)


def ranks_records(rank, folder, out):
    return save_training_state(out, *parts(folder, training_mesh("cpu", 2, -1)), CPU, ALL)


def test_each_rank_records_what_it_wrote_and_together_they_record_everything(tiny_folder, tmp_path):
    one, other = run_ranks(ranks_records, 2, tiny_folder, tmp_path)
    assert not one.keys() & other.keys()
    assert one | other == record_folder(tmp_path, tmp_path)


@pytest.mark.parametrize("damage", [lambda data: b"\0" * len(data), lambda data: data[::-1], lambda data: b""])
@pytest.mark.parametrize("name", ["dcp/.metadata", "dcp/__0_0.distcp", "extra_rank_0.pt"])
def test_whatever_torch_says_of_a_damaged_file_is_an_error_that_names_the_folder(tiny_folder, one_rank, tmp_path, name, damage):
    run = parts(tiny_folder, one_rank)
    save_training_state(tmp_path, *run, CPU, ALL)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the checkpoint could not be read"):
        load_training_state(tmp_path, *run, CPU, ALL)


@pytest.mark.parametrize("change", [{"weight_decay": 0.5}, {"betas": (0.5, 0.6)}, {"override_optimizer_config": {"eps": 1e-3}}])
@pytest.mark.parametrize("offload", [False, True])
def test_the_optimizers_arguments_are_the_resumed_runs_and_not_the_checkpoints(tiny_folder, one_rank, tmp_path, change, offload):
    def built(**more):
        policy = sharded(tiny_folder, one_rank, dtype="fp32")
        optim = Optim(lr=0.01, **more)
        optimizer = build_optimizer(policy.parameters(), optim, offload)
        return policy, optimizer, build_schedule(optimizer, optim, 10)

    save_training_state(tmp_path, *built(), CPU, ALL)
    resumed = built(**change)
    (name, value) = next(iter((change.get("override_optimizer_config") or change).items()))
    load_training_state(tmp_path, *resumed, CPU, ALL)
    assert resumed[1].param_groups[0][name] == value


@pytest.mark.parametrize("setting", [True, False])
def test_torchs_own_checksums_are_left_out_of_a_save_and_nowhere_else(tiny_folder, one_rank, tmp_path, monkeypatch, setting):
    seen, extra = [], sharded_state._extra
    monkeypatch.setattr(sharded_state, "_extra", lambda *args: seen.append(get_crc32_options()) or extra(*args))
    before = get_crc32_options()
    try:
        set_crc32_options(setting)
        save_training_state(tmp_path, *parts(tiny_folder, one_rank), CPU, ALL)
        assert (seen, get_crc32_options()) == ([False], setting)
    finally:
        set_crc32_options(before)


@pytest.mark.parametrize("number", [0, 2])
def test_a_save_leaves_the_number_of_steps_that_an_optimizer_took(tiny_folder, one_rank, tmp_path, number):
    run = parts(tiny_folder, one_rank)
    for seed in range(number):
        step(*run, seed=seed)
    save_training_state(tmp_path, *run, CPU, ALL)
    other = parts(tiny_folder, one_rank)
    load_training_state(tmp_path, *other, CPU, ALL)
    for _, optimizer, _ in (run, other):
        assert {float(values["step"]) for values in optimizer.state.values()} == {number}


def test_device_memory_that_runs_out_while_a_checkpoint_is_written_is_no_error_of_the_disk(tiny_folder, one_rank, tmp_path):
    run = parts(tiny_folder, one_rank)
    step(*run, seed=1)
    with pytest.raises(torch.OutOfMemoryError), ByteTracker(limit_bytes=10):
        save_training_state(tmp_path, *run, CPU, ALL)


class Joined:
    """Masters that are made when they are asked for, as those that are joined from a weight and its remainder."""

    def master(self, parameter, on_host=False):
        return torch.zeros_like(parameter, dtype=torch.float32)


def test_a_save_holds_one_tensor_beside_what_is_there(tiny_folder, one_rank, tmp_path):
    policy, optimizer, schedule = parts(tiny_folder, one_rank)
    step(policy, optimizer, schedule, seed=1)
    for each in optimizer.state.values():  # moments are slices of a buffer, of which only they are written
        slices = torch.zeros(2, *each["exp_avg"].shape)
        each["exp_avg"], each["exp_avg_sq"] = (like(each["exp_avg"], one) for one in slices)
    largest = max(4 * parameter.numel() for parameter in policy.parameters())
    there = [*policy.parameters(), *(each[name] for each in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))]
    with ByteTracker() as tracker:
        tracker.mark("there", there)
        before = tracker.total()
        save_training_state(tmp_path, policy, optimizer, schedule, CPU, ALL, Joined())
    assert largest <= tracker.peaks["device"].bytes - before < 1.25 * largest
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.distcp")) > 5 * largest
