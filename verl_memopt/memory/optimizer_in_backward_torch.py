"""Each FSDP unit is updated inside backward, as soon as its gradient is reduced, and the gradient is freed at once.

Bytes saved: b_g x (N - N_u) / W bytes, where b_g is 4 for fp32 gradients, N counts the parameters, N_u those of the largest unit,
and W the ranks in the shard group. At no time is there more than one unit's gradient. The exception is a matrix that head and
embedding share: its two gradients meet in backward. Without the knob all gradients exist from the end of backward to the end of
the optimizer step.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from verl_memopt.distributed.device import wait_on_host
from verl_memopt.errors import ConfigError
from verl_memopt.memory.bucketed_adamw_torch import Bucketed
from verl_memopt.memory.optimizer_layout import local
from verl_memopt.observe.byte_tracker import scope

ACTOR = "actor_rollout_ref.actor"


class StepInBackward:
    """Updates each parameter as its gradient comes. FSDP2 calls the hooks once a unit's gradients are reduced and sharded."""

    def __init__(self, optimizer: Optimizer, key: str = ACTOR, backward_on: torch.device | None = None) -> None:
        """Register the hooks of all parameters of an optimizer, whose model errors name by the settings section ``key``.

        ``backward_on`` is the device that computes gradients; None for that of the parameters.
        """
        assert isinstance(optimizer, Bucketed), type(optimizer)
        self._optimizer, self._key = optimizer, key
        self._norms: dict[int, Tensor] = {}
        device = local(optimizer.param_groups[0]["params"][0]).device
        self._copied_from = None if backward_on is None or backward_on.type == device.type else backward_on
        # All three stay on the device: reading one in backward would make the host wait at each parameter.
        self._sum, self._stopped, self._moved = (torch.zeros((), device=device) for _ in range(3))
        # The garbage collector does not see the hook of a parameter, so the hook must not refer to the optimizer.
        update = weakref.WeakMethod(self.update)

        def hook(parameter: Tensor) -> None:
            method = update()
            assert method is not None, "the optimizer lives as long as backward runs"
            method(parameter)

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(hook)

    def check(self, num_micro_batches: int) -> None:
        """Check that gradients need not be summed over micro-batches.

        Raises:
            ConfigError: An optimizer step has several micro-batches.
        """
        if num_micro_batches > 1:
            raise ConfigError(
                f"{self._key}.optim.in_backward=true: an optimizer step has {num_micro_batches} micro-batches, and a gradient is "
                f"used as soon as it is there. Raise {self._key}.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu) "
                f"until one holds a whole mini-batch, lower ppo_mini_batch_size, or set {self._key}.optim.in_backward=false."
            )

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient since the last call; a sharded scalar where parameters are sharded."""
        norms = list(self._norms.values())
        self._norms.clear()
        self._sum.zero_()
        return torch.linalg.vector_norm(torch.stack(norms))

    def take_moved(self) -> Tensor:
        """Return 1 (fp32 scalar) if this rank has updated a parameter since the last call, else 0."""
        moved = self._moved.clone()
        self._moved.zero_()
        return moved

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        """Update a parameter from its gradient and free the gradient. Nothing moves after a gradient that was not finite."""
        # A parameter that has a norm already got a gradient in this step, so this is a second micro-batch.
        self.check(1 + (id(parameter) in self._norms))
        assert parameter.grad is not None
        if self._copied_from is not None:
            # FSDP2's CPU offload calls the hook on the stream of the copy to the host, while the copy may still be under way.
            wait_on_host(self._copied_from)
        with scope(kind="optimizer scratch"):
            self._norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad)
            # A sum stays infinite or NaN once a term is.
            self._sum.add_(local(self._norms[id(parameter)]))
            self._stopped.copy_(self._sum.isfinite().logical_not_())
            self._moved.copy_(torch.maximum(self._moved, 1 - self._stopped))
            self._optimizer.step_parameter(parameter, self._stopped)
        parameter.grad = None
