"""The choice of the next token from the logits. Knows no model and no text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from scaling_slurm.errors import ConfigError


@dataclass(frozen=True)
class SamplingConfig:
    """How one request chooses its tokens; by default always the likeliest."""

    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens whose probabilities reach p (https://arxiv.org/abs/1904.09751); 1: all."""
    seed: int = 0
    """Of the request's own generator."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature}", "0 (greedy) or a positive number", "--temperature")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k}", "0 (off) or the number of tokens to choose from", "--top-k")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p}", "above 0 and at most 1 (off)", "--top-p")


class Sampler:
    """Draws the tokens of one request; the same seed and logits give the same tokens on the same kind of device."""

    def __init__(self, config: SamplingConfig, device: torch.device) -> None:
        self.config = config
        self.generator = torch.Generator(device).manual_seed(config.seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """[batch, vocab] logits -> [batch] int64 token ids."""
        if not self.config.temperature:
            return logits.argmax(-1)
        probabilities, tokens = candidates(logits, self.config)
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)  # [batch, 1]
        return tokens.gather(-1, drawn).squeeze(-1)


def candidates(logits: Tensor, config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Probabilities, likeliest first, of the tokens that may be drawn, and these tokens; both [batch, <= vocab].

    Temperature acts first, then top_k, then top_p on what is left. Excluded tokens have probability 0, the rows' sums
    are at most 1. Of equal logits at the edge of top_k, some are left out: never more than k remain.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    count = min(config.top_k or logits.shape[-1], logits.shape[-1])
    values, tokens = logits.topk(count, dim=-1)
    # The largest is 0 before the division, so that no temperature overflows.
    probabilities = ((values - values[:, :1]) / config.temperature).softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    return probabilities.masked_fill(mass_before >= config.top_p, 0.0), tokens
