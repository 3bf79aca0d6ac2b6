"""Mixtures of experts: a router sends each token to k of E small MLPs, and their outputs are summed with the router's weights.

Of a block's experts only the input is kept for backward (of its norm, if ``recompute_elementwise`` is on) and which experts
each token went to. With ``tiled_mlp`` off the outputs of gate and up are kept too. Rows are computed expert by expert, some
experts at a time. So the gradient of an expert's weights is one product and needs no sum, however many tiles there are.

Bytes kept by a block for T tokens, with b bytes per element of compute, hidden size h, width I of an expert, and i = 1 byte
for the number of an expert (2 if there are more than 256): T x h x b + T x k x i, and T x k x 2 x I x b more with ``tiled_mlp``
off. The residual is kept for attention too. Without ``recompute_elementwise`` autograd keeps the norm beside this.
``plan/formulas.py`` has what its backward holds.

Sums of k outputs are in fp32, in the order of the experts. In fp32 results differ from those of transformers only by the order
of sums. The router computes as transformers does: a softmax in fp32 over all experts, then the k largest, divided by their sum if
the config says so (``norm_topk_prob``). In gpt-oss the softmax is over the k largest logits. Its weights stay in fp32, as in
vLLM; transformers rounds them to the model's dtype.

Some families have a shared expert too: a dense MLP for all tokens, times the sigmoid of a gate. It keeps nothing of its own, with
or without ``tiled_mlp``, and runs over tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.autograd.function import once_differentiable

from verl_memopt.memory.activation_checkpointing_torch import Forward
from verl_memopt.memory.fused import over_rows
from verl_memopt.memory.quantized_frozen import mxfp4_width
from verl_memopt.memory.quantized_frozen_torch import PACKED, mxfp4_weight
from verl_memopt.memory.recompute_elementwise import PRODUCT_ROWS
from verl_memopt.memory.recompute_elementwise_torch import (
    RMSNorm,
    SwiGLU,
    add_product,
    keep,
    kept,
    norm_and_weight,
    product_tiles,
    sum_of,
    wide_dtype,
)
from verl_memopt.memory.tiled_mlp_torch import LAYERS, TiledMlp, Traits, tensors_and_traits, tiled_linears
from verl_memopt.model.router_replay import ALL, LayerRoutes, number_dtype

SWIGLU = SwiGLU()


@dataclass(frozen=True)
class Router:
    top_k: int
    """Number of experts that compute a token."""
    renormalizes: bool
    """Whether the weights of a token's experts are divided by their sum."""
    over_chosen: bool = False
    """Whether the softmax is over the logits of a token's experts alone. The scores are then the logits."""

    def scores(self, normal: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the probabilities of all experts, or their logits, fp32 or wider [T, E].

        ``normal`` are normed rows [T, h]. ``weight`` is [E, h] and ``bias`` [E].
        """
        logits = torch.mm(normal, weight.t(), out=normal.new_empty(normal.shape[0], weight.shape[0]))
        if bias is not None:
            logits.add_(bias)
        wide = wide_dtype(logits.dtype)
        return logits.to(wide) if self.over_chosen else logits.softmax(-1, dtype=wide)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the likeliest experts, uint8 or int16 [T, k], the likeliest first."""
        # The largest probabilities where transformers takes these, not logits: ties are then broken as there.
        chosen = scores.topk(self.top_k, dim=-1).indices
        return chosen.to(number_dtype(scores.shape[1]))

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        found = scores.gather(1, chosen.long())
        if self.over_chosen:
            return found.softmax(-1)
        return found / found.sum(-1, keepdim=True) if self.renormalizes else found

    def differentiate(self, grad: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the gradient of the logits [T, E] from that of the weights [T, k]. It overwrites the scores."""
        index = chosen.long()
        if self.over_chosen:
            through = grad * (weights := self.weights(scores, chosen))
            return scores.zero_().scatter_(1, index, through.sub_(weights * through.sum(-1, keepdim=True)))
        found = scores.gather(1, index)
        if self.renormalizes:
            total = found.sum(-1, keepdim=True)
            grad = (grad - (grad * found).sum(-1, keepdim=True) / total) / total
        through = grad * found
        return scores.mul_(through.sum(-1, keepdim=True).neg_()).scatter_add_(1, index, through)


@dataclass(frozen=True)
class SiluGate:
    """silu(gate) * up, of an expert whose outputs [r, 2 x I] have the I columns of gate before those of up."""

    def value(self, both: Tensor, overwrites: bool) -> Tensor:
        """Return the value [r, I], which may overwrite its inputs."""
        gate, up = both.chunk(2, 1)
        return SWIGLU.compute((gate, up), (), gate if overwrites else None)

    def differentiate(self, grad: Tensor, both: Tensor) -> None:
        """Overwrite ``both`` with its gradient. ``grad`` [r, I] is that of the value."""
        sources = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        SWIGLU.differentiate(grad, sources, (), sources, ())


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), of an expert whose outputs [r, 2 x I] have gate and up by turns (gpt-oss).

    Before, gate is cut at ``limit`` from above, and up at ``limit`` from both sides. Methods are those of :class:`SiluGate`.
    """

    alpha: float
    limit: float

    def value(self, both: Tensor, overwrites: bool) -> Tensor:
        del overwrites  # products need columns without gaps
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        over_rows(_clamped_gate, (both, out), self.alpha, self.limit, narrow=True)
        return out

    def differentiate(self, grad: Tensor, both: Tensor) -> None:
        over_rows(_clamped_gate_gradient, (both, grad), self.alpha, self.limit, narrow=True)


def _clamped_gate(both: Tensor, out: Tensor, alpha: float, limit: float) -> None:
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    torch.mul(up + 1, gate * torch.sigmoid(gate * alpha), out=out)


def _clamped_gate_gradient(both: Tensor, grad: Tensor, alpha: float, limit: float) -> None:
    first, second = both[:, ::2], both[:, 1::2]
    gate, up = first.clamp(max=limit), second.clamp(-limit, limit)
    share = (gate * alpha).sigmoid_()
    value = gate.mul_(share)
    slope = (1 - share).mul_(value).mul_(alpha).add_(share)
    del share  # in place and freed early, because a tile has room for four tensors
    grad_gate = up.add_(1).mul_(slope).mul_(grad).masked_fill_(first > limit, 0)
    first.copy_(grad_gate)
    second.copy_(value.mul_(grad).masked_fill_((second > limit) | (second < -limit), 0))


@dataclass(frozen=True)
class MixtureKind:
    """How tokens find their experts, and what an expert computes."""

    router: Router
    gate: SiluGate | ClampedGate = SiluGate()
    transposed: bool = False
    """Whether weights of experts are stored as [E, h, 2 x I] and [E, I, h]."""


class Experts(nn.Module):
    """The experts of a block and their router."""

    def __init__(self, source: Any, options: Any) -> None:
        """``source`` is the block's mixture in transformers, and ``options`` are the block's ``BlockOptions``."""
        super().__init__()
        self.source_class, self.options = type(source).__name__, options
        # Modules that only hold parameters under their names: `experts.gate_up_proj` [E, 2 x I, h], `experts.down_proj` [E, h, I]
        # and `gate.weight` [E, h]; of some families also `shared_expert`, an MLP, and `shared_expert_gate.weight` [1, h]; or in
        # gpt-oss `router` and `experts`, which have biases too. In the order of transformers, because optimizer states have the
        # order of the parameters.
        for name, part in source.named_children():
            self.add_module(name, part)
        self._router_name = "gate" if hasattr(source, "gate") else "router"
        router: Any = getattr(source, self._router_name)
        if self._router_name == "gate":
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
        stored = PACKED if hasattr(own, f"down_proj{PACKED}") else ""
        found: Any = [router.weight, getattr(own, f"gate_up_proj{stored}"), getattr(own, f"down_proj{stored}")]
        if hasattr(own, "down_proj_bias"):
            found += [router.bias, own.gate_up_proj_bias, own.down_proj_bias]
        shared: Any = getattr(self, "shared_expert", None)
        layers = [] if shared is None else [*(getattr(shared, name) for name in LAYERS), self.shared_expert_gate]
        tensors, traits = tensors_and_traits(layers)
        return Mixture(self.kind, (*found, *tensors), tuple(traits))

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


class Mixture(NamedTuple):
    kind: MixtureKind
    tensors: tuple[Any, ...]
    """The weights of the router [E, h], of gate and up [E, 2 x I, h], and of down [E, h, I]. Then their biases, if they have any:
    [E], [E, 2 x I] and [E, h]. Frozen weights of experts may be the bytes of MXFP4 (:data:`PACKED`). They are decoded one by one
    for each product. If there is a shared expert, then the tensors of its gate, up and down, and of its own gate, as
    :func:`tensors_and_traits` returns them."""
    traits: tuple[Traits, ...] = ()
    """Those of the shared expert's layers. () = there is no shared expert."""
    routed: LayerRoutes | None = None
    """Replays or records the experts of the tokens. None = the router chooses, and nothing is recorded."""

    @property
    def num_routed(self) -> int:
        """Number of tensors before those of the shared expert."""
        return len(self.tensors) - 4 * len(self.traits)

    @property
    def gate(self) -> tuple[Tensor, ...]:
        """The router's weight, and its bias if it has one."""
        return (self.tensors[0], *self.tensors[3 : self.num_routed][:1])


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
    kind, tensors, traits, routed = mixture
    keeps = tiles is None and torch.is_grad_enabled() and checkpoint is None
    shape = MixShape(kind, traits, 1 if tiles is None else tiles, keeps)
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
    kind: MixtureKind
    traits: tuple[Traits, ...]
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
    experts = TiledExperts(Mixture(shape.kind, tuple(tensors), shape.traits), shape.tiles)
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
            gates = x.new_empty(prepared[0].chosen.numel(), _turned(tensors[1], shape.kind.transposed).shape[1])
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
        experts = TiledExperts(Mixture(ctx.shape.kind, tuple(tensors), ctx.shape.traits), ctx.shape.tiles, needed[3:])
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
        kind, tensors, traits, self._routed = mixture
        self._router, self._value, self._tiles = kind.router, kind.gate, tiles
        wanted, routed = (False,) * len(tensors) if needed is None else needed, mixture.num_routed
        self._gate, (self._gate_up, self._down) = tensors[0], (_turned(weight, kind.transposed) for weight in tensors[1:3])
        biases: Sequence[Tensor | None] = tensors[3:routed] or (None,) * 3
        self._gate_bias, self._gate_up_bias, self._down_bias = biases
        turned = (False, kind.transposed, kind.transposed, False, False, False)
        self._sums = [
            _ExpertSum(tensor, turn) if want else None
            for tensor, turn, want in zip(tensors[:routed], turned, wanted, strict=False)
        ]
        self._bias_sums = self._sums[3:] or [None] * 3
        self._shared = _SharedExpert(tensors[routed:], traits, wanted[routed:]) if traits else None

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
        by_row, rows = weights.flatten(), _Rows(chosen, len(self._gate_up))
        for tile in rows.tiles(self._tiles):
            tokens = rows.tokens[tile.rows]
            both = _products(normal[tokens], self._gate_up, tile, None if gates is None else gates[tile.rows], self._gate_up_bias)
            # The value overwrites the output of gate, unless backward needs it.
            value = self._value.value(both, gates is None)
            del both
            parts = _products(value, self._down, tile, bias=self._down_bias)
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
        part: slice = ALL,
    ) -> None:
        """Add the gradients of the parameters, and overwrite ``normal`` with its gradient.

        Args:
            grad: The gradient of the output, [t, h].
            normal: The input, [t, h].
            alone: Whether these are all rows. Then the gradients of weights need no fp32 sums.
            through: Whether the input needs a gradient.
            chosen: The experts of each token, [t, k]. None = the router chooses again.
            gates: What :meth:`add_output` wrote into its ``gates``. It is overwritten. None = computed again.
            part: As in :meth:`add_output`.
        """
        scores, routed = self._router.scores(normal, self._gate, self._gate_bias), self._routed
        if chosen is None:
            chosen = self._router.choose(scores) if routed is None else routed.again(self._router, scores, part)
        weights = self._router.weights(scores, chosen)
        rows, by_row, grad_weights = _Rows(chosen, len(self._gate_up)), weights.flatten(), torch.empty_like(weights)
        total = torch.zeros_like(normal, dtype=weights.dtype) if through else None
        (gate_up_sum, down_sum), (gate_bias_sum, gate_up_bias_sum, down_bias_sum) = self._sums[1:3], self._bias_sums
        for tile in rows.tiles(self._tiles):
            tokens, places = rows.tokens[tile.rows], rows.order[tile.rows]
            row_weights, above = by_row[places, None], grad[tokens]
            x = normal[tokens]
            both = _products(x, self._gate_up, tile, bias=self._gate_up_bias) if gates is None else gates[tile.rows]
            value, grad_value = self._value.value(both, False), _products_back(above, self._down, tile)
            # The gradient of a weight is the product of an output with the gradient, which is the same for the value before down.
            through_weights = (value * grad_value.to(weights.dtype)).sum(-1)
            if self._down_bias is not None:
                for expert, own in _of_experts(tile):
                    through_weights[own] += (above[own] @ self._down_bias[expert]).to(weights.dtype)
            grad_weights.view(-1)[places] = through_weights
            if down_sum is not None:
                down_sum.add(above, value.mul_(row_weights), tile, alone)
            if down_bias_sum is not None:
                down_bias_sum.add_rows(above.mul_(row_weights), tile, alone)
            del above, value
            self._value.differentiate(grad_value.mul_(row_weights), both)
            del grad_value
            if gate_up_sum is not None:
                gate_up_sum.add(both, x, tile, alone)
            if gate_up_bias_sum is not None:
                gate_up_bias_sum.add_rows(both, tile, alone)
            if total is not None:
                total.index_add_(0, tokens, _products_back(both, self._gate_up, tile).to(total.dtype))
            del both, x
        if total is not None or self._sums[0] is not None or gate_bias_sum is not None:
            grad_logits = self._router.differentiate(grad_weights, scores, chosen).to(normal.dtype)
            if gate_bias_sum is not None:
                gate_bias_sum.add_vector(grad_logits, alone)
            if self._sums[0] is not None:
                self._sums[0].add_matrix(grad_logits, normal, alone)
            if total is not None:
                total.addmm_(grad_logits.to(total.dtype), self._gate.to(total.dtype))
        if self._shared is not None:
            # Last, because it overwrites its input with its gradient.
            cuts = product_tiles(normal, self._tiles)
            for cut in cuts:
                self._shared.backward(grad[cut], normal[cut], alone and len(cuts) == 1, through)
            if total is not None:
                total.add_(normal)
        if total is not None:
            normal.copy_(total)

    def gradients(self) -> list[Tensor | None]:
        # Return the gradients of the mixture's tensors, in their order.
        routed = [None if total is None else total.gradient() for total in self._sums]
        return routed if self._shared is None else [*routed, *self._shared.gradients()]


class _SharedExpert:
    """Computes sigmoid(w y) x MLP(y) for normed rows y [t, h] inside an autograd function, where w [1, h] is a gate.

    ``tensors`` and ``traits`` are those of a :class:`Mixture`, of which the ``needed`` ones get a gradient. The MLP has no
    biases.
    """

    def __init__(self, tensors: Sequence[Tensor | None], traits: Sequence[Traits], needed: Sequence[bool]) -> None:
        self._mlp = TiledMlp(tensors[:12], traits[:3], needed[:12])
        (self._gate,) = tiled_linears(tensors[12:], traits[3:], needed[12:])

    def add_output(self, normal: Tensor, out: Tensor) -> None:
        # ``out`` [t, h] may be wider than ``normal``.
        out.addcmul_(self._mlp.output(normal).to(out.dtype), self._share(normal).to(out.dtype))

    def backward(self, grad: Tensor, normal: Tensor, alone: bool, through: bool) -> None:
        """As in :class:`TiledMlp`."""
        share = self._share(normal)
        at_gate = normal.new_empty(share.shape)

        def through_gate(above: Tensor, product: Tensor) -> Tensor:
            by_share = (above.to(share.dtype) * product).sum(-1, keepdim=True)
            at_gate.copy_(by_share * share * (1 - share))
            self._gate.add(at_gate, normal, alone)
            return torch.mul(above, share.to(above.dtype), out=product)

        self._mlp.backward(grad, normal, alone, through, through_gate)
        if through:
            self._gate.through(at_gate, normal, add=True)

    def gradients(self) -> list[Tensor | None]:
        return [*self._mlp.gradients(), *self._gate.gradients()]

    def _share(self, normal: Tensor) -> Tensor:
        # fp32 or wider [t, 1]
        return self._gate.output(normal).to(wide_dtype(normal.dtype)).sigmoid()


class _Tile(NamedTuple):
    experts: range
    rows: slice
    """Rows of these experts, among all rows in the order of the experts."""
    counts: list[int]
    """Number of rows of each of these experts."""


class _Rows:
    """The rows that experts compute: each token once for each of its k experts, in the order of the experts.

    Attributes:
        order: int64 [t x k], the place of each row in the flat [t, k] of the router.
        tokens: int64 [t x k], the token of each row.
        counts: Number of rows of each expert.
    """

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        flat = chosen.flatten()
        self.order = flat.argsort(stable=True)
        self.tokens = self.order // chosen.shape[1]
        if detect_fake_mode() is None:
            # One wait for the device. The sizes of the products must be known on the host.
            self.counts: list[int] = torch.bincount(flat, minlength=num_experts).tolist()
        else:
            # Fake tensors have no values, so tokens are spread evenly.
            part, more = divmod(flat.numel(), num_experts)
            self.counts = [part + (place < more) for place in range(num_experts)]

    def tiles(self, least: int) -> Iterator[_Tile]:
        """Yield the experts in groups with about equally many rows, of which an expert is never cut."""
        limit = min(-(-sum(self.counts) // least), PRODUCT_ROWS.get(self.order.device.type, 8192))
        first, start, held = 0, 0, 0
        for expert, count in enumerate(self.counts):
            if held and held + count > limit:
                yield _Tile(range(first, expert), slice(start, start + held), self.counts[first:expert])
                first, start, held = expert, start + held, 0
            held += count
        yield _Tile(range(first, len(self.counts)), slice(start, start + held), self.counts[first:])


# Products of rows with the weights of their experts. A GPU has one kernel for all experts of a tile. On a CPU the kernel would be
# a loop over experts too.

ALIGNED_BYTES = 16
"""The kernel needs rows of a multiple of this many bytes."""


def _has_kernel(*tensors: Tensor) -> bool:
    return all(
        tensor.device.type != "cpu" and tensor.dtype == torch.bfloat16 and tensor.shape[-1] * 2 % ALIGNED_BYTES == 0
        for tensor in tensors
    )


def _ends(tile: _Tile, device: torch.device) -> Tensor:
    return torch.tensor(tile.counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _of_experts(tile: _Tile) -> Iterator[tuple[int, slice]]:
    # Yield each expert that has rows, and which rows of the tile these are.
    start = 0
    for expert, count in zip(tile.experts, tile.counts, strict=True):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _turned(weights: Tensor, turn: bool) -> Tensor:
    # Bytes of MXFP4 always have the input last.
    return weights.transpose(1, 2) if turn and weights.is_floating_point() else weights


def _decoded(weights: Tensor, expert: int, dtype: torch.dtype) -> Tensor:
    return weights[expert] if weights.is_floating_point() else mxfp4_weight(weights[expert], dtype)


def _products(x: Tensor, weights: Tensor, tile: _Tile, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weights[e].t() + bias[e]`` [r, m] for the rows of each expert e in a tile.

    ``x`` is [r, n], ``weights`` [E, m, n] and ``bias`` [E, m].
    """
    if _has_kernel(x, weights) and weights.shape[1] * 2 % ALIGNED_BYTES == 0:
        part = weights[tile.experts.start : tile.experts.stop]
        found = torch._grouped_mm(x, part.transpose(1, 2), offs=_ends(tile, x.device))
        out = found if out is None else out.copy_(found)
        if bias is not None:
            for expert, rows in _of_experts(tile):
                out[rows].add_(bias[expert])
        return out
    # Written into ``out``, because selective checkpointing would keep the output of a plain product.
    out = x.new_empty(x.shape[0], weights.shape[1]) if out is None else out
    for expert, rows in _of_experts(tile):
        weight = _decoded(weights, expert, x.dtype)
        if bias is None:
            torch.mm(x[rows], weight.t(), out=out[rows])
        else:
            torch.addmm(bias[expert], x[rows], weight.t(), out=out[rows])
        del weight  # before the next one is decoded
    return out


def _products_back(grad: Tensor, weights: Tensor, tile: _Tile) -> Tensor:
    """Return ``grad @ weights[e]`` [r, n] for the rows of each expert e in a tile. grad [r, m], weights [E, m, n]."""
    if _has_kernel(grad, weights):
        return torch._grouped_mm(grad, weights[tile.experts.start : tile.experts.stop], offs=_ends(tile, grad.device))
    width = weights.shape[2] if weights.is_floating_point() else mxfp4_width(weights.shape[2])
    out = grad.new_empty(grad.shape[0], width)
    for expert, rows in _of_experts(tile):
        weight = _decoded(weights, expert, grad.dtype)
        torch.mm(grad[rows], weight, out=out[rows])
        del weight  # before the next one is decoded
    return out


class _ExpertSum:
    """The gradient of the weights of all experts [E, m, n] or, ``turned``, [E, n, m]; or of one matrix, or of their biases."""

    def __init__(self, weight: Tensor, turned: bool = False) -> None:
        self._weight, self._is_turned = weight, turned
        self._total: Tensor | None = None

    def _made(self, alone: bool) -> Tensor:
        if self._total is None:
            dtype = self._weight.dtype if alone else wide_dtype(self._weight.dtype)
            self._total = torch.zeros_like(self._weight, dtype=dtype, memory_format=torch.contiguous_format)
        return self._total

    def add(self, grad: Tensor, x: Tensor, tile: _Tile, alone: bool) -> None:
        # grad [r, m], x [r, n]
        total = _turned(self._made(alone), self._is_turned)
        if _has_kernel(grad, x):
            found = torch._grouped_mm(grad.t(), x, offs=_ends(tile, x.device))
            total[tile.experts.start : tile.experts.stop].add_(found)
            return
        for expert, rows in _of_experts(tile):
            add_product(total[expert], grad[rows], x[rows])

    def add_rows(self, grad: Tensor, tile: _Tile, alone: bool) -> None:
        # grad [r, m] of biases [E, m]
        total = self._made(alone)
        for expert, rows in _of_experts(tile):
            total[expert] += grad[rows].sum(0, dtype=total.dtype)

    def add_vector(self, grad: Tensor, alone: bool) -> None:
        total = self._made(alone)
        total += grad.sum(0, dtype=total.dtype)

    def add_matrix(self, grad: Tensor, x: Tensor, alone: bool) -> None:
        add_product(self._made(alone), grad, x)

    def gradient(self) -> Tensor:
        # No row at all is possible if a rank has no tokens. The sum is freed.
        total, self._total = self._made(alone=True), None
        return total.to(self._weight.dtype)
