"""Training: the LightningModule, optimizer, callbacks, checkpoints and loggers."""
