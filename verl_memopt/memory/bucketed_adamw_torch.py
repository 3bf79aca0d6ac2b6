"""AdamW and SGD that update the elements of all shards in buckets, so that a step needs little scratch memory.

Bytes saved: the step of torch's unfused AdamW holds a temporary tensor as large as the parameters: 4 x N / W bytes for N
parameters on W ranks. With fp32 state on the device, this step needs no scratch memory, like torch's fused AdamW. In every other
combination it holds at most three buckets of ``optim.bucket_megabytes``.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim import SGD, AdamW, Optimizer

from verl_memopt.distributed.device import synchronize
from verl_memopt.memory.bucketed_adamw import SLOTS
from verl_memopt.memory.embedding_gradient import gradient_dtype
from verl_memopt.memory.host_buffers import host_buffer
from verl_memopt.memory.optimizer_offload_torch import (
    GRADIENT,
    Section,
    SectionMember,
    Slice,
    StateLanes,
    aligned,
    count,
    cut_buckets,
    entries,
    local,
    sections,
    shard_place,
    sharded_as,
    shown,
)
from verl_memopt.memory.optimizer_state_dtype_torch import (
    LEAST_BLOCK,
    MOMENTS,
    MOST_BLOCK,
    REMAINDER,
    BucketScratch,
    Planes,
    join_,
    round_to_bfloat16_,
    split_,
)
from verl_memopt.observe.byte_tracker import scope
from verl_memopt.observe.phase import MIB

logger = logging.getLogger(__name__)

KIND = "optimizer"
COMPARED_BYTES = 5
"""Bytes per element of a bucket while compute weights are compared: 2 before, 2 after, and 1 for whether they differ."""
KEPT = "optim.state_dtype=%s: %d of %d elements keep fp32 moments, because their rows cannot be cut into blocks of at least %d"


class Bucketed(Optimizer, ABC):
    """Optimizer whose state may rest on the host or in fewer bits, and whose bfloat16 weights may be rounded stochastically.

    The state of a parameter is one tensor for each plane of its format (see ``MomentFormat``). ``step`` (fp32) is added where
    update or rounding depends on the number of steps. The state is allocated at construction, as views of one buffer. Each tensor
    is shaped and sharded like its parameter, so that another number of ranks can load it.

    Attributes:
        counts_steps: Whether the update depends on the number of steps.
        computes_in: Half-precision dtype in which the weights compute. If it is set, :meth:`changed_share` counts the weights
            that changed in it. None = no comparison.
    """

    counts_steps: bool

    grad_scale: Tensor | None = None
    """Divisor of all gradients in :meth:`step`. Like ``found_inf`` it belongs to torch's protocol for gradient scalers."""
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        state_dtype: str = "fp32",
        offload: bool = False,
        stochastic_rounding: bool = False,
        bucket_megabytes: float = 64,
        seed: int = 0,
        split_masters: bool = False,
    ) -> None:
        """Allocate the state in ``state_dtype``, on the host if ``offload``.

        Args:
            params: fp32 or bfloat16 parameters, plain or sharded on their first dimension.
            defaults: Default values of parameter groups.
            state_dtype: Format of the moments.
            offload: Keep the state in host memory between steps.
            stochastic_rounding: Round bfloat16 weights stochastically.
            bucket_megabytes: MiB of a bucket.
            seed: Seed of all stochastic rounding.
            split_masters: The bfloat16 weights are the high half of fp32 master weights, whose low half (remainder) starts at 0.
        """
        super().__init__(params, defaults)
        self._offload, self._stochastic, self._seed = offload, stochastic_rounding, seed
        self._num_steps = 0
        self._bucket_bytes = int(bucket_megabytes * MIB)
        first = self.param_groups[0]["params"][0]
        self._device = local(first).device
        self._place = shard_place(first)
        self._generator = torch.Generator(device=self._device)
        self._lanes = StateLanes(self._device) if offload else None
        # For offloaded gradients: ids of parameters whose gradient is on the host, gradients on the device that are about to
        # leave, by parameter id, and the divisor of all gradients in the next step.
        self.arrived: set[int] = set()
        self.taken: dict[int, Tensor] = {}
        self.divisor: Tensor | None = None
        self.computes_in: torch.dtype | None = None
        self._changed: Tensor | None = None
        self._sections = sections(self.param_groups, state_dtype, split_masters, self._moments)
        self._section_of = {id(member.parameter): (section, member) for section in self._sections for member in section.members}
        self._make_state()
        self._tell_what_stays_fp32(state_dtype)

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    @abstractmethod
    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]: ...
    @abstractmethod
    def _kernel(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]], steps: list[Tensor], group: dict[str, Any],
        stopped: Tensor | None,
    ) -> None:  # fmt: skip
        """Update fp32 ``weights`` and ``moments`` in place, except where ``stopped`` is 1 on the device."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Whether the device itself may skip a step, so that the host need not wait for the gradient norm. Not with offloaded
        # state, which would be copied both ways for nothing, nor with stochastic rounding, whose seed is the number of steps.
        plain = all(not section.format.decodes and section.gradients is None for section in self._sections)
        return plain and not self._offload and not self._stochastic

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. This allocates at most three buckets on the device.

        ``found_inf`` and ``grad_scale`` are fp32 scalars on the device. If ``found_inf`` is 1, nothing changes. Gradients are
        divided by ``grad_scale``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for section in self._sections:
            members = [member for member in section.members if self._has_gradient(section, member.parameter)]
            self._update(section, members, self.found_inf)
        # The number of steps seeds random rounding. Where the device decides whether there is a step, nothing is rounded at
        # random.
        self._num_steps += self.found_inf is None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.arrived.clear()
        self.taken.clear()
        self.divisor = None

    def rest_gradients(self) -> dict[int, Tensor]:
        """Allocate host memory for gradients, from which :meth:`step` reads them; return parameter id -> its part.

        The step uses the gradients whose parameter ids are in :attr:`arrived`, divided by :attr:`divisor`.
        """
        self._lanes = self._lanes or StateLanes(self._device)
        places: dict[int, Tensor] = {}
        for section in self._sections:
            dtype = gradient_dtype(section.members[0].parameter)
            buffer = host_buffer(section.numel * dtype.itemsize, self._device, "grads").view(dtype)
            section.gradients = buffer
            # Shaped like the parameters, so that a gradient is copied without a reshape.
            places |= {
                id(member.parameter): buffer[member.start : member.start + member.numel].view(local(member.parameter).shape)
                for member in section.members
            }
        return places

    def _has_gradient(self, section: Section, parameter: Tensor) -> bool:
        return parameter.grad is not None if section.gradients is None else id(parameter) in self.arrived

    def changed_share(self) -> Tensor:
        """Return the share of compute weights whose bits changed since the last call, over all ranks (a scalar).

        A weight that two steps have changed counts twice.
        """
        parameters = [member.parameter for section in self._sections for member in section.members]
        changed, self._changed = self._changed, None
        if changed is None:
            changed = torch.zeros((), dtype=torch.int64, device=self._device)
        # Replicas have equal counts, so only the counts of shards are summed.
        first = parameters[0]
        if isinstance(first, DTensor):
            parts = [Partial() if isinstance(placement, Shard) else placement for placement in first.placements]
            changed = DTensor.from_local(changed, first.device_mesh, parts, run_check=False).full_tensor()
        return (changed.double() / sum(parameter.numel() for parameter in parameters)).float()

    def remainders(self) -> Iterator[Tensor]:
        # Yield the low halves of split master weights.
        yield from (section.planes[REMAINDER.name] for section in self._sections if section.splits)

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor, stopped: Tensor | None = None) -> None:
        """Update one parameter before :meth:`step`. The caller must drop its gradient before that step runs.

        If ``stopped``, an fp32 scalar on the device, is 1, parameter and state do not change.
        """
        section, member = self._section_of[id(parameter)]
        self._update(section, [member], stopped)

    def master(self, parameter: Tensor, on_host: bool = False) -> Tensor:
        """Return the fp32 master weight of a parameter: joined from both halves, or the parameter if it is not split.

        The new tensor is sharded like the parameter, and on its device. With ``on_host`` it is on the host if the remainder rests
        there.
        """
        section, member = self._section_of[id(parameter)]
        weight = local(parameter)
        if not section.splits:
            return parameter if isinstance(parameter, DTensor) else weight
        weight = weight.cpu() if on_host and self._offload else weight
        synchronize(self._device)  # the last bucket may still be on its way to the host
        remainder = section.planes[REMAINDER.name][member.start : member.start + member.numel]
        masters = torch.empty(member.numel, dtype=torch.float32, device=weight.device)
        join_([weight.view(-1)], remainder.to(weight.device), masters)
        return sharded_as(parameter, masters.view(weight.shape), parameter.shape)

    def set_master(self, parameter: Tensor, values: Tensor, first: int = 0) -> None:
        section, member = self._section_of[id(parameter)]
        weight = local(parameter).view(-1)[first : first + values.numel()]
        if not section.splits:
            weight.copy_(values.view(-1))
            return
        start = member.start + first
        remainders = section.planes[REMAINDER.name][start : start + values.numel()]
        # In pieces, because splitting a whole embedding at once would take five times its bytes.
        for part in zip(
            *(tensor.split(self._bucket_bytes // 4) for tensor in (values.view(-1), weight, remainders)), strict=True
        ):
            masters = part[0].to(weight.device, torch.float32, copy=True)
            remainder = torch.empty_like(masters, dtype=torch.int16)
            split_(masters, torch.empty_like(masters), [part[1]], remainder)
            part[2].copy_(remainder)

    def state_dict(self) -> dict[str, Any]:
        # The last buckets may still be on their way to the host, and the host must not read them before they are there.
        synchronize(self._device)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy values that this class or torch's class saved into the existing state, matched by the order of parameters.

        Raises:
            KeyError: The state was saved in another ``state_dtype``. The message names the missing key.
        """
        saved_groups = state_dict["param_groups"]
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        names = chain.from_iterable(saved["params"] for saved in saved_groups)
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        # Matched by the order of parameters, because another optimizer class may have saved the state under other keys.
        for name, parameter in zip(names, ours, strict=True):
            for key, tensor in self.state[parameter].items() if name in state_dict["state"] else ():
                source, target = local(state_dict["state"][name][key]), local(tensor)
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)
        self._num_steps = int(max((state["step"] for state in self.state.values() if "step" in state), default=0))

    def _make_state(self) -> None:
        sizes = [[(plane, plane.num_bytes(section.numel)) for plane in section.resting] for section in self._sections]
        total = sum(aligned(size) for planes in sizes for _, size in planes)
        with scope(kind=KIND):
            if self._offload and total:
                buffer = host_buffer(total, self._device, KIND).zero_()
            else:
                buffer = torch.zeros(total, dtype=torch.uint8, device=self._device)
            # Step counters stay on the device even if the state is offloaded, because the kernels read them there.
            steps = torch.zeros(len(self._section_of), dtype=torch.float32, device=self._device)
        offset = 0
        for section, planes in zip(self._sections, sizes, strict=True):
            for plane, size in planes:
                section.planes[plane.name] = buffer[offset : offset + size].view(plane.dtype)
                offset += aligned(size)
        # The state has the parameter's shape, so that another number of ranks can load it.
        for (section, member), step in zip(self._section_of.values(), steps.unbind(), strict=True):
            parts = {plane.name: shown(member, plane, section.planes[plane.name]) for plane in section.format.planes}
            counter = {"step": step} if self.counts_steps or self._stochastic else {}
            self.state[member.parameter] = counter | parts

    def _tell_what_stays_fp32(self, state_dtype: str) -> None:
        whole = sum(section.numel for section in self._sections)
        kept = sum(section.numel for section in self._sections if not section.format.decodes)
        if state_dtype in MOST_BLOCK and kept:
            # It is a warning only if most of the state stays in fp32.
            level = logging.WARNING if 2 * kept > whole else logging.INFO
            logger.log(level, KEPT, state_dtype, kept, whole, LEAST_BLOCK)

    def _update(self, section: Section, members: Sequence[SectionMember], stopped: Tensor | None = None) -> None:
        if not members:
            return
        steps = self._steps(members)
        # If the update may be stopped, the device decides whether the counters grow.
        if steps:
            torch._foreach_add_(steps, 1 if stopped is None else [1 - stopped] * len(steps))
        buckets = cut_buckets(members, self._bucket_elements(section, stopped is not None), section.cut)
        if not buckets:  # this rank's shards may be empty
            return
        work = self._work(section, max(count(bucket) for bucket in buckets))
        for bucket, planes in zip(buckets, self._planes(section, buckets), strict=True):
            self._update_bucket(section, bucket, planes, _cut(work, count(bucket)), stopped)

    def _steps(self, members: Iterable[SectionMember]) -> list[Tensor]:
        return [self.state[member.parameter]["step"] for member in members if "step" in self.state[member.parameter]]

    def _update_bucket(
        self, section: Section, bucket: Sequence[Slice], planes: Planes, work: BucketScratch, stopped: Tensor | None
    ) -> None:
        # Decode moments, join halves of weights, update in fp32, split the weights and encode the moments.
        group, sizes = section.group, [part.last - part.first for part in bucket]
        generator = self._seeded(section, bucket[0])
        moments = section.format.decode(planes, work)
        resting = [local(part.member.parameter).view(-1)[part.first : part.last] for part in bucket]
        weights, wide = resting, section.dtype == torch.float32
        compared = self._compared(work)
        if compared is not None and not section.splits:
            _copied(resting, work.compared[0])
        # Offloaded gradients arrive together with the state, as one more plane.
        if section.gradients is None:
            grads = [_gradient(part.member.parameter).view(-1)[part.first : part.last] for part in bucket]
        else:
            grads = list(planes[GRADIENT].split(sizes))
            if self.divisor is not None:
                torch._foreach_div_(grads, self.divisor)
        if section.splits:
            join_(resting, planes[REMAINDER.name], work.scratch[0], None if compared is None else compared[0])
            weights = list(work.scratch[0].split(sizes))
        elif not wide:
            weights = _copied(resting, work.scratch[0])
        # The kernels want weights, gradients and moments in one dtype.
        if grads[0].dtype != torch.float32:
            grads = _copied(grads, work.scratch[1])
        steps = self._steps(part.member for part in bucket)
        self._kernel(weights, grads, [list(moment.split(sizes)) for moment in moments], steps, group, stopped)
        if section.splits:
            split_(work.scratch[0], work.scratch[1], resting, planes[REMAINDER.name], compared)
        elif not wide:
            if self._stochastic:
                round_to_bfloat16_(work.scratch[0], work.scratch[1], generator)
            # Copy back to the weights; the copy casts to their dtype.
            torch._foreach_copy_(resting, weights)
        if compared is not None and not section.splits:
            before, differs, total = compared
            _copied(resting, work.compared[1])
            total.add_(torch.ne(before, work.compared[1].view(torch.int16), out=differs).sum())
        if stopped is None or section.format.repeats:
            section.format.encode(planes, work, generator)
            return
        # Each encoding draws new random codes, so even a stopped update would change them. If it is stopped, the old bytes are
        # put back.
        old = {name: plane.clone() for name, plane in planes.items()}
        section.format.encode(planes, work, generator)
        for name, plane in planes.items():
            torch.where(stopped.bool(), old[name], plane, out=plane)

    def _compared(self, work: BucketScratch) -> tuple[Tensor, Tensor, Tensor] | None:
        if not work.compared:
            return None
        # Return the bits of the weights before the update, scratch for the comparison, and the count so far.
        if self._changed is None:
            self._changed = torch.zeros((), dtype=torch.int64, device=self._device)
        # Compared as bits, so that a NaN is equal to itself.
        return work.compared[0].view(torch.int16), work.compared[2], self._changed

    def _planes(self, section: Section, buckets: Sequence[Sequence[Slice]]) -> Iterator[Planes]:
        # Yield the state of each bucket on the device: views if it rests there, else copies that are written back after use.
        parts = [entries(section, bucket) for bucket in buckets]
        away = dict(section.planes) if self._offload else {}
        if section.gradients is not None:
            away[GRADIENT] = section.gradients
        # Planes that rest on the device are used in place. The others are copied in and out, bucket by bucket.
        on_device = {name: plane for name, plane in section.planes.items() if name not in away}
        passing: Iterable[Planes] = [{}] * len(buckets)
        if away:
            assert self._lanes is not None
            passing = self._lanes.passing(away, [{name: ranges[name] for name in away} for ranges in parts], (GRADIENT,))
        for ranges, arrived in zip(parts, passing, strict=True):
            yield {**{name: plane[ranges[name]] for name, plane in on_device.items()}, **arrived}

    def _scratch_count(self, section: Section) -> int:
        return max(section.format.scratch, 0 if section.dtype == torch.float32 else 2)

    def _bucket_elements(self, section: Section, may_stop: bool) -> int:
        # Slots, decoded moments and scratch together must fit in three buckets.
        itemsize = torch.float32.itemsize
        room = itemsize * (len(section.format.names) * section.format.decodes + self._scratch_count(section))
        room += 0 if self.computes_in is None else COMPARED_BYTES
        # Each of the three slots holds one bucket of every plane that is copied in and out.
        resting = sum(plane.dtype.itemsize / plane.per_entry for plane in section.resting)
        # If the update may stop and encoding draws new codes, a copy of the previous state is needed too.
        extra = resting * (SLOTS * self._offload + (may_stop and not section.format.repeats))
        extra += 0 if section.gradients is None else SLOTS * section.gradients.itemsize
        elements = int(SLOTS * self._bucket_bytes / ((room + extra) or SLOTS * 2 * itemsize))
        return max(elements // section.cut, 1) * section.cut

    def _work(self, section: Section, elements: int) -> BucketScratch:
        def rooms(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
            return tuple(torch.empty(elements, dtype=dtype, device=self._device) for dtype in dtypes)

        moments = [torch.float32] * len(section.format.names) if section.format.decodes else []
        scratch = [torch.float32] * self._scratch_count(section)
        compared = [] if self.computes_in is None else [self.computes_in, self.computes_in, torch.bool]
        return BucketScratch(rooms(*moments), rooms(*scratch), rooms(*compared))

    def _seeded(self, section: Section, first: Slice) -> torch.Generator:
        # The seed depends only on step and place. So a resumed run rounds in the same way, and replicas of a shard do not drift
        # apart.
        start = first.member.start + first.first
        # Each bucket of each step has its own seed, independent of earlier random numbers.
        words = (self._seed, self._num_steps, self._sections.index(section), start, *self._place)
        digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)


class BucketedAdamW(Bucketed):
    """AdamW in buckets.

    Its state is ``step``, ``exp_avg`` and ``exp_avg_sq``. Quantised moments are stored as codes and scales instead.
    """

    counts_steps = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        # Parameter groups have the same entries as in torch's AdamW, so that each class can load a checkpoint of the other.
        beta1, beta2 = betas
        theirs = AdamW([torch.zeros(1)], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, fused=True)
        super().__init__(params, theirs.defaults, **options)

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return MOMENTS

    def _kernel(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]], steps: list[Tensor], group: dict[str, Any],
        stopped: Tensor | None,
    ) -> None:  # fmt: skip
        # The kernel that torch's fused AdamW calls. The class itself updates whole parameters, with fp32 moments on the device.
        torch._fused_adamw_(
            weights,
            grads,
            moments[0],
            moments[1],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            # Meant for gradient scalers: if found_inf is 1, the kernel changes neither weights nor moments.
            grad_scale=self.grad_scale,
            found_inf=stopped,
        )


class BucketedSGD(Bucketed):
    """SGD in buckets. Its state is ``momentum_buffer`` if there is momentum, and ``step`` if rounding is stochastic."""

    counts_steps = False

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        theirs = SGD([torch.zeros(1)], lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True)
        super().__init__(params, theirs.defaults, **options)

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _kernel(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]], steps: list[Tensor], group: dict[str, Any],
        stopped: Tensor | None,
    ) -> None:  # fmt: skip
        torch._fused_sgd_(
            weights,
            grads,
            moments[0] if moments else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            # The momentum buffer exists from the start and is 0, so the first step sets it to the gradient.
            is_first_step=False,
            grad_scale=self.grad_scale,
            found_inf=stopped,
        )


def _cut(work: BucketScratch, elements: int) -> BucketScratch:
    return BucketScratch(*(tuple(room[:elements] for room in rooms) for rooms in work))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _copied(parts: Sequence[Tensor], room: Tensor) -> list[Tensor]:
    copies = list(room.split([part.numel() for part in parts]))
    torch._foreach_copy_(copies, list(parts))
    return copies
