import torch

from scaling_slurm.transformer.batch import Activation
from scaling_slurm.transformer.model.head import Head
from tests.support.language_model import bound_model, small_config


def test_logits_are_the_product_and_last_is_their_last_row() -> None:
    config = small_config()
    head = bound_model(config).get_submodule("head")
    assert isinstance(head, Head)
    hidden = torch.randn(2, 5, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prediction = head(Activation(hidden, torch.arange(2)))
    expected = torch.einsum("bsh,vh->bsv", hidden, head.weight)
    assert prediction.hidden is hidden, "the product is left to whoever needs it"
    assert torch.allclose(prediction.logits(), expected, rtol=0, atol=1e-13)
    assert torch.allclose(prediction.last().logits(), expected[:, 4:], rtol=0, atol=1e-13)
