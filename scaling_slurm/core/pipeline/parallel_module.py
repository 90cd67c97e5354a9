"""A model as a sequence of layers with logical names, and how its weights come into being on any layout.

Knows no layer kinds: a layer is any nn.Module with one argument and one result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from scaling_slurm.core.dropout import Dropout
from scaling_slurm.core.parameter import (
    Constant,
    Init,
    Normal,
    ParameterInfo,
    ParameterSpec,
    Uniform,
    declared_spec,
)
from scaling_slurm.core.topology import random
from scaling_slurm.core.topology.topology import Topology
from scaling_slurm.errors import ConfigError


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model: its logical name, which is the prefix of its parameters' names, and how to build it."""

    name: str
    build: Callable[[], nn.Module]


class ParallelModule(nn.Module):
    """Layers that run one after the other, like nn.Sequential, each on what the previous one returned.

    They are built without memory, on torch's meta device, with their full logical shapes; `bind` gives them memory and
    values. The names of the submodules are the logical names, dots included: layers "blocks.0" and "blocks.1" stand in
    a container "blocks", so `state_dict` has the logical names too.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        super().__init__()
        names = [spec.name for spec in layers]
        for index, name in enumerate(names):
            clashes = [other for other in names[:index] if f"{other}.".startswith(f"{name}.")]
            clashes += [other for other in names[:index] if f"{name}.".startswith(f"{other}.")]
            if clashes:
                raise ConfigError(
                    f"the layers {clashes[0]!r} and {name!r} share a name",
                    "each layer needs a name of its own, which is not the beginning of another's",
                    "the LayerSpecs of the model",
                )
        with torch.device("meta"):
            # A plain dict, which registers nothing: the layers are the submodules, here in the order they run in.
            self._layers = {spec.name: spec.build() for spec in layers}
        for name, layer in self._layers.items():
            _add_submodule(self, name, layer)

    def bind(self, topology: Topology, *, seed: int, dtype: torch.dtype) -> Self:
        """Give every parameter and buffer its memory on this rank's device and its value; parameters have `dtype`.

        Nothing is drawn from torch's global generators, and no value depends on the layout:
        - a parameter with declared initial values is hashed from (seed, logical name, element);
        - other modules are initialised by their own `reset_parameters`, on the CPU, under a generator seeded by
          (seed, logical name of the module), children before parents, as constructors run;
        - buffers are set by `reset_buffers()` of their module (or by its reset_parameters): a layer that computes
          buffers must define it. It keeps the buffers' own dtypes.
        Raises ConfigError naming a parameter or buffer that nothing has set. To train, bind in the dtype of the master
        weights: Optimizer takes the unrounded values over and leaves copies of the compute dtype here.
        """
        bound: dict[nn.Parameter, nn.Parameter] = {}
        for name, layer in self._layers.items():
            _bind_layer(name, layer, bound, topology.device, seed, dtype)
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                module.key.fill_(random.signed(random.key("dropout", seed, name)))
        return self

    def forward(self, inputs: Any) -> Any:
        """Through all layers in order."""
        for layer in self._layers.values():
            inputs = layer(inputs)
        return inputs

    def parameter_infos(self) -> list[ParameterInfo]:
        """All parameters in the order of the layers; one that several modules share comes once, by its first name."""
        return [
            ParameterInfo(name, parameter.shape, spec.sharded_dim, parameter)
            for name, parameter, spec in _named_specs(self)
        ]

    @property
    def num_parameters(self) -> int:
        """Of the full model; needs no bind."""
        return sum(info.shape.numel() for info in self.parameter_infos())


def _add_submodule(root: nn.Module, name: str, module: nn.Module) -> None:
    *containers, own_name = name.split(".")
    for container in containers:
        if container not in root._modules:
            root.add_module(container, nn.Module())
        root = root.get_submodule(container)
    root.add_module(own_name, module)


def _named_specs(root: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterSpec]]:
    for name, parameter in root.named_parameters():
        path, _, own_name = name.rpartition(".")
        yield name, parameter, declared_spec(root.get_submodule(path), own_name)


def _bind_layer(
    prefix: str,
    layer: nn.Module,
    bound: dict[nn.Parameter, nn.Parameter],
    device: torch.device,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """`bound` maps the parameters as built to those with memory, over all layers: shared ones stay shared."""
    own = [(f"{prefix}.{name}", parameter, spec.init) for name, parameter, spec in _named_specs(layer)]
    own = [(name, parameter, init) for name, parameter, init in own if parameter not in bound]
    drawing_dtype = dtype if dtype == torch.float64 else torch.float32
    for _, parameter, init in own:
        if init is None:
            values = _unset(parameter, drawing_dtype if parameter.is_floating_point() else parameter.dtype)
            bound[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    _exchange(layer, bound)
    for module in layer.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _unset(buffer, buffer.dtype)
    _reset(layer, prefix, seed)
    for name, parameter, init in own:
        if init is None:
            _check_set(name, bound[parameter], "the layer must declare its initial values or define reset_parameters()")
            bound[parameter].data = bound[parameter].to(device, dtype if parameter.is_floating_point() else None)
        else:
            values = _draw(init, random.key("initial", seed, name), parameter.shape, device, dtype)
            bound[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    _exchange(layer, bound)
    for name, buffer in layer.named_buffers():
        _check_set(f"{prefix}.{name}", buffer, "the layer must compute its buffers in reset_buffers()")
    layer.to(device)


def _exchange(layer: nn.Module, bound: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter in bound:
                module._parameters[name] = bound[parameter]


def _unset(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory on the CPU that shows whether anything was written to it (except for booleans, which are False)."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(like.shape, float("nan"), dtype=dtype, device="cpu")
    return torch.full(like.shape, 0 if dtype == torch.bool else torch.iinfo(dtype).max, dtype=dtype, device="cpu")


def _check_set(name: str, tensor: torch.Tensor, remedy: str) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        unset = bool(tensor.isnan().any())
    else:
        unset = tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())
    if unset:
        raise ConfigError(f"{name} has no initial value", remedy, "the class of the layer")


def _reset(layer: nn.Module, prefix: str, seed: int) -> None:
    """Run the layers' own initialisation, children first; modules that declared all their parameters need none."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in reversed(list(layer.named_modules(prefix=prefix))):
            own_names = [own_name for own_name, parameter in module._parameters.items() if parameter is not None]
            declared = own_names and all(declared_spec(module, own_name).init is not None for own_name in own_names)
            if not declared and callable(reset_parameters := getattr(module, "reset_parameters", None)):
                torch.default_generator.manual_seed(random.key("initial", seed, name))
                reset_parameters()
            if callable(reset_buffers := getattr(module, "reset_buffers", None)):
                reset_buffers()


def _draw(init: Init, key: int, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    match init:
        case Normal(std, mean):
            return random.normal(key, shape, device=device, dtype=dtype, std=std, mean=mean)
        case Uniform(bound):
            return random.uniform(key, shape, device=device, dtype=dtype, low=-bound, high=bound)
        case Constant(value):
            return torch.full(shape, value, device=device, dtype=dtype)
