"""The methods of a worker that read and write files: checkpoints and exported models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_memopt.distributed.file_records import Records
from verl_memopt.memory.parameters.residency import Residency
from verl_memopt.workers.checkpoint import export_trained, load_trained, save_trained
from verl_memopt.workers.critic import Critic
from verl_memopt.workers.group import Placement
from verl_memopt.workers.plan import WorkerPlan
from verl_memopt.workers.policy import Policy
from verl_memopt.workers.reference_sync import MovingReference


class WorkerFiles:
    """The part of :class:`verl_memopt.workers.worker.Worker` that reads and writes files. The worker sets all attributes."""

    plan: WorkerPlan
    placement: Placement
    residency: Residency
    policy: Policy | None
    critic: Critic | None
    moving_reference: MovingReference | None

    def save(self, folder: str, contents: Sequence[str]) -> Records:
        """Write this rank's part of the policy's checkpoint and return the record of each file. As :func:`save_trained`."""
        assert self.policy is not None
        return save_trained(self.policy.trained, self.plan, self.placement.rank, Path(folder), contents)

    def save_critic(self, folder: str, contents: Sequence[str]) -> Records:
        """Write this rank's part of the critic's checkpoint and return the record of each file. As :func:`save_trained`."""
        assert self.critic is not None
        return save_trained(self.critic.trained, self.plan, self.placement.rank, Path(folder), contents)

    def load(self, folder: str, contents: Sequence[str]) -> None:
        """Read this rank's part of the policy's checkpoint, written by any number of ranks."""
        assert self.policy is not None
        load_trained(self.policy.trained, Path(folder), contents)

    def load_critic(self, folder: str, contents: Sequence[str]) -> None:
        """Read this rank's part of the critic's checkpoint, written by any number of ranks.

        The phase ``load_checkpoint`` has the policy on the device. The critic takes its place.
        """
        assert self.critic is not None
        with self.residency.phase("load_critic"):
            load_trained(self.critic.trained, Path(folder), contents)

    def save_reference(self, folder: str, contents: Sequence[str]) -> Records:
        """Write this rank's part of a reference that follows the policy, and return the record of each file."""
        assert self.moving_reference is not None
        return self.moving_reference.save(Path(folder))

    def load_reference(self, folder: str, contents: Sequence[str]) -> None:
        """Read this rank's part of a reference that follows the policy, written by any number of ranks."""
        assert self.moving_reference is not None
        with self.residency.phase("sync_ref"):
            self.moving_reference.load(Path(folder))

    def export(self, folder: str, weights: bool) -> None:
        """Write the policy in Hugging Face format, with or without its weights."""
        assert self.policy is not None
        export_trained(self.policy.trained, self.plan, self.placement.rank, Path(folder), weights)

    def export_critic(self, folder: str, weights: bool) -> None:
        """Write the critic in Hugging Face format, as a token classifier with one label, with or without its weights."""
        assert self.critic is not None
        export_trained(self.critic.trained, self.plan, self.placement.rank, Path(folder), weights)
