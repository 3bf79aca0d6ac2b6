"""The checks of ``debug.mode=sync_check``: an engine's weights are the policy's, and its prefix cache holds nothing older."""

from __future__ import annotations

import logging

from verl_memopt.errors import RolloutError
from verl_memopt.memory.rollout.weight_buckets import Weights
from verl_memopt.rollout.engine import RolloutEngine
from verl_memopt.rollout.sampling import SamplingSettings

LONGEST_PROBE = 1024
"""Tokens of the probe at most. It must fill a block of the cache: 16 tokens on a GPU, 128 on a CPU."""
NUM_IDS = 97
"""Token ids of the probe are below it, so every vocabulary has them."""
MOST_NAMED = 3
PROBE_SAMPLING = SamplingSettings(
    temperature=1.0,
    top_k=-1,
    top_p=1.0,
    repetition_penalty=1.0,
    do_sample=False,
    max_tokens=1,
    ignore_eos=True,
    log_probs=False,
)

logger = logging.getLogger(__name__)


class SyncCheck:
    """Checks an engine after each weight sync.

    A probe is a prompt that the engine has answered under the old weights. After a sync none of its tokens may come from the
    cache. Answering it twice puts it there again, for the next check.
    """

    def __init__(self, max_model_len: int) -> None:
        """Make the probe.

        Args:
            max_model_len: Longest sequence of the engine, in tokens.
        """
        length = min(max_model_len - 1, LONGEST_PROBE)
        self.probe = [place % NUM_IDS for place in range(length)]
        self._is_synced = False
        self._has_logged = False
        self._has_logged_cache = False

    def check_weights(self, engine: RolloutEngine, weights: Weights) -> None:
        """Check the engine's weights just after a sync.

        Args:
            engine: The engine, with its weights on the device.
            weights: The policy's weights, streamed as for the sync.

        Raises:
            RolloutError: A weight differs from the policy's.
        """
        compared = engine.compare_weights(weights)
        self._is_synced = True
        if compared.different:
            names = ", ".join(compared.different[:MOST_NAMED])
            raise RolloutError(
                f"debug.mode=sync_check: after a weight sync {len(compared.different)} of the engine's weights differ from the "
                f"policy's, such as {names}. The sync wrote them to a wrong place, or another part has written over them."
            )
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                "sync check: %d of the engine's weights equal the policy's in every bit, %d are stored in a form that cannot be "
                "compared", len(compared.equal), len(compared.unknown),
            )  # fmt: skip

    def check_cache(self, engine: RolloutEngine) -> None:
        """Check the prefix cache before the first rollout after a sync.

        Args:
            engine: The engine, awake.

        Raises:
            RolloutError: Tokens of the probe come from the cache.
        """
        if not self._is_synced:
            return
        self._is_synced = False
        stale = engine.generate([self.probe], [0], PROBE_SAMPLING).cached_tokens
        if stale:
            raise RolloutError(
                f"debug.mode=sync_check: after a weight sync the engine took {stale} tokens of a prompt from its prefix cache, "
                "which older weights have computed. The cache must be reset with every sync."
            )
        # A second call shows whether the cache works at all. Without it, a cache that keeps nothing would always pass.
        cached = engine.generate([self.probe], [0], PROBE_SAMPLING).cached_tokens
        if not self._has_logged_cache:
            self._has_logged_cache = True
            logger.info(
                "sync check: the probe of the prefix cache has %d tokens, and %d of them are kept between two calls%s",
                len(self.probe), cached, "" if cached else ", so nothing can go stale",
            )  # fmt: skip
