"""AdamW and learning-rate schedules.

The learning rate is a pure function of the optimizer step, so a resumed run needs no schedule state and
cannot be off by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from selmodel.errors import UserError

SCHEDULES = ("cosine", "constant", "wsd")


@dataclass(frozen=True)
class AdamW:
    """Options of the optimizer and its schedule (config group ``optim``).

    Attributes:
        lr: peak learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, applied to matrices only (linear weights and embeddings, ``ndim >= 2``),
            never to norms' gains.
        gradient_clip: largest L2 norm of the whole gradient; null for none.
        schedule: ``cosine`` (to ``final_lr_ratio``), ``constant``, or ``wsd`` (warm-up, stable, linear decay over
            the last ``decay_ratio`` of the steps).
        warmup_steps: steps of linear warm-up from 0; all schedules have it. Step 1 trains with ``lr/warmup_steps``.
            None: a tenth of ``schedule_steps``, at most 1,000.
        schedule_steps: the step at which the schedule ends; usually ``${trainer.max_steps}``.
        final_lr_ratio: learning rate at ``schedule_steps``, as a share of ``lr``.
        decay_ratio: share of ``schedule_steps`` that ``wsd`` decays over.

    Raises:
        UserError: naming each option that is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float | None = 1.0
    schedule: str = "cosine"
    warmup_steps: int | None = None
    schedule_steps: int = field(kw_only=True)
    final_lr_ratio: float = 0.1
    decay_ratio: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas) if isinstance(self.betas, list | tuple) else (self.betas,))
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", min(1000, max(self.schedule_steps, 0) // 10))
        faults = []
        if not 0 < self.lr < math.inf:
            faults.append(f"optim.lr={self.lr}: must be above 0 and finite, for example optim.lr=1e-3")
        if not 0 <= self.eps < math.inf:
            faults.append(f"optim.eps={self.eps}: must be 0 or more, for example 1e-8")
        if len(self.betas) != 2 or not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in self.betas):
            faults.append(f"optim.betas={list(self.betas)}: two numbers in [0, 1), for example [0.9,0.95]")
        if self.weight_decay < 0:
            faults.append(f"optim.weight_decay={self.weight_decay}: must not be negative; 0 turns it off")
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            faults.append(f"optim.gradient_clip={self.gradient_clip}: above 0, or null for no clipping")
        if self.schedule not in SCHEDULES:
            faults.append(f"optim.schedule={self.schedule}: must be one of {', '.join(SCHEDULES)}")
        if self.schedule_steps < 1:
            faults.append(f"optim.schedule_steps={self.schedule_steps}: must be at least 1")
        if not 0 <= self.warmup_steps <= max(self.schedule_steps, 1):
            faults.append(
                f"optim.warmup_steps={self.warmup_steps}: must be from 0 to "
                f"optim.schedule_steps={self.schedule_steps}; lower optim.warmup_steps"
            )
        if not 0 <= self.final_lr_ratio <= 1:
            faults.append(f"optim.final_lr_ratio={self.final_lr_ratio}: must be from 0 to 1")
        if not 0 < self.decay_ratio <= 1:
            faults.append(f"optim.decay_ratio={self.decay_ratio}: must be above 0 and at most 1")
        if faults:
            raise UserError("\n".join(faults))

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 1."""
        return self.lr * self._factor(step)

    def _factor(self, step: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "cosine":
            span = self.schedule_steps - self.warmup_steps
            done = min(1.0, (step - self.warmup_steps) / max(span, 1))
            return self.final_lr_ratio + (1 - self.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        span = max(1, round(self.decay_ratio * self.schedule_steps))
        done = min(1.0, max(0.0, (step - (self.schedule_steps - span)) / span))
        return 1.0 - (1 - self.final_lr_ratio) * done

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over ``model``'s parameters in two groups: matrices with weight decay, the rest without."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2]},
        ]
        # The fused form is one pass over memory per parameter and exists for CPU and CUDA.
        fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr, fused=fused or None)
        self.apply(optimizer)
        return optimizer

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Set these options on ``optimizer``; loading its state puts back those it was saved with."""
        for group in optimizer.param_groups:
            matrices = group["params"][0].ndim >= 2
            group |= {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay if matrices else 0.0}
