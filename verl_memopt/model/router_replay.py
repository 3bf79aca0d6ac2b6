"""Router replay: the experts of each token are those that an earlier pass chose for it, or a record of what this pass chooses.

Between rollout, old log-probs and update, rounding and the optimizer's steps change which experts a router picks. Then a ratio
compares two functions, not two policies. A record holds only the numbers of the experts. Their probabilities are computed from
the router's weights in each pass, so the router keeps its gradient. Bytes of a record, for T tokens, L layers, k experts of a
token, and i = 1 byte for the number of an expert (2 if there are more than 256): T x L x k x i. A layer without
experts has zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ALL = slice(None)


class Chooser(Protocol):
    def choose(self, probabilities: Tensor) -> Tensor:
        """Return the numbers of the experts of each token, [t, k], from the probabilities of all experts, [t, E]."""


def number_dtype(num_experts: int) -> torch.dtype:
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass(eq=False)
class Routes:
    """The experts of the T tokens of a pack.

    Attributes:
        experts: uint8 or int16 [L, T, k], the experts to replay. None = record what the routers choose.
        places: int64 [T], where the record of each token belongs. None = replay.
        found: What was recorded: layer, tokens (None = all), some of these, and experts [t, k].
        compared: For each forward of a layer, on the device, int64 [2]: the number of tokens whose experts differ from the
            router's own choice, and the number of tokens.
    """

    experts: Tensor | None = None
    places: Tensor | None = None
    found: list[tuple[int, Tensor | None, slice, Tensor]] = field(default_factory=list)
    compared: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(values: Tensor, sources: np.ndarray) -> Routes:
        """Return the routes of a pack whose tokens have these places in ``values``.

        ``values`` on the host are experts [n, L, k] to replay, or places [n] for a record.
        """
        index = torch.from_numpy(sources)
        if values.ndim == 1:
            return Routes(places=values[index].long())
        # The layer first, so that a layer's experts are neighbours in memory.
        return Routes(experts=values[index].transpose(0, 1).contiguous())

    def map(self, change: Callable[[Tensor], Tensor]) -> Routes:
        experts, places = (None if tensor is None else change(tensor) for tensor in (self.experts, self.places))
        return Routes(experts, places)

    def part(self, tokens: slice) -> Routes:
        """Return the routes of some tokens. A record of a part is not possible."""
        assert self.experts is not None, "each rank would record only its own tokens"
        return Routes(self.experts[:, tokens], compared=self.compared)

    def take_compared(self) -> list[Tensor]:
        found = list(self.compared)
        self.compared.clear()
        return found

    def of_layer(self, layer: int) -> LayerRoutes:
        return LayerRoutes(self, layer, None if self.experts is None else self.experts[layer])

    def take_record(self) -> tuple[Tensor, Tensor] | None:
        """Return the places int64 [T] and the recorded experts [T, L, k], on the host. None = nothing was recorded.

        A token that a layer did not compute has expert 0 there, k times.
        """
        if self.places is None or not self.found:
            return None
        first = self.found[0][-1]
        layers = 1 + max(layer for layer, *_ in self.found)
        record = first.new_zeros(self.places.shape[0], layers, first.shape[1])
        for layer, index, part, experts in self.found:
            record[:, layer][part if index is None else index[part]] = experts
        self.found = []
        return self.places.cpu(), record.cpu()


@dataclass(eq=False)
class LayerRoutes:
    """The experts of some tokens of a pack in one layer. ``index``, int64 [t], are these tokens. None = all."""

    routes: Routes
    layer: int
    experts: Tensor | None
    """[t, k], the experts to replay. None = record."""
    index: Tensor | None = None

    def at(self, index: Tensor | None) -> LayerRoutes:
        if index is None:
            return self
        return LayerRoutes(self.routes, self.layer, None if self.experts is None else self.experts[index], index)

    def choose(self, router: Chooser, probabilities: Tensor, part: slice = ALL) -> Tensor:
        """Return the experts of the tokens at ``part``, [t, k]. ``probabilities`` [t, E] are those of all experts."""
        chosen = router.choose(probabilities)
        if self.experts is None:
            self.routes.found.append((self.layer, self.index, part, chosen))
            return chosen
        replayed = self.experts[part]
        self.routes.compared.append(_compared(replayed, chosen))
        return replayed

    def again(self, router: Chooser, probabilities: Tensor, part: slice) -> Tensor:
        """Return what :meth:`choose` returned in the forward."""
        return router.choose(probabilities) if self.experts is None else self.experts[part]


def _compared(replayed: Tensor, chosen: Tensor) -> Tensor:
    differs = (replayed.sort(-1).values != chosen.sort(-1).values).any(-1)
    # A token without a record has one expert several times. Its output is not used.
    is_known = torch.ones_like(differs) if replayed.shape[1] == 1 else replayed[:, 0] != replayed[:, -1]
    return torch.stack([(differs & is_known).sum(), is_known.sum()])
