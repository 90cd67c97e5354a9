"""Generation: token ids in, token ids out. Knows no text, no tokenizer and no files."""

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum

import torch

from scaling_slurm.core.pipeline.parallel_module import ParallelModule
from scaling_slurm.errors import ConfigError
from scaling_slurm.transformer.batch import Inputs
from scaling_slurm.transformer.config import ModelConfig
from scaling_slurm.transformer.inference.kv_cache import KVCache
from scaling_slurm.transformer.inference.sampling import Sampler, SamplingConfig
from scaling_slurm.transformer.model.head import Prediction


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model gave a stop token."""
    MAX_TOKENS = "max_tokens"
    """As many tokens as were asked for."""
    CONTEXT = "context"
    """The model has read its whole sequence_length."""


class Generation(Iterator[int]):
    """One request: yields the new tokens as they come, a stop token left out.

    It owns its cache, so that requests cannot disturb each other; nothing is allocated between two tokens but what the
    layers themselves need.
    """

    finish_reason: FinishReason | None = None
    """Set once there are no more tokens."""

    def __init__(
        self,
        model: ParallelModule,
        prompt: torch.Tensor,
        cache: KVCache,
        sampler: Sampler,
        max_tokens: int,
        stop: Collection[int],
    ) -> None:
        self._model, self._cache, self._sampler = model, cache, sampler
        self._unread = prompt  # [1, seq]
        self._positions = torch.zeros(1, dtype=torch.int64, device=prompt.device)
        self._tokens_left, self._stop = max_tokens, stop

    @torch.inference_mode()
    def __next__(self) -> int:
        if self.finish_reason is None and not self._tokens_left:
            self.finish_reason = FinishReason.MAX_TOKENS
        elif self.finish_reason is None and self._cache.is_full:
            self.finish_reason = FinishReason.CONTEXT
        if self.finish_reason is not None:
            raise StopIteration
        prediction: Prediction = self._model(Inputs(self._unread, self._positions, self._cache))
        chosen = self._sampler(prediction.last().logits()[:, -1])  # [1]
        token = int(chosen)
        if token in self._stop:
            self.finish_reason = FinishReason.STOP
            raise StopIteration
        self._unread = chosen.unsqueeze(-1)
        self._tokens_left -= 1
        return token


class Engine:
    """Generates with a bound model, in evaluation mode."""

    def __init__(self, model: ParallelModule, config: ModelConfig) -> None:
        self.model, self.config = model.eval(), config
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_tokens: Collection[int] = (),
        sampling: SamplingConfig | None = None,
    ) -> Generation:
        """Start a request; iterate over the result.

        Args:
            prompt: At least one token and at most `sequence_length`; ConfigError otherwise.
            max_tokens: New tokens at most. The context may end it before: the model reads `sequence_length` tokens.
        """
        self._check(prompt)
        length = min(len(prompt) + max_tokens, self.config.sequence_length)
        cache = KVCache(self.config, batch=1, max_length=length, device=self.device, dtype=self.dtype)
        return Generation(
            self.model,
            torch.tensor([prompt], dtype=torch.int64, device=self.device),
            cache,
            Sampler(sampling or SamplingConfig(), self.device),
            max_tokens,
            frozenset(stop_tokens),
        )

    def _check(self, prompt: Sequence[int]) -> None:
        longest, ids = self.config.sequence_length, self.config.vocab_size
        if not prompt:
            raise ConfigError("the prompt has no tokens", "a model continues at least one", "the prompt")
        if len(prompt) > longest:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens", f"the model reads at most {longest}", "shorten the prompt"
            )
        foreign = [token for token in prompt if not 0 <= token < ids]
        if foreign:
            raise ConfigError(
                f"the prompt holds token id {foreign[0]}",
                f"the model's ids are 0 to {ids - 1}",
                "use the tokenizer that the model was trained with",
            )
