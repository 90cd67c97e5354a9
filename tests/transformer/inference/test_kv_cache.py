import pytest
import torch

from scaling_slurm.transformer.inference.kv_cache import KVCache
from tests.support.language_model import small_config


def test_holds_what_was_appended_in_order() -> None:
    cache = KVCache(small_config(), batch=2, max_length=5, device=torch.device("cpu"), dtype=torch.float32)
    assert len(cache.layers) == 2
    keys, values = torch.randn(2, 2, 2, 5, 8).unbind()  # [batch, key-value heads, seq, head_size]
    for start, end in ((0, 2), (2, 3), (3, 5)):
        assert not cache.is_full
        for layer in cache.layers:
            held = layer.append(keys[:, :, start:end], values[:, :, start:end])
            assert torch.equal(held[0], keys[:, :, :end])
            assert torch.equal(held[1], values[:, :, :end])
            assert layer.length == end
    assert cache.is_full
    with pytest.raises(AssertionError, match="6 tokens in a cache of 5"):
        cache.layers[0].append(keys[:, :, :1], values[:, :, :1])
