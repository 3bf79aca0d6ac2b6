"""The reference that follows the policy: its moving average, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_memopt.distributed.file_records import Records
from verl_memopt.distributed.sharded_state import load_weights, save_weights
from verl_memopt.errors import ConfigError
from verl_memopt.memory.residency import OffloadedParams
from verl_memopt.model.packed_model import PolicyModel
from verl_memopt.model.weights import named_weights
from verl_memopt.observe.byte_tracker import HOST, scope
from verl_memopt.worker.trained_model import TrainedModel, readable


@dataclass(frozen=True)
class MovingReference:
    """A reference whose weights are a moving average of the policy's. They are read and written where they rest.

    ``home`` is its place on the host; None = it never moves.
    """

    model: PolicyModel
    home: OffloadedParams | None
    policy: TrainedModel

    def follow(self, alpha: float) -> None:
        """Set each weight of the reference to ``alpha * policy + (1 - alpha) * reference``."""
        on_host = self.model.stays_on_host or (self.home is not None and not self.home.on_device)
        with readable(self.home), readable(self.policy.home):
            move_towards(self._pairs(), alpha, on_host)
        self._changed()

    def save(self, folder: Path) -> Records:
        """Write this rank's shards into ``folder`` and return the record of each file.

        Raises:
            CheckpointError: The disk refuses. The message names the folder.
        """
        with readable(self.home):
            return save_weights(folder, self.model, self.policy.device)

    def load(self, folder: Path) -> None:
        """Read this rank's shards, written by any number of ranks.

        Raises:
            CheckpointError: A file is missing or damaged. The message names the folder.
        """
        with readable(self.home):
            load_weights(folder, self.model)
        self._changed()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        policy = dict(named_weights(self.policy.model))
        for name, reference in named_weights(self.model):
            yield reference, self.policy.master(policy[name])

    def _changed(self) -> None:
        # On the host the copy itself was changed, and it is the one that counts.
        if self.home is not None and self.home.on_device:
            self.home.changed()


def moving_reference(model: PolicyModel, home: OffloadedParams | None, policy: TrainedModel, folder: str) -> MovingReference:
    """Return the reference as one that follows the policy.

    Raises:
        ConfigError: The weights of the two models differ in their names or shapes.
    """
    shapes = [{name: tuple(weight.shape) for name, weight in named_weights(each)} for each in (model, policy.model)]
    if shapes[0] != shapes[1]:
        name = min(name for name, _ in shapes[0].items() ^ shapes[1].items())
        raise ConfigError(
            f"actor_rollout_ref.ref.model.path={folder}: {name} is {shapes[0].get(name, 'missing')} there and "
            f"{shapes[1].get(name, 'missing')} in the policy, and a reference that follows the policy needs the same weights. "
            "Remove the key, or set actor_rollout_ref.ref.sync_every_steps=null."
        )
    return MovingReference(model, home, policy)


# Move the weights of one model towards those of another, shard by shard, where they rest.
#
# Bytes on the device: none where the target rests on the host, or where both models lie on the device in fp32. Otherwise two
# pieces of at most ``PIECE`` elements. No copy of a whole model exists at any time.


PIECE = 2**22
"""Elements that are copied or converted at a time: 16 MiB in fp32."""
KIND = "moving average"


def move_towards(pairs: Iterable[tuple[Tensor, Tensor]], alpha: float, on_host: bool) -> None:
    """Set each target to ``alpha * source + (1 - alpha) * target``, in place.

    The sum is computed in fp32 and rounded once, to the dtype of the target.

    Args:
        pairs: (target, source) of each parameter. Both have the same shape, and above one rank the same shards. They may lie on
            different devices.
        alpha: Weight of the source, above 0 and at most 1.
        on_host: The targets rest on the host. The sum is then computed there.
    """
    with torch.no_grad(), scope(KIND, HOST if on_host else None):
        for target, source in pairs:
            _mix(_flat_shard(target), _flat_shard(source), alpha)


def _mix(target: Tensor, source: Tensor, alpha: float) -> None:
    assert target.shape == source.shape, (target.shape, source.shape)
    for start in range(0, target.numel(), PIECE):
        into, piece = target[start : start + PIECE], source[start : start + PIECE]
        mixed = into if into.dtype == torch.float32 else into.float()
        mixed.mul_(1 - alpha).add_(piece.to(into.device).float(), alpha=alpha)
        if mixed is not into:
            into.copy_(mixed)


def _flat_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard as a flat view."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    return local.view(-1)
