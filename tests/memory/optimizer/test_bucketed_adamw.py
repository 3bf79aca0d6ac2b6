from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.memory.optimizers import bucketed, counting, give_gradients, parameters, same, two_linears, weights_after
from tests.memory.sharded import fake_ranks
from tests.ranks import run_ranks
from tests.tensors import like, whole_of
from verl_memopt.config.schema import Optim
from verl_memopt.distributed.device import training_mesh
from verl_memopt.distributed.sharded_state import load_training_state, save_training_state
from verl_memopt.errors import CheckpointError
from verl_memopt.memory.bucketed_adamw_torch import MIB, BucketedAdamW, BucketedSGD
from verl_memopt.memory.grad_offload_torch import StepInBackward
from verl_memopt.memory.optimizer_offload_torch import local
from verl_memopt.observe.device_ledger import fsdp_kinds
from verl_memopt.worker.optimizer import build_schedule

ALL = ["model", "optimizer", "extra"]
CPU = torch.device("cpu")
BF16 = torch.bfloat16
FORMATS = {
    "fp32": {},
    "host": {"offload": True, "bucket_megabytes": 0.01},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "int4 on the host": {"state_dtype": "int4", "offload": True, "bucket_megabytes": 0.01},
}


OVER_RANKS = ("host", "bfloat16", "int4 on the host")
"""Formats that two ranks load: one of each way to lie in a checkpoint."""


def fused(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@pytest.mark.parametrize("bucket_megabytes", [64, 0.01, 0.002])
def test_weights_are_those_of_torchs_fused_adamw_bit_for_bit(bucket_megabytes):
    assert same(weights_after(bucketed(bucket_megabytes=bucket_megabytes)), weights_after(fused))


@pytest.mark.parametrize(("dtype", "split"), [(torch.float32, False), (BF16, False), (BF16, True)])
def test_a_step_is_divided_and_left_out_on_the_device(dtype, split):
    first, second, generator = *([torch.nn.Parameter(torch.ones(40, 8, dtype=dtype))] for _ in range(2)), torch.Generator()
    device, host = (BucketedAdamW(one, 1e-2, split_masters=split, bucket_megabytes=0.002) for one in (first, second))
    for step, skipped in enumerate((0.0, 1.0, 0.0)):
        grad = torch.randn(40, 8, generator=generator.manual_seed(step)).to(dtype)
        first[0].grad, second[0].grad = grad * (torch.inf if skipped else 1.0), grad / 3.0
        device.found_inf, device.grad_scale = torch.tensor(skipped), torch.tensor(3.0)
        device.step()
        del device.found_inf, device.grad_scale
        if not skipped:
            host.step()
        if dtype is torch.float32 or skipped:
            assert torch.equal(device.master(first[0]), host.master(second[0]))
        # A gradient in bfloat16 is rounded after a division by the host.
        torch.testing.assert_close(device.master(first[0]), host.master(second[0]), rtol=0, atol=1e-3)
        assert device.state[first[0]]["step"] == host.state[second[0]]["step"]


@pytest.mark.parametrize("options", [{"offload": True}, {"state_dtype": "int8"}, {"state_dtype": "bfloat16"}])
def test_a_step_that_would_change_something_when_left_out_is_decided_by_the_host(options):
    assert not BucketedAdamW(parameters(), 1e-2, **options)._step_supports_amp_scaling
    assert BucketedAdamW(parameters(), 1e-2)._step_supports_amp_scaling


def test_moments_and_steps_are_those_of_torchs_fused_adamw_bit_for_bit():
    states = []
    for make in (bucketed(bucket_megabytes=0.002), fused):
        params = parameters()
        optimizer = make(params)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        states.append([optimizer.state[parameter] for parameter in params])
    for ours, theirs in zip(*states, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_parameter_without_a_gradient_stays(kind):
    params = parameters()
    optimizer = bucketed(**FORMATS[kind])(params)
    give_gradients(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert optimizer.state[params[1]]["step"] == 0
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in params if parameter is not params[1])


def test_groups_keep_their_own_settings():
    def two_groups(kind, **options):
        params = parameters()
        groups = [{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.5}]
        optimizer = kind(groups, lr=1e-2, **options)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        return params

    assert same(two_groups(BucketedAdamW), two_groups(torch.optim.AdamW, fused=True))


def test_bfloat16_weights_take_an_fp32_update_rounded_to_nearest():
    start = parameters(BF16)
    found = weights_after(bucketed(state_dtype="fp32"), steps=1, dtype=BF16)
    exact = [torch.nn.Parameter(parameter.detach().float()) for parameter in start]
    optimizer = fused(exact)
    give_gradients(start, 0)
    for parameter, wide in zip(start, exact, strict=True):
        wide.grad = parameter.grad.float()
    optimizer.step()
    assert same(found, [parameter.detach().to(BF16) for parameter in exact])


MOMENTUM = {"momentum": 0.9}


@pytest.mark.parametrize(
    ("make", "dtype", "options", "on_device", "on_host"),
    [
        (BucketedAdamW, torch.float32, {}, 4 + 8 + 4, 0),
        (BucketedAdamW, torch.float32, {"state_dtype": "bfloat16"}, 4 + 4 + 4, 0),
        (BucketedAdamW, torch.float32, {"state_dtype": "int8"}, 4 + 2 * (1 + 4 / 256) + 4, 0),
        (BucketedAdamW, torch.float32, {"state_dtype": "int4"}, 4 + 2 * (1 / 2 + 4 / 128) + 4, 0),
        (BucketedAdamW, torch.float32, {"offload": True}, 4 + 4, 8),
        (BucketedAdamW, BF16, {"state_dtype": "bfloat16", "stochastic_rounding": True}, 2 + 4 + 2, 0),
        (BucketedAdamW, BF16, {"state_dtype": "int8", "stochastic_rounding": True, "offload": True}, 2 + 2, 2 * (1 + 4 / 256)),
        (BucketedSGD, torch.float32, {}, 4 + 4, 0),
        (BucketedSGD, torch.float32, MOMENTUM, 4 + 4 + 4, 0),
        (BucketedSGD, torch.float32, {**MOMENTUM, "state_dtype": "bfloat16"}, 4 + 2 + 4, 0),
        (BucketedSGD, torch.float32, {**MOMENTUM, "offload": True}, 4 + 4, 4),
        (BucketedSGD, torch.float32, {"offload": True}, 4 + 4, 0),
        (BucketedSGD, BF16, {"split_masters": True}, 2 + 2 + 2, 0),
        (BucketedSGD, BF16, {"split_masters": True, "offload": True}, 2 + 2, 2),
        (BucketedSGD, BF16, {"stochastic_rounding": True}, 2 + 2, 0),
    ],
)
def test_bytes_a_parameter_and_of_a_step_that_compares_weights_with_those_before_it(make, dtype, options, on_device, on_host):
    with fake_ranks(1) as mesh:
        model = two_linears(mesh, dtype)
        optimizer = make(model.parameters(), lr=1e-2, bucket_megabytes=0.125, **options)
        optimizer.computes_in = BF16
        model(torch.ones(2, 256, dtype=dtype)).sum().backward()
        with counting(model, optimizer) as tracker:
            tracker.mark("grads", [parameter.grad for parameter in model.parameters()])
            held = [tracker.total(), tracker.total("host")]
            tracker.enter("step")
            optimizer.step()
            assert tracker.peaks["device"].bytes - held[0] <= 3 * 0.125 * MIB * 1.02
    assert [each / (2 * 1024 * 256) for each in held] == pytest.approx([on_device, on_host], abs=0.001)


@pytest.mark.parametrize(("kind", "in_backward"), [*((kind, False) for kind in FORMATS), ("int4 on the host", True)])
def test_a_step_on_fake_tensors_takes_the_bytes_of_a_real_one(kind, in_backward):
    found = {}
    for name in ("real", "fake"):
        with fake_ranks(4) as mesh, FakeTensorMode(allow_non_fake_inputs=True) if name == "fake" else nullcontext():
            model = two_linears(mesh)
            optimizer = BucketedAdamW(model.parameters(), lr=1e-2, **{**FORMATS[kind], "bucket_megabytes": 0.25})
            stepping = StepInBackward(optimizer) if in_backward else None
            x = torch.ones(2, 256)
            with counting(model, optimizer) as tracker, fsdp_kinds():
                tracker.mark("inputs", [x])
                for step in ("first", "second"):
                    tracker.enter(step)
                    model(x).sum().backward()
                    if stepping is not None:
                        stepping.norm()
                    optimizer.step()
                    optimizer.zero_grad()
                found[name] = [tracker.peaks[tier].bytes for tier in ("device", "host")]
    assert found["fake"] == found["real"]


def run(mesh, options, dtype=torch.float32, make=BucketedAdamW):
    model = two_linears(mesh, dtype)
    optimizer = make(model.parameters(), lr=1e-2, **options)
    return model, optimizer, build_schedule(optimizer, Optim(lr=1e-2), 10)


def sharded_step(model, optimizer, schedule, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = like(parameter, gradient)
    optimizer.step()
    schedule.step()


def values(model, optimizer):
    """Gives every weight and every piece of state, whole."""
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [whole_of(tensor).detach().clone() for tensor in tensors]


ROUNDED = {"stochastic_rounding": True, "seed": 3}
RESUMED = {
    **{kind: (BucketedAdamW, options, options, torch.float32) for kind, options in FORMATS.items()},
    "bfloat16 weights": (BucketedAdamW, *[{**ROUNDED, "state_dtype": "bfloat16"}] * 2, BF16),
    "SGD": (BucketedSGD, {}, {}, torch.float32),
    "SGD from the host": (BucketedSGD, {**MOMENTUM, "offload": True}, MOMENTUM, torch.float32),
    "SGD to the host": (BucketedSGD, MOMENTUM, {**MOMENTUM, "offload": True}, torch.float32),
    "SGD, bfloat16 weights and momentum": (BucketedSGD, *[{**MOMENTUM, **ROUNDED, "state_dtype": "bfloat16"}] * 2, BF16),
    "SGD, bfloat16 weights": (BucketedSGD, ROUNDED, ROUNDED, BF16),
}
"""Class, options before and after, and dtype of the weights."""


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(one_rank, tmp_path, kind):
    make, saving, loading, dtype = RESUMED[kind]
    one = run(one_rank, saving, dtype, make)
    sharded_step(*one, seed=1)
    sharded_step(*one, seed=2)
    save_training_state(tmp_path, *one, CPU, ALL)
    sharded_step(*one, seed=3)
    other = run(one_rank, loading, dtype, make)
    sharded_step(*other, seed=9)
    load_training_state(tmp_path, *other, CPU, ALL)
    sharded_step(*other, seed=3)
    assert same(values(*one[:2]), values(*other[:2]))


def torchs_run(mesh):
    return run(mesh, {"fused": True}, make=torch.optim.AdamW)


@pytest.mark.parametrize("ours_first", [False, True])
def test_ours_and_torchs_go_on_from_each_others_checkpoints(one_rank, tmp_path, ours_first):
    one, other = torchs_run(one_rank), run(one_rank, {"offload": True})
    if ours_first:
        one, other = other, one
    sharded_step(*one, seed=1)
    save_training_state(tmp_path, *one, CPU, ALL)
    load_training_state(tmp_path, *other, CPU, ALL)
    for each in (one, other):
        sharded_step(*each, seed=2)
    assert same(values(*one[:2]), values(*other[:2]))


def test_a_checkpoint_in_another_format_is_refused_by_name(one_rank, tmp_path):
    saved = run(one_rank, {})
    save_training_state(tmp_path, *saved, CPU, ALL)
    with pytest.raises(CheckpointError, match="exp_avg_int8"):
        load_training_state(tmp_path, *run(one_rank, {"state_dtype": "int8"}), CPU, ALL)


def stepped_in_backward(mesh, in_backward):
    """Gives this rank's weights after two updates from gradients that FSDP2 reduces."""
    model, optimizer, _ = run(mesh, {"offload": True, "bucket_megabytes": 0.25})
    stepping = StepInBackward(optimizer) if in_backward else None
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        model(x).square().sum().backward()
        if stepping is not None:
            assert all(parameter.grad is None for parameter in model.parameters())
            stepping.norm()
        optimizer.step()
        optimizer.zero_grad()
    return [local(parameter) for parameter in model.parameters()]


def replicas(rank):
    """Gives this rank's copy of weights that both ranks hold, after a step that rounds them by chance."""
    rounding = {"state_dtype": "int8", "stochastic_rounding": True}
    model, optimizer, schedule = run(training_mesh("cpu", 2, 1), rounding, BF16)
    sharded_step(model, optimizer, schedule, seed=1)
    return [local(parameter).float().detach().numpy() for parameter in model.parameters()]


CHANGING = {
    "fp32 weights": (torch.float32, {}),
    "on the host": (torch.float32, {"offload": True, "bucket_megabytes": 0.01}),
    "int8 moments": (torch.float32, {"state_dtype": "int8"}),
    "bfloat16 weights": (BF16, {"state_dtype": "fp32"}),
    "rounded by chance": (BF16, {"stochastic_rounding": True, "state_dtype": "bfloat16"}),
    "split masters": (BF16, {"split_masters": True}),
    "split masters on the host": (BF16, {"split_masters": True, "offload": True, "bucket_megabytes": 0.01}),
}


def halves_of(params):
    return torch.cat([whole_of(parameter).detach().bfloat16().view(-1).view(torch.int16) for parameter in params])


@pytest.mark.parametrize("kind", CHANGING)
def test_the_share_of_weights_that_changed_is_that_of_a_copy_compared_afterwards(kind):
    dtype, options = CHANGING[kind]
    params, other = parameters(dtype), parameters(dtype)
    optimizer, plain = (BucketedAdamW(each, lr=1e-4, **options) for each in (params, other))
    optimizer.computes_in = BF16
    assert optimizer.changed_share() == 0
    shares = []
    for step in range(3):
        give_gradients(params, step)
        give_gradients(other, step)
        before = halves_of(params)
        optimizer.step()
        plain.step()
        expected = (halves_of(params) != before).float().mean()
        shares.append(optimizer.changed_share())
        assert shares[-1] == pytest.approx(expected.item(), rel=1e-6)
    assert 0 < min(shares) <= max(shares) < 1
    if "stochastic_rounding" not in options and "state_dtype" not in options:
        assert same(params, other)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert optimizer.changed_share() == 0


def changed_of_two(mesh):
    """Gives the share that all ranks agree on, and that of whole copies compared."""
    model, optimizer, schedule = run(mesh, {"state_dtype": "bfloat16", "stochastic_rounding": True}, BF16)
    optimizer.computes_in = BF16
    before = halves_of(model.parameters())
    sharded_step(model, optimizer, schedule, seed=1)
    return float(optimizer.changed_share()), (halves_of(model.parameters()) != before).float().mean().item()


def two_ranks(rank, folder):
    """Gives, per format, what two ranks load and what they have after a further step; and saves it for a world of one."""
    mesh, found = training_mesh("cpu", 2, -1), {}
    assert same(stepped_in_backward(mesh, True), stepped_in_backward(mesh, False))
    found["replicas"] = replicas(rank)
    for each in (mesh, training_mesh("cpu", 2, 1)):
        share, expected = changed_of_two(each)
        assert share == pytest.approx(expected, rel=1e-6)
        assert 0 < share <= 1
    for kind in OVER_RANKS:
        two = run(mesh, FORMATS[kind])
        load_training_state(folder / kind, *two, CPU, ALL)
        loaded = [tensor.float().numpy() for tensor in values(*two[:2])]
        save_training_state(folder / f"{kind} by two", *two, CPU, ALL)
        sharded_step(*two, seed=2)
        found[kind] = (loaded, [tensor.float().numpy() for tensor in values(*two[:2])])
    return found


def test_two_ranks_load_the_state_of_one_step_alike_in_backward_and_keep_replicas_equal(one_rank, tmp_path):
    runs = {kind: run(one_rank, FORMATS[kind]) for kind in OVER_RANKS}
    for kind, one in runs.items():
        sharded_step(*one, seed=1)
        save_training_state(tmp_path / kind, *one, CPU, ALL)
    before = {kind: values(*one[:2]) for kind, one in runs.items()}
    answers = run_ranks(two_ranks, 2, tmp_path)
    for one, other in zip(*(answer.pop("replicas") for answer in answers), strict=True):
        assert (one == other).all()
    for answer in answers:
        for kind, (loaded, _) in answer.items():
            assert same([torch.from_numpy(array) for array in loaded], [tensor.float() for tensor in before[kind]]), kind
    for kind, one in runs.items():
        back = run(one_rank, FORMATS[kind])
        load_training_state(tmp_path / f"{kind} by two", *back, CPU, ALL)
        assert same(values(*back[:2]), before[kind])
        sharded_step(*one, seed=2)
        if kind == "host":  # elsewhere rounding differs by rank
            assert same([torch.from_numpy(array) for array in answer[kind][1]], values(*one[:2]))
