"""A trained run, read back from its checkpoint: what evaluation, generation and benchmarks begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from selmodel.config import build
from selmodel.data.datamodule import DataModule
from selmodel.data.tokenizer import Tokenizer
from selmodel.errors import UserError
from selmodel.model import Transformer
from selmodel.training.checkpoint_file import LAST, read_checkpoint
from selmodel.training.module import LanguageModel
from selmodel.training.resume import check_identity, load_weights
from selmodel.training.setup import build_model
from selmodel.trust import stored_config


@dataclass(frozen=True)
class TrainedRun:
    """What a checkpoint holds, built.

    Attributes:
        path: of the checkpoint file.
        config: the resolved configuration of the run.
        tokenizer: the one it was trained with.
        module: the ``LanguageModel`` with the trained weights, on the CPU, in evaluation mode.
        step: optimizer steps trained.
        environment: versions, git commit and precision it was trained with.
    """

    path: Path
    config: DictConfig
    tokenizer: Tokenizer
    module: LanguageModel
    step: int
    environment: dict[str, Any]

    @property
    def model(self) -> Transformer:
        return self.module.model

    @property
    def precision(self) -> str:
        """Of the arithmetic it was trained and validated in, as in ``lightning.Trainer``."""
        return self.environment.get("precision", "auto")

    def check_on_text(self, what: str) -> None:
        """Refuse a run on a synthetic task for ``what``, which is of text. Raises UserError."""
        if self.config.data._target_.endswith("TaskDataModule"):
            raise UserError(
                f"{what}: is for runs on text; for {self.path}, on a synthetic task, suite=task_accuracy is"
            )

    def data(self, overrides: Mapping[str, Any] | None = None, *, cache_dir: str | Path) -> DataModule:
        """The run's data, ready to be read.

        Args:
            overrides: values that replace the run's own; those that are None do not.
            cache_dir: where corpora and file lists of this machine are kept.

        Raises:
            UserError: for an option that the run's data does not have, and a corpus that cannot be read.
        """
        node = OmegaConf.create(OmegaConf.to_container(self.config.data, resolve=True))
        for key, value in (overrides or {}).items():
            if value is None:
                continue
            if key not in node:
                raise UserError(f"data.{key}={value}: the run's data ({node.source._target_}) has no such option")
            node[key] = value
            if key in node.source:
                node.source[key] = value
        if "cache_dir" in node.source:
            node.source.cache_dir = str(cache_dir)
        source = build(node.source)
        source.prepare()
        return build(node, source=source, tokenizer=self.tokenizer)


def load_run(checkpoint: str | Path) -> TrainedRun:
    """The run whose checkpoint, or whose folder (then its ``last.ckpt``), this is.

    Raises:
        UserError: for a file that is missing, damaged, of another kind, whose weights do not fit its model, or whose
            configuration names foreign code (``selmodel.trust``).
    """
    path = Path(checkpoint).expanduser()
    path = path / LAST if path.is_dir() else path
    content = read_checkpoint(path)
    stored = content["selmodel"]
    config = OmegaConf.create(stored_config(stored["config"], path))
    tokenizer = Tokenizer.from_state(stored["tokenizer"])
    model = build_model(config, tokenizer)
    check_identity(content, {"architecture": model.options(), "tokenizer": stored["tokenizer"]}, path)
    module = LanguageModel(model, build(config.optim))
    load_weights(content, module)
    module.eval()
    return TrainedRun(path, config, tokenizer, module, stored["step"], stored["environment"])
