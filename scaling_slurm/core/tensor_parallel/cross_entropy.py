"""Cross entropy fused with the projection to the vocabulary, chunk by chunk. Knows no model and no averaging."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

IGNORED = -100
"""A target that neither counts nor has a gradient."""
LOGITS_BYTES = 256 * 2**20
"""Of float32 logits held at once by default: large enough that the matrix products stay efficient."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Sum over the tokens of -log softmax(hidden @ weight.T)[target], in float32 (float64 for float64 inputs).

    hidden [tokens, hidden], weight [vocab, hidden], targets [tokens] int64. Only `chunk` tokens' logits exist at a time
    (by default as many as fit LOGITS_BYTES): the gradients are computed in the forward pass, chunk by chunk, and
    the weight's is summed in float32. So backward may run once only.
    """
    if chunk is None:
        chunk = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
    if not torch.is_grad_enabled():  # an autograd function is not told
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, chunk)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        for rows, row_targets in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            counted = (row_targets != IGNORED).unsqueeze(1)  # [rows, 1]
            index = row_targets.clamp_min(0).unsqueeze(1)
            log_p = functional.log_softmax(rows @ weight.t(), dim=1, dtype=exact)  # [rows, vocab]
            picked = log_p.gather(1, index)
            loss -= picked.masked_fill(~counted, 0).sum()
            if not (wants_hidden or wants_weight):
                continue
            log_p.exp_().scatter_(1, index, picked.exp_().sub_(1))
            logits_grad = log_p.mul_(counted).to(hidden.dtype)
            if wants_hidden:
                hidden_grads.append(logits_grad @ weight)
            if wants_weight:
                part = logits_grad.t() @ rows  # [vocab, hidden]
                weight_grad = part.to(exact) if weight_grad is None else weight_grad.add_(part)
        ctx.gradients = (
            torch.cat(hidden_grads) if wants_hidden else None,
            weight_grad.to(weight.dtype) if weight_grad is not None else None,
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_grad, weight_grad = (None if grad is None else grad.mul_(loss_grad) for grad in ctx.gradients)
        del ctx.gradients
        return hidden_grad, weight_grad, None, None
