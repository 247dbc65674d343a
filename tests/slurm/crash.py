"""A callback that ends the process without a word, as a fault of the hardware would."""

from __future__ import annotations

import os

import lightning as L


class Crash(L.Callback):
    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == 3:
            os._exit(17)


class Slow(L.Callback):
    """Steps that last, so that a job can be disturbed in the middle."""

    def on_train_batch_end(self, trainer, *_) -> None:
        import time

        time.sleep(0.15)
