"""Mixtures of experts: a router sends each token to k of E small MLPs, and their outputs are summed with the router's weights.

Of a block's experts only the input is kept for backward (of its norm, if ``recompute_elementwise`` is on) and which experts
each token went to. With ``tiled_mlp`` off the outputs of gate and up are kept too. Rows are computed expert by expert, some
experts at a time. So the gradient of an expert's weights is one product and needs no sum, however many tiles there are.

Bytes kept by a block for T tokens, with b bytes per element of compute, hidden size h, width I of an expert, and i = 1 byte
for the number of an expert (2 if there are more than 256): T x h x b + T x k x i, and T x k x 2 x I x b more with ``tiled_mlp``
off. The residual is kept for attention too. Without ``recompute_elementwise`` autograd keeps the norm beside this.
``plan/formulas.py`` has what its backward holds.

Sums of k outputs are in fp32, in the order of the experts. In fp32 results differ from those of transformers only by the order
of sums.

Some families have a shared expert too: a dense MLP for all tokens, in Qwen3.5 times the sigmoid of a gate. It keeps nothing of
its own, with or without ``tiled_mlp``, and runs over tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl_memopt.memory.activation_checkpointing_torch import Forward
from verl_memopt.memory.expert_lora_torch import factors_and_scales
from verl_memopt.memory.quantized_frozen_torch import EXPERTS, PACKED
from verl_memopt.memory.recompute_elementwise_torch import (
    RMSNorm,
    keep,
    kept,
    norm_and_weight,
    product_tiles,
    sum_of,
    wide_dtype,
)
from verl_memopt.memory.tiled_mlp_torch import LAYERS, TiledLinear, TiledMlp, Traits, tensors_and_traits, tiled_linears
from verl_memopt.model.expert_products import ExpertLinear, ExpertSum, ExpertTile, RoutedRows, of_experts, turned_weights
from verl_memopt.model.families import CORRECTION
from verl_memopt.model.mixture_kind import ClampedGate, MixtureKind, Router, SigmoidRouter
from verl_memopt.model.router_replay import ALL, LayerRoutes


class Experts(nn.Module):
    """The experts of a block and their router."""

    def __init__(self, source: Any, options: Any) -> None:
        """``source`` is the block's mixture in transformers, and ``options`` are the block's ``BlockOptions``."""
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        # Modules that only hold parameters under their names: `experts.gate_up_proj` [E, 2 x I, h], `experts.down_proj` [E, h, I]
        # and `gate.weight` [E, h]; of some families also `shared_expert`, an MLP, and `shared_expert_gate.weight` [1, h], or
        # `shared_experts`, one MLP without a gate; or in gpt-oss `router` and `experts`, which have biases too. In the order of
        # transformers, because optimizer states have the order of the parameters.
        for name, part in source.named_children():
            self.add_module(name, part)
        self._router_name = "gate" if hasattr(source, "gate") else "router"
        router: Any = getattr(source, self._router_name)
        if hasattr(router, CORRECTION):
            groups = router.num_group, router.topk_group
            own = SigmoidRouter(router.top_k, router.norm_topk_prob, router.routed_scaling_factor, *groups)
            self.kind = MixtureKind(own)
        elif self._router_name == "gate":
            # Families without this field always divide.
            self.kind = MixtureKind(Router(router.top_k, getattr(router, "norm_topk_prob", True)))
        else:
            clamped = ClampedGate(source.experts.alpha, source.experts.limit)
            self.kind = MixtureKind(Router(router.top_k, False, over_chosen=True), clamped, transposed=True)
        self.place = 0
        """The number of its block, set by the decoder."""

    @property
    def sums(self) -> bool:
        # Whether to call forward_sum(), which also adds attention's output to the residual.
        return bool(self.options.recompute)

    @property
    def mixture(self) -> Mixture:
        # Read at each pass: FSDP2 replaces parameters while a block computes.
        own, router = self.get_submodule("experts"), self.get_submodule(self._router_name)
        weights, kind = stored_experts(own, self._kind(router))
        found: Any = [router.weight, *weights]
        if hasattr(own, "down_proj_bias"):
            found += [router.bias, own.gate_up_proj_bias, own.down_proj_bias]
        shared: Any = getattr(self, "shared_expert", getattr(self, "shared_experts", None))
        layers = [] if shared is None else [getattr(shared, name) for name in LAYERS]
        layers += [self.shared_expert_gate] if hasattr(self, "shared_expert_gate") else []
        tensors, traits = tensors_and_traits(layers)
        factors, scales = factors_and_scales(own)
        return Mixture(kind, (*found, *factors, *tensors), tuple(traits), scales)

    def _kind(self, router: Any) -> MixtureKind:
        own = self.kind.router
        if not isinstance(own, SigmoidRouter):
            return self.kind
        # A buffer, which is replaced when the model is allocated.
        return replace(self.kind, router=replace(own, correction=getattr(router, CORRECTION)))

    def forward_sum(
        self,
        residual: Tensor,
        attended: Tensor,
        norm: Any,
        least_tiles: int,
        checkpoint: Forward | None = None,
        post: Any = None,
        routed: LayerRoutes | None = None,
    ) -> Tensor:
        """Return z + experts(norm(z)) [1, T, h], where z = residual + attended [T, h]. See :meth:`MLP.forward_sum`.

        ``least_tiles`` is not read: the number of rows in a tile of experts is bounded without it.
        """
        del least_tiles
        assert post is None, "no family has a norm of the outputs of experts"
        mixture = self.mixture._replace(routed=routed)
        return mixed(residual, attended, norm_and_weight(norm), mixture, self.options.mlp_tiles, checkpoint)

    def forward(self, hidden: Tensor, norm: Any, post: Any = None, routed: LayerRoutes | None = None) -> Tensor:
        """Return ``hidden`` plus the experts' output for it. ``hidden`` [1, T, h] is the input of ``norm``."""
        assert post is None, "no family has a norm of the outputs of experts"
        mixture = self.mixture._replace(routed=routed)
        return hidden + mixed(None, norm(hidden.squeeze(0)), None, mixture, self.options.mlp_tiles)


def stored_experts(experts: Any, kind: MixtureKind) -> tuple[list[Any], MixtureKind]:
    """Return the weights of gate and up and of down of all experts, or their bytes. The kind then says how to decode these."""
    packed: Any = getattr(experts, "packed", None)
    if packed is None:
        return [getattr(experts, name) for name in EXPERTS], kind
    stored = [getattr(experts, name + PACKED) for name in EXPERTS]
    return stored, replace(kind, transposed=False, packed=tuple(packed.values()))


class Mixture(NamedTuple):
    kind: MixtureKind
    tensors: tuple[Any, ...]
    """The weights of the router [E, h], of gate and up [E, 2 x I, h], and of down [E, h, I]. Then their biases, if they have any:
    [E], [E, 2 x I] and [E, h]. Frozen weights of experts may be bytes (:data:`PACKED`). They are decoded one by one for each
    product. Then the adapters of gate and up, A [E, rank, h] and B [E, 2 x I, rank], and those of down, A [E, rank, I] and B
    [E, h, rank]; None = that weight has none. If there is a shared expert, then the tensors of its gate, up and down, and of its
    own gate if it has one, as :func:`tensors_and_traits` returns them."""
    traits: tuple[Traits, ...] = ()
    """Those of the shared expert's layers. () = there is no shared expert."""
    scales: tuple[float, ...] = ()
    """Scales of the adapters of gate and up, and of down. () = no expert has adapters, and ``tensors`` has no places for them."""
    routed: LayerRoutes | None = None
    """Replays or records the experts of the tokens. None = the router chooses, and nothing is recorded."""

    @property
    def num_routed(self) -> int:
        """Number of tensors before those of the shared expert."""
        return len(self.tensors) - 4 * len(self.traits)

    @property
    def places(self) -> tuple[tuple[int | None, ...], ...]:
        """Where the router's weight and bias are among the tensors, and weights, biases, A and B of gate and up, and of down.

        None = there is none.
        """
        factors = self.num_routed - 2 * len(self.scales)
        router, gate_up, down = ((place, place + 3 if factors > 3 else None) for place in range(3))
        if not self.scales:
            return router, (*gate_up, None, None), (*down, None, None)
        return router, (*gate_up, factors, factors + 1), (*down, factors + 2, factors + 3)

    @property
    def gate(self) -> list[Tensor]:
        """The router's weight, and its bias if it has one."""
        return [self.tensors[place] for place in self.places[0] if place is not None]


def mixed(
    residual: Tensor | None,
    x: Tensor,
    norm: tuple[RMSNorm, Tensor] | None,
    mixture: Mixture,
    tiles: int | None,
    checkpoint: Forward | None = None,
) -> Tensor:
    """Return z + experts(norm(z)) [1, T, h], where z = residual + x [T, h]. Without a norm return experts(x) [1, T, h].

    If anything needs a gradient, residual, x and the parameters are kept for backward. With a norm, backward overwrites x, so
    nothing else may use it.

    Args:
        residual: [T, h]. None = there is no norm.
        x: [T, h].
        norm: The norm and its weight [h].
        mixture: The experts.
        tiles: Compute in at least this many tiles of experts. None = also keep the outputs of gate and up.
        checkpoint: As in :func:`verl_memopt.memory.tiled_mlp_torch.recomputed_mlp`.
    """
    tensors, routed = mixture.tensors, mixture.routed
    keeps = tiles is None and torch.is_grad_enabled() and checkpoint is None
    shape = MixShape(mixture._replace(tensors=(), routed=None), 1 if tiles is None else tiles, keeps)
    norm_weight = None if norm is None else norm[1]
    if checkpoint == "again":
        node = keep(x, residual, norm_weight, *tensors, None if routed is None else routed.experts)
        return _Mixed.apply(shape, norm and norm[0], node, None, residual, x, norm_weight, *tensors)
    with torch.no_grad():
        prepared = _prepare(residual, x, norm, mixture)
    if checkpoint == "first" or not torch.is_grad_enabled():
        return _computed(prepared, shape, tensors, None)
    # Before the products, so that the second forward of a checkpointed block stops here.
    node = keep(x, residual, norm_weight, *tensors, prepared.chosen)
    return _Mixed.apply(shape, norm and norm[0], node, [prepared], residual, x, norm_weight, *tensors)


class MixShape(NamedTuple):
    mixture: Mixture
    """Without its tensors."""
    tiles: int
    keeps: bool
    """Whether the outputs of gate and up are kept."""


class _Prepared(NamedTuple):
    normal: Tensor  # [T, h], the input of the experts
    out: Tensor  # [1, T, h], to which their output is added
    chosen: Tensor  # [T, k]
    weights: Tensor  # fp32 [T, k]


def _prepare(residual: Tensor | None, x: Tensor, norm: tuple[RMSNorm, Tensor] | None, mixture: Mixture) -> _Prepared:
    router, routed = mixture.kind.router, mixture.routed
    if norm is None or residual is None:
        normal, out = x, torch.zeros_like(x[None])
    else:
        out = torch.empty_like(x[None])
        normal = norm[0].compute_sum(residual, x, out[0], norm[1])
    scores = router.scores(normal, *mixture.gate)
    chosen = router.choose(scores) if routed is None else routed.choose(router, scores)
    return _Prepared(normal, out, chosen, router.weights(scores, chosen))


def _computed(prepared: _Prepared, shape: MixShape, tensors: Sequence[Any], gates: Tensor | None) -> Tensor:
    experts = TiledExperts(shape.mixture._replace(tensors=tuple(tensors)), shape.tiles)
    routes = prepared.chosen, prepared.weights
    experts.add_output(prepared.normal, prepared.out[0], routes, gates)
    return prepared.out


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: MixShape,
        norm: RMSNorm | None,
        node: Any,
        prepared: list[_Prepared] | None,
        residual: Tensor | None,
        x: Tensor,
        norm_weight: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        ctx.shape, ctx.norm, ctx.kept, ctx.gates = shape, norm, node, None
        if prepared is None:  # nobody reads the values
            return x.new_empty(1).expand(x[None].shape)
        gates = None
        if shape.keeps:
            gates = x.new_empty(prepared[0].chosen.numel(), turned_weights(tensors[1], shape.mixture.kind.transposed).shape[1])
            ctx.save_for_backward(gates)
        # Popped, so that the caller's list does not keep the normed input.
        return _computed(prepared.pop(), shape, tensors, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, residual, norm_weight, *tensors, chosen = kept(ctx)
        gates = ctx.saved_tensors[0] if ctx.shape.keeps else None
        grad, needed, norm = grad[0].contiguous(), ctx.needs_input_grad[4:], ctx.norm
        through = any(needed[:3])
        # Without a norm x belongs to another function, and the gradient must not overwrite it.
        normal = x.clone() if norm is None else norm.compute_sum(residual, x, x, norm_weight)
        experts = TiledExperts(ctx.shape.mixture._replace(tensors=tuple(tensors)), ctx.shape.tiles, needed[3:])
        experts.backward(grad, normal, True, through, chosen, gates)
        grad_x, norm_sum = normal if through else None, None
        if norm is not None and through:
            grad_x = torch.empty_like(x)
            norm_sum = sum_of(norm_weight, [slice(0, len(x))], x) if needed[2] else None
            norm.differentiate(normal, (x,), (norm_weight,), (grad_x,), (norm_sum,), grad)
        norm_grad = None if norm_sum is None else norm_sum.to(norm_weight.dtype)
        return *(None,) * 4, None if norm is None else grad_x, grad_x, norm_grad, *experts.gradients()


class TiledExperts:
    """Computes a mixture inside an autograd function, for rows y [t, h] that are normed.

    Of the mixture's tensors those that are ``needed`` get a gradient (None = none). ``tiles`` is the least number of tiles of
    experts, and of tokens for a shared expert.
    """

    def __init__(self, mixture: Mixture, tiles: int = 1, needed: Sequence[bool] | None = None) -> None:
        kind, tensors, traits, scales, self._routed = mixture
        self._router, self._value, self._tiles = kind.router, kind.gate, tiles
        wanted, self._num_routed = (False,) * len(tensors) if needed is None else needed, mixture.num_routed
        self._places = mixture.places
        router: Any
        router, gate_up, down = ([None if at is None else tensors[at] for at in own] for own in self._places)
        self._gate, self._gate_bias = router
        of_router, of_gate_up, of_down = ([at is not None and wanted[at] for at in own] for own in self._places)
        self._router_sums = [ExpertSum(tensor) if want else None for tensor, want in zip(router, of_router, strict=True)]
        scales = scales or (0.0, 0.0)
        self._gate_up = ExpertLinear(gate_up, kind.transposed, scales[0], kind.packed[0], of_gate_up)
        self._down = ExpertLinear(down, kind.transposed, scales[1], kind.packed[1], of_down)
        shared = slice(self._num_routed, None)
        self._shared = _SharedExpert(tensors[shared], traits, wanted[shared]) if traits else None

    def add_output(
        self,
        normal: Tensor,
        out: Tensor,
        routes: tuple[Tensor, Tensor] | None = None,
        gates: Tensor | None = None,
        part: slice = ALL,
    ) -> None:
        """Add the experts' output for ``normal`` to ``out``, [t, h] each.

        Args:
            normal: The input.
            out: Gets the sum.
            routes: The experts of each token and their weights, [t, k] each. None = the router chooses.
            gates: [t x k, 2 x I], gets the outputs of gate and up, in the order of the experts. None = they are not needed.
            part: Which of the routed tokens these are.
        """
        if routes is None:
            scores, routed = self._router.scores(normal, self._gate, self._gate_bias), self._routed
            chosen = self._router.choose(scores) if routed is None else routed.choose(self._router, scores, part)
            routes = chosen, self._router.weights(scores, chosen)
            del scores
        chosen, weights = routes
        total = out if out.dtype == wide_dtype(out.dtype) else torch.zeros_like(out, dtype=wide_dtype(out.dtype))
        by_row, rows = weights.flatten(), RoutedRows(chosen, len(self._gate_up.weights))
        for tile in rows.tiles(self._tiles):
            tokens = rows.tokens[tile.rows]
            both = self._gate_up.output(normal[tokens], tile, None if gates is None else gates[tile.rows])
            # The value overwrites the output of gate, unless backward needs it.
            value = self._value.value(both, gates is None)
            del both
            parts = self._down.output(value, tile)
            del value
            total.index_add_(0, tokens, parts * by_row[rows.order[tile.rows], None])
            del parts
        if self._shared is not None:
            for cut in product_tiles(normal, self._tiles):
                self._shared.add_output(normal[cut], total[cut])
        if total is not out:
            out.add_(total)

    def backward(
        self,
        grad: Tensor,
        normal: Tensor,
        alone: bool,
        through: bool = True,
        chosen: Tensor | None = None,
        gates: Tensor | None = None,
        given: Tensor | None = None,
        part: slice = ALL,
    ) -> Tensor:
        """Add the gradients of the parameters, and overwrite ``normal`` with its gradient.

        Return the gradient of the weights of each token's experts, [t, k].

        Args:
            grad: The gradient of the output, [t, h].
            normal: The input, [t, h].
            alone: Whether these are all rows. Then the gradients of weights need no fp32 sums.
            through: Whether the input needs a gradient.
            chosen: The experts of each token, [t, k]. None = the router chooses again.
            gates: What :meth:`add_output` wrote into its ``gates``. It is overwritten. None = computed again.
            given: The weights of the chosen experts, [t, k], of a router whose input is not ``normal``. Then the caller computes
                the router's gradients. None = its router's.
            part: As in :meth:`add_output`.
        """
        scores = None if given is not None else self._router.scores(normal, self._gate, self._gate_bias)
        if chosen is None:
            assert scores is not None, "the experts of given weights are given too"
            routed = self._routed
            chosen = self._router.choose(scores) if routed is None else routed.again(self._router, scores, part)
        weights = given if scores is None else self._router.weights(scores, chosen)
        assert weights is not None
        rows, grad_weights = RoutedRows(chosen, len(self._gate_up.weights)), torch.empty_like(weights)
        total = torch.zeros_like(normal, dtype=weights.dtype) if through else None
        for tile in rows.tiles(self._tiles):
            tokens, places = rows.tokens[tile.rows], rows.order[tile.rows]
            x, row_weights = normal[tokens], weights.view(-1)[places, None]
            both = self._gate_up.output(x, tile) if gates is None else gates[tile.rows]
            grad_weights.view(-1)[places] = self._through_value(grad[tokens], both, row_weights, tile, alone)
            # Gate and up are overwritten by their gradients.
            self._gate_up.add(both, x, tile, alone)
            self._gate_up.add_bias(both, tile, alone)
            if total is not None:
                total.index_add_(0, tokens, self._gate_up.through(both, tile).to(total.dtype))
            del both, x
        if scores is not None:
            self._add_router(grad_weights, (scores, chosen), normal, total, alone)
        if self._shared is not None:
            # Last, because it overwrites its input with its gradient.
            cuts = product_tiles(normal, self._tiles)
            for cut in cuts:
                self._shared.backward(grad[cut], normal[cut], alone and len(cuts) == 1, through)
            if total is not None:
                total.add_(normal)
        if total is not None:
            normal.copy_(total)
        return grad_weights

    def _through_value(self, above: Tensor, both: Tensor, row_weights: Tensor, tile: ExpertTile, alone: bool) -> Tensor:
        """Overwrite gate and up [r, 2 x I] of a tile with their gradients, and add to the gradients of down's tensors.

        ``above`` [r, h] is the gradient of the experts' sum, and ``row_weights`` [r, 1] are the router's. It may overwrite the
        first. Return the gradient of the router's weights [r].
        """
        value, grad_value = self._value.value(both, False), self._down.through(above, tile)
        # The gradient of a weight is the product of an output with the gradient, which is the same for the value before down.
        through_weights = (value * grad_value.to(row_weights.dtype)).sum(-1)
        if self._down.bias is not None:
            for expert, own in of_experts(tile):
                through_weights[own] += (above[own] @ self._down.bias[expert]).to(row_weights.dtype)
        self._down.add(above, value.mul_(row_weights), tile, alone)
        if self._down.sums_bias:
            self._down.add_bias(above.mul_(row_weights), tile, alone)
        del above, value
        self._value.differentiate(grad_value.mul_(row_weights), both)
        return through_weights

    def _add_router(
        self, grad_weights: Tensor, routes: tuple[Tensor, Tensor], normal: Tensor, total: Tensor | None, alone: bool
    ) -> None:
        # ``routes`` are scores, which are overwritten, and the experts of each token. ``total`` gets the gradient of the input.
        weight_sum, bias_sum = self._router_sums
        if total is None and weight_sum is None and bias_sum is None:
            return
        grad_logits = self._router.differentiate(grad_weights, *routes).to(normal.dtype)
        if bias_sum is not None:
            bias_sum.add_vector(grad_logits, alone)
        if weight_sum is not None:
            weight_sum.add_matrix(grad_logits, normal, alone)
        if total is not None:
            total.addmm_(grad_logits.to(total.dtype), self._gate.to(total.dtype))

    def gradients(self) -> list[Tensor | None]:
        # Return the gradients of the mixture's tensors, in their order.
        found: list[Tensor | None] = [None] * self._num_routed
        of_router = [None if total is None else total.gradient() for total in self._router_sums]
        for places, own in zip(self._places, (of_router, self._gate_up.gradients(), self._down.gradients()), strict=True):
            for place, gradient in zip(places, own, strict=True):
                if place is not None:
                    found[place] = gradient
        return found if self._shared is None else [*found, *self._shared.gradients()]


class _SharedExpert:
    """Computes sigmoid(w y) x MLP(y) for normed rows y [t, h] inside an autograd function, where w [1, h] is a gate.

    Without a gate it computes MLP(y). ``tensors`` and ``traits`` are those of a :class:`Mixture`, of which the ``needed`` ones
    get a gradient. The MLP has no biases.
    """

    def __init__(self, tensors: Sequence[Tensor | None], traits: Sequence[Traits], needed: Sequence[bool]) -> None:
        self._mlp = TiledMlp(tensors[:12], traits[:3], needed[:12])
        gates = tiled_linears(tensors[12:], traits[3:], needed[12:])
        self._gate = gates[0] if gates else None

    def add_output(self, normal: Tensor, out: Tensor) -> None:
        # ``out`` [t, h] may be wider than ``normal``.
        product = self._mlp.output(normal).to(out.dtype)
        if self._gate is None:
            out.add_(product)
        else:
            out.addcmul_(product, self._share(normal, self._gate).to(out.dtype))

    def backward(self, grad: Tensor, normal: Tensor, alone: bool, through: bool) -> None:
        """As in :class:`TiledMlp`."""
        gate = self._gate
        if gate is None:
            self._mlp.backward(grad, normal, alone, through)
            return
        share = self._share(normal, gate)
        at_gate = normal.new_empty(share.shape)

        def through_gate(above: Tensor, product: Tensor) -> Tensor:
            by_share = (above.to(share.dtype) * product).sum(-1, keepdim=True)
            at_gate.copy_(by_share * share * (1 - share))
            gate.add(at_gate, normal, alone)
            return torch.mul(above, share.to(above.dtype), out=product)

        self._mlp.backward(grad, normal, alone, through, through_gate)
        if through:
            gate.through(at_gate, normal, add=True)

    def gradients(self) -> list[Tensor | None]:
        return [*self._mlp.gradients(), *(() if self._gate is None else self._gate.gradients())]

    @staticmethod
    def _share(normal: Tensor, gate: TiledLinear) -> Tensor:
        # fp32 or wider [t, 1]
        return gate.output(normal).to(wide_dtype(normal.dtype)).sigmoid()
