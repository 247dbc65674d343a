"""The memory of a training step, counted by running it on tensors without contents.

PyTorch's fake tensors have shapes, types and lifetimes, and no memory. So the step's own code says what it allocates
and when it lets go, for any model, kernel and precision, in a second and without the device. What an operator takes
for itself while it runs (a kernel's tiles) is not seen, nor what an allocator keeps beyond what is asked for: glibc's
keeps 10 to 15 % (docs/LOG.md).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # as torch's documentation imports it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selmodel.attention import selection
from selmodel.attention.base import Attention
from selmodel.model import SwiGLU, Transformer
from selmodel.training.losses import loss_sum

PARTS = ("weights", "optimizer", "gradients", "attention", "mlp", "logits", "other activations", "temporary")
STATES_PER_WEIGHT = 2  # AdamW: a running mean of the gradient and one of its square


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the moment of a step when most are held, by part.

    Attributes:
        parts: bytes by name of ``PARTS``. attention, mlp, logits and "other activations" (embeddings, norms, the
            residual stream) are what their forward passes hold for the backward pass; "temporary" is what the backward
            pass holds for the moment.
    """

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class _Tracker(TorchDispatchMode):
    """Counts the bytes of living storages by the part that was current when each was made."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "other activations"
        self.held: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_total = 0
        self._parts: dict[int, str] = {}  # by id of the storage, while it lives

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.track(leaf)
        return result

    def track(self, tensor: Tensor, part: str | None = None) -> None:
        """Count the storage of ``tensor``, or move what was counted of it to ``part``."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._parts:
            if part is not None:
                self.held[self._parts[key]] -= size
                self.held[part] += size
                self._parts[key] = part
            return
        self._parts[key] = part or self.part
        weakref.finalize(storage, self._freed, key, size).atexit = False
        self.held[self._parts[key]] += size
        total = sum(self.held.values())
        if total > self.peak_total:
            self.peak_total, self.peak = total, dict(self.held)

    def _freed(self, key: int, size: int) -> None:
        self.held[self._parts.pop(key)] -= size


def step_memory(
    model: Transformer,
    *,
    rows: int,
    n: int | None = None,
    n_passes: int = 1,
    autocast: torch.dtype | None = None,
    document_mask: bool = False,
) -> StepMemory:
    """The peak of a training step after the first one, on one device.

    Args:
        model: with parameters of any device, ``meta`` too; nothing of them is read or changed.
        rows, n: sequences of one forward and backward pass, and their tokens; n None: the model's context length.
        n_passes: passes whose gradients add up to a step's; from the second on, gradients are held throughout.
        autocast: type that matrix products are computed in, None for that of the weights.
        document_mask: whether documents of a sequence are kept apart.
    """
    originals = {id(module): dict(module._parameters) for module in model.modules()}
    announcements = logging.getLogger("selmodel.attention.kernels")
    disabled, announcements.disabled = announcements.disabled, True  # nothing is computed with the kernel
    try:
        with FakeTensorMode(allow_non_fake_inputs=False):
            _give_fake_parameters(model)
            return _fake_step(model, rows, n or model.context_length, min(n_passes, 2), autocast, document_mask)
    finally:
        announcements.disabled = disabled
        for module in model.modules():
            module._parameters.update(originals[id(module)])


def _give_fake_parameters(model: nn.Module) -> None:
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
                module._parameters[name] = made[id(parameter)]


def _fake_step(
    model: Transformer, rows: int, n: int, n_passes: int, autocast: torch.dtype | None, document_mask: bool
) -> StepMemory:
    parameters = list(model.parameters())
    tracker = _Tracker()
    hooks = [p.register_post_accumulate_grad_hook(lambda p: tracker.track(p.grad, "gradients")) for p in parameters]
    for module in model.modules():
        hooks += _mark(module, tracker)

    def begin_logits(*_):
        tracker.part = "logits"

    hooks.append(model.norm.register_forward_hook(begin_logits))  # what follows the last norm
    tokens = torch.zeros(rows, n + 1, dtype=torch.int64)
    document_ids = torch.zeros(rows, n, dtype=torch.int32) if document_mask else None
    try:
        with tracker:
            for parameter in parameters:
                tracker.track(parameter, "weights")
            states = []
            for parameter in parameters:
                for _ in range(STATES_PER_WEIGHT):
                    states.append(torch.empty_like(parameter))
                    tracker.track(states[-1], "optimizer")
            tracker.track(tokens)
            for _ in range(n_passes):
                tracker.part = "other activations"
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    output = model.forward(tokens[:, :-1], document_ids)
                    objective = loss_sum(output.logits, tokens[:, 1:]) / tokens.numel()
                    if output.memory is not None:
                        objective = objective + selection.memory_loss(output.memory)
                tracker.part = "temporary"
                objective.backward()
            # The step of AdamW, and the norm of the gradient before it, hold one more tensor per weight at a time.
            largest = max(parameters, key=Tensor.numel)
            _ = torch.empty_like(largest), torch.empty_like(largest)
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return StepMemory({part: tracker.peak.get(part, 0) for part in PARTS})


def _mark(module: nn.Module, tracker: _Tracker) -> Iterator:
    """Hooks that name the part which is current while ``module`` computes."""
    part = "attention" if isinstance(module, Attention) else "mlp" if isinstance(module, SwiGLU) else None
    if part is None:
        return []
    before: list[str] = []

    def enter(*_):
        before.append(tracker.part)
        tracker.part = part if tracker.part != "temporary" else "temporary"

    def leave(*_):
        tracker.part = before.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
