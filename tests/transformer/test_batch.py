import torch

from scaling_slurm.transformer.batch import Activation, Inputs
from scaling_slurm.transformer.inference.kv_cache import KVCache
from tests.support.language_model import bound_model, random_tokens, small_config


@torch.no_grad()
def test_positions_and_cache_travel_through_all_blocks() -> None:
    config = small_config()
    model = bound_model(config).eval()
    cache = KVCache(config, batch=2, max_length=8, device=torch.device("cpu"), dtype=torch.float64)
    inputs = Inputs(random_tokens(2, 5, config=config), torch.tensor([7, 3]), cache)
    activation = inputs
    for name in ("embedding", "layers.0", "layers.1", "norm"):
        activation = model.get_submodule(name)(activation)
        assert isinstance(activation, Activation)
        assert activation.hidden.shape == (2, 5, config.hidden_size)
        assert activation.positions is inputs.positions
        assert activation.cache is cache


def test_no_cache_by_default() -> None:
    assert Inputs(torch.zeros(1, 1), torch.zeros(1)).cache is None
    assert Activation(torch.zeros(1, 1, 1), torch.zeros(1)).cache is None
