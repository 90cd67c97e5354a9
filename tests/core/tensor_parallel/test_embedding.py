import subprocess
import sys

import torch
from torch import nn

from scaling_slurm.core.parameter import Normal, ParameterSpec, declared_spec
from scaling_slurm.core.tensor_parallel.embedding import VocabParallelEmbedding


def test_alone_it_is_exactly_nn_embedding() -> None:
    torch.manual_seed(5)
    ours = VocabParallelEmbedding(10, 4)
    torch.manual_seed(5)
    theirs = nn.Embedding(10, 4)
    ids = torch.tensor([[1, 2], [9, 0]])
    assert torch.equal(ours(ids), theirs(ids))


def test_declarations() -> None:
    assert declared_spec(VocabParallelEmbedding(10, 4), "weight") == ParameterSpec(0, Normal(1.0))
    assert declared_spec(VocabParallelEmbedding(10, 4, init=Normal(0.02)), "weight") == ParameterSpec(0, Normal(0.02))


def test_without_memory_it_does_not_load_torchs_compiler() -> None:
    """torch's normal_ on the meta device would: a second at each rank's start."""
    code = (
        "import sys, torch; from scaling_slurm.core.tensor_parallel.embedding import VocabParallelEmbedding\n"
        "with torch.device('meta'): VocabParallelEmbedding(10, 4)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
