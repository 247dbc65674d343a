"""Sharing a model out over devices (FSDP2), with checkpoints that do not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from selmodel.training.checkpoint_file import read_checkpoint


class FullySharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, whose checkpoints are those of a single device.

    Lightning numbers the optimizer's parameters in the order of the model, an optimizer of a single device in the order
    of its groups; a checkpoint of the one would be read wrongly by the other. Here both are the latter.

    Args:
        data_parallel_size: devices that share the weights.
    """

    def __init__(self, data_parallel_size: int | None = None) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size or "auto", tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the whole optimizer, as ``Optimizer.state_dict`` of a single device; empty but on rank 0."""
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_optimizer_state_dict(self.model, optimizer, options=options)
        if self.global_rank != 0:
            return {}
        number = {name: i for i, name in enumerate(self._names(optimizer))}
        return {
            "state": {number[name]: state for name, state in whole["state"].items()},
            "param_groups": [
                group | {"params": [number[name] for name in group["params"]]} for group in whole["param_groups"]
            ],
        }

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any number of devices, and hand each device its share of weights and optimizer state."""
        checkpoint = read_checkpoint(self.broadcast(checkpoint_path))
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        for optimizer, saved in zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            names = self._names(optimizer)
            by_name = {
                "state": {names[i]: state for i, state in saved["state"].items()},
                "param_groups": [
                    group | {"params": [names[i] for i in group["params"]]} for group in saved["param_groups"]
                ],
            }
            set_optimizer_state_dict(self.model, optimizer, by_name, options=options)
        return checkpoint

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Names of the optimizer's parameters, in the order of its groups."""
        name_of = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
