"""What is known about one parameter across layouts: its logical name and shape, how it is sharded, how it starts.

Knows no ranks and no model; a layer declares the facts in its constructor, ParallelModule.bind carries them out.
"""

from dataclasses import dataclass

import torch
from torch import nn

_SPECS = "_parameter_specs"


@dataclass(frozen=True)
class Normal:
    """Independent draws from a normal distribution."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Independent draws from [-bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


Init = Normal | Uniform | Constant


@dataclass(frozen=True)
class ParameterSpec:
    """What a layer says about one of its parameters."""

    sharded_dim: int | None = None
    """Dimension that tensor parallel ranks share; None: every rank holds all of it."""
    init: Init | None = None
    """Initial values; None: the module's own reset_parameters sets them."""


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter of a bound model."""

    name: str
    """Logical: the same whatever the layout, "layers.0.mlp.up.weight"."""
    shape: torch.Size
    """Of the full tensor."""
    sharded_dim: int | None
    parameter: nn.Parameter
    """What this rank holds of it."""


def declare(module: nn.Module, parameter_name: str, spec: ParameterSpec) -> None:
    """Attach the facts about `module.<parameter_name>`; a second call replaces them."""
    module.__dict__.setdefault(_SPECS, {})[parameter_name] = spec


def declared_spec(module: nn.Module, parameter_name: str) -> ParameterSpec:
    """What was declared about a parameter; an empty spec where nothing was."""
    specs: dict[str, ParameterSpec] = module.__dict__.get(_SPECS, {})
    return specs.get(parameter_name, ParameterSpec())
