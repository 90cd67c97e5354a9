import torch
import torch.nn.functional as F

from scaling_slurm.transformer.model.head import Head, Prediction
from scaling_slurm.transformer.model.loss import loss
from tests.support.language_model import bound_model, random_tokens, small_config


def test_the_sum_and_its_gradients_equal_torchs() -> None:
    config = small_config()
    head = bound_model(config).get_submodule("head")
    assert isinstance(head, Head)
    hidden = torch.randn(2, 5, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden.requires_grad_()
    targets = random_tokens(2, 5, config=config)
    targets[0, 3:] = -100
    ours = loss(Prediction(hidden, head), targets)
    logits = hidden @ head.weight.t()
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    assert torch.allclose(ours, theirs, rtol=1e-13, atol=0)
    gradients = [torch.autograd.grad(value, (hidden, head.weight)) for value in (ours, theirs)]
    for got, expected in zip(*gradients, strict=True):
        assert torch.allclose(got, expected, rtol=0, atol=1e-13)
