"""AdamW on flat buffers: master weights, gradients and moments of all parameters lie one behind the other.

Knows names and shapes, no layers; when to step and what to scale by is the trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from scaling_slurm.core.config import OptimizerConfig
from scaling_slurm.core.parameter import ParameterInfo
from scaling_slurm.core.topology.topology import Topology

ALIGNMENT = 64
"""Elements: each parameter begins on a multiple, so that kernels find it aligned in every dtype. The gaps stay zero."""
NORM_CHUNK = 1 << 22
"""Elements whose squares are summed at once in float64."""


@dataclass(frozen=True)
class _Group:
    """Parameters with the same weight decay; `weights` are the masters, all tensors are flat and equally long."""

    infos: list[ParameterInfo]
    offsets: list[int]
    weight_decay: float
    weights: torch.Tensor
    gradients: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_steps: torch.Tensor
    copies: torch.Tensor
    """What the parameters are views of: `weights` itself where the model computes in the dtype of the masters."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return _views(flat, self.infos, self.offsets)


class Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) over the parameters of a bound model.

    The parameters' values become the master weights, in the dtype in which the model was bound; the parameters
    themselves become views of flat buffers of `compute_dtype`. Every backward pass adds its gradients, whatever the
    compute dtype, to flat buffers in the masters' dtype: backpropagate the loss's *sum*, and `step` divides.
    Weight decay applies to parameters of two and more dimensions. Parameters that need no gradient are left alone, but
    for the compute dtype.
    """

    def __init__(
        self,
        infos: Sequence[ParameterInfo],
        config: OptimizerConfig,
        topology: Topology,
        compute_dtype: torch.dtype,
    ) -> None:
        self.config, self._topology = config, topology
        trained = [info for info in infos if info.parameter.requires_grad]
        self._frozen = [info for info in infos if not info.parameter.requires_grad]
        for info in self._frozen:
            info.parameter.data = info.parameter.to(compute_dtype)
        decayed = [info for info in trained if len(info.shape) >= 2]
        undecayed = [info for info in trained if len(info.shape) < 2]
        self._groups = [
            _build_group(members, weight_decay, topology.device, compute_dtype)
            for members, weight_decay in ((decayed, config.weight_decay), (undecayed, 0.0))
            if members
        ]

    def zero_gradients(self) -> None:
        """Forget the gradients, before the first backward pass of a step."""
        for group in self._groups:
            group.gradients.zero_()

    def reduce_gradients(self) -> torch.Tensor:
        """Sum the gradients over the data parallel ranks, once all backward passes of the step are done.

        Returns this rank's share of the squared norm, a float64 scalar on the device: added up over the data parallel
        ranks it is the squared L2 norm of the summed gradient, non-finite where any gradient is.
        """
        share = torch.zeros((), dtype=torch.float64, device=self._topology.device)
        size, rank = self._topology.layout.data, self._topology.data_rank
        for group in self._groups:
            if group.copies is group.weights:
                _check_gradient_views(group)
            if self._topology.data_group is not None:
                dist.all_reduce(group.gradients, group=self._topology.data_group)
            count = group.gradients.numel()
            own = group.gradients[count * rank // size : count * (rank + 1) // size]
            for chunk in torch.split(own, NORM_CHUNK):
                share += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
        return share

    def step(self, learning_rate: float, grad_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Divide the gradients by `grad_scale` and update the weights; nothing at all changes where `found_inf` is 1.

        Both are scalars on the device, which the host need not know: number of tokens / clip factor, and 0 or 1.
        """
        scale: torch.Tensor | None = grad_scale.to(torch.float32)
        for group in self._groups:
            if group.weights.dtype == torch.float64:
                # The fused kernel takes a float32 scale, which would round what float64 is there to tell apart.
                group.gradients.div_(grad_scale)
                scale = None
            adamw(
                [group.weights],
                [group.gradients],
                [group.exp_avg],
                [group.exp_avg_sq],
                [],
                [group.num_steps],
                fused=True,
                grad_scale=scale,
                found_inf=found_inf.to(torch.float32),
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=learning_rate,
                weight_decay=group.weight_decay,
                eps=self.config.epsilon,
                maximize=False,
            )
        self._write_copies()

    def named_state(self) -> dict[str, torch.Tensor]:
        """ "weight/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME": views of the state with the parameters' logical shapes.

        Weights are the masters. Whoever writes into the views calls `load_state_scalars` afterwards.
        """
        state: dict[str, torch.Tensor] = {}
        for group in self._groups:
            kinds = {"weight": group.weights, "exp_avg": group.exp_avg, "exp_avg_sq": group.exp_avg_sq}
            for kind, flat in kinds.items():
                named = zip(group.infos, group.views(flat), strict=True)
                state |= {f"{kind}/{info.name}": view for info, view in named}
        return state | {f"weight/{info.name}": info.parameter.data for info in self._frozen}

    def state_scalars(self) -> dict[str, Any]:
        """What remains of the state: the number of steps that were taken, skipped ones not counted."""
        counts = {int(group.num_steps.item()) for group in self._groups} or {0}
        assert len(counts) == 1, f"groups have taken different numbers of steps: {counts}"
        return {"num_steps": counts.pop()}

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Take over `state_scalars`, and bring the model up to date with what was written into `named_state`."""
        for group in self._groups:
            group.num_steps.fill_(scalars["num_steps"])
        self._write_copies()

    def _write_copies(self) -> None:
        for group in self._groups:
            if group.copies is not group.weights:
                group.copies.copy_(group.weights)


def _build_group(
    infos: list[ParameterInfo], weight_decay: float, device: torch.device, compute_dtype: torch.dtype
) -> _Group:
    offsets, end = [], 0
    for info in infos:
        offsets.append(end)
        end += -(-info.shape.numel() // ALIGNMENT) * ALIGNMENT
    dtype = infos[0].parameter.dtype
    assert dtype in (torch.float32, torch.float64), f"{infos[0].name}: master weights cannot be {dtype}"
    assert all(info.parameter.dtype == dtype for info in infos), "bind gives all parameters one dtype"
    weights = torch.zeros(end, dtype=dtype, device=device)
    copies = weights if compute_dtype == dtype else torch.zeros(end, dtype=compute_dtype, device=device)
    for info, weight, copy in zip(infos, _views(weights, infos, offsets), _views(copies, infos, offsets), strict=True):
        weight.copy_(info.parameter.data)
        copy.copy_(weight)
        info.parameter.data = copy  # frees the bound one before the other buffers are there
    gradients, exp_avg, exp_avg_sq = (torch.zeros_like(weights) for _ in range(3))
    for info, gradient in zip(infos, _views(gradients, infos, offsets), strict=True):
        if copies is weights:
            info.parameter.grad = gradient  # autograd adds into it in place
        else:
            info.parameter.register_post_accumulate_grad_hook(_Accumulate(gradient))  # type: ignore[no-untyped-call]
    num_steps = torch.zeros((), dtype=torch.float32, device=device)
    return _Group(infos, offsets, weight_decay, weights, gradients, exp_avg, exp_avg_sq, num_steps, copies)


def _views(flat: torch.Tensor, infos: Sequence[ParameterInfo], offsets: Sequence[int]) -> list[torch.Tensor]:
    """A flat tensor as the parameters' own shapes."""
    places = zip(infos, offsets, strict=True)
    return [flat[offset : offset + info.shape.numel()].view(info.shape) for info, offset in places]


class _Accumulate:
    """Adds a parameter's new gradient to the flat buffer, in the buffer's dtype, and frees it."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._gradient.add_(parameter.grad)
        parameter.grad = None


def _check_gradient_views(group: _Group) -> None:
    """A gradient outside of the flat buffer would be lost without a word."""
    for info, view in zip(group.infos, group.views(group.gradients), strict=True):
        gradient = info.parameter.grad
        in_place = gradient is not None and gradient.data_ptr() == view.data_ptr()
        assert in_place, f"{info.name}.grad was replaced; use Optimizer.zero_gradients, not the model's zero_grad"
