"""A callback for transformers' `Trainer`, the one module here that imports transformers: import it where you train."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .patching import counting, patch
from .report import PatchReport
from .token_losses import reach

LOG = logging.getLogger(__name__)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fuses_the_head(args: TrainingArguments) -> bool:
    """Whether the trainer is TRL's for supervised fine-tuning, of a version that has a head of its own for the loss."""
    trl = sys.modules.get("trl")
    return trl is not None and isinstance(args, trl.SFTConfig) and hasattr(trl.trainer.utils, "add_fused_lm_head")


class PatchCallback(TrainerCallback):
    """Patches the model of a trainer that is made with it, and takes that back when training ends. Options are those of `patch`.

    A model must be patched before accelerate wraps it, hence as the trainer is made; one that is trained again is patched again.
    The loss of TRL's `SFTTrainer` is replaced when training begins, for its own head comes after the callback's first turn.
    `report` is that of the last patch."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.report: PatchReport | None = None
        self.model: weakref.ref[nn.Module] | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        options = self.options
        if fuses_the_head(args):
            only = options.get("only")
            alone = only is not None and {*([only] if isinstance(only, str) else only)} == {"loss"}
            options = {**options, "loss": None, "strict": options.get("strict", True) and not alone}
        self.report, self.model = patch(model, **options), weakref.ref(model)
        if state.is_world_process_zero:
            LOG.info("%s", self.report)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        if self.model is None:
            raise ValueError("PatchCallback: must be among the callbacks that the trainer is made with")
        if not any(m is self.model() for m in model.modules()):
            raise ValueError(
                "PatchCallback: the trainer made another model since, by model_init: patch it there instead"
            )
        if not self.report.changes:
            self.on_init_end(args, state, control, model=model)
        only, kind = self.options.get("only"), self.options.get("loss", "linear_cross_entropy")
        if fuses_the_head(args) and kind == "linear_cross_entropy" and (only is None or "loss" in only):
            from accelerate.state import AcceleratorState  # which a trainer that trains has made

            precision = PRECISIONS.get(AcceleratorState().mixed_precision)
            reach(model, self.report, counting(self.report.counter), precision)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        calls = self.report.calls()
        if state.is_world_process_zero and not calls and not args.torch_compile:  # compiled calls are not counted
            LOG.warning("no op of the patch was called in training")
        elif state.is_world_process_zero:
            LOG.info("calls: %s", calls)
        try:
            self.report.undo()
        except ValueError as error:  # not worth the loss of what follows a training
            LOG.warning("the model stays patched: %s", error)
