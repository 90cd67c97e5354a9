import torch
from torch import nn

from scaling_slurm.core.parameter import Constant, Normal, ParameterSpec, declare, declared_spec


def test_facts_belong_to_one_module_and_the_last_word_counts() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    declare(first, "weight", ParameterSpec(sharded_dim=1, init=Normal(0.5)))
    declare(first, "weight", ParameterSpec(sharded_dim=0, init=Constant(1.0)))
    assert declared_spec(first, "weight") == ParameterSpec(sharded_dim=0, init=Constant(1.0))
    assert declared_spec(first, "bias") == declared_spec(second, "weight") == ParameterSpec(None, None)


def test_a_declaration_leaves_the_module_as_it_was() -> None:
    module = nn.Linear(2, 2)
    before = module.state_dict()
    declare(module, "weight", ParameterSpec(sharded_dim=0))
    assert module.state_dict().keys() == before.keys()
    assert torch.equal(module(torch.ones(1, 2)), nn.functional.linear(torch.ones(1, 2), module.weight, module.bias))
