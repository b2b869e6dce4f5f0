"""attach: distillation for a Megatron-Bridge training script, in one line.

    kd = megatron_kd.attach(cfg, teacher="Qwen/Qwen3-8B")
    pretrain(cfg, kd.forward_step, callbacks=kd.callbacks)

Owns the public Megatron side. Everything that it installs is undone by not calling it: no class is replaced, no parameter renamed.
"""

import atexit
import logging
import weakref
from collections.abc import Callable
from functools import cached_property

from megatron_kd.config.schema import CacheConfig, LossConfig, StreamConfig, TeacherConfig
from megatron_kd.errors import ConfigError, rule
from megatron_kd.mcore import callbacks, configure
from megatron_kd.mcore.mend import mend
from megatron_kd.student.engine import Engine
from megatron_kd.student.main_guard import check_main_guard
from megatron_kd.student.settings import Settings
from megatron_kd.student.step import ForwardStep

logger = logging.getLogger(__name__)


def attach(cfg, *, teacher: str | TeacherConfig, loss: LossConfig | None = None, stream: StreamConfig | None = None, cache: CacheConfig | None = None,
           vocab_size: int | None = None, per_token_loss: bool | None = True, evaluates: bool = True, output_dir: str | None = None) -> "Distillation":
    """Prepare a Bridge ConfigContainer for distillation; training then needs `kd.forward_step` and `kd.callbacks`.

    cfg             the student's ConfigContainer, before pretrain() or finetune(). Changed: model.calculate_per_token_loss, ddp.average_in_collective,
                    one pre-wrap hook and one post-wrap hook on cfg.model.
    teacher         Hugging Face folder or hub name for a teacher beside the student, or a TeacherConfig (placement colocated, streamed, cached).
    loss            the objective; None: forward KL alone at temperature 1.
    stream, cache   settings of those placements.
    vocab_size      true vocabulary; None: the student's tokenizer's highest id + 1.
    per_token_loss  True: one token count of the global batch divides KD and CE. False: Megatron divides each micro-batch by its own count.
                    None: leave cfg as it is.
    evaluates       whether evaluation runs the teacher and reports KD.

    Errors: UnsupportedLayout and ConfigError, by name, for what Megatron or this package cannot do right, and for a script that saves checkpoints and
    trains at its top level (student/main_guard.py); TokenizerMismatch and VocabMismatch
    when the model is built.
    """
    if isinstance(teacher, str):
        teacher = TeacherConfig(model=teacher, precision="fp32" if configure.precision_of(cfg) == "fp32" else "bf16")
    if teacher.checkpoint is not None:
        raise ConfigError(rule("teacher.checkpoint", teacher.checkpoint, "attach loads its teacher from a Hugging Face folder",
                               "Write one with `megatron-kd convert export FOLDER --checkpoint DIR --reference MODEL`, and give it as model"))
    check_main_guard(saves=cfg.checkpoint.save is not None)
    if cfg.checkpoint.load is not None:
        mend(cfg.checkpoint.load, cfg)
    configure.configure(cfg, per_token_loss=per_token_loss)
    configure.check_config(cfg)
    if per_token_loss is False:
        logger.warning("calculate_per_token_loss is False: Megatron divides each micro-batch by its own token count, so tokens of micro-batches with fewer unmasked "
                       "tokens weigh more")
    settings = Settings(teacher=teacher, loss=loss or LossConfig(), stream=stream or StreamConfig(), cache=cache or CacheConfig(), vocab_size=vocab_size,
                        evaluates=evaluates, output_dir=output_dir)
    engine = Engine(cfg, settings)
    configure.register_pre_wrap_hook(cfg, engine.on_model)
    return Distillation(engine)


class Distillation:
    """What `attach` returns."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.source_metrics: dict[str, float] = {}
        """Numbers of the target source at the last log interval: seconds in the teacher, ring occupancy, bytes, ..."""
        atexit.register(_close, weakref.ref(engine))  # Bridge may leave training through sys.exit, without on_train_end

    @cached_property
    def forward_step(self) -> ForwardStep:
        """Bridge's step for GPT-like models, distilling."""
        return self.wrap(callbacks.default_forward_step())

    def wrap(self, forward_step: Callable) -> ForwardStep:
        """Any other Bridge forward step, distilling; its loss function must return Megatron's three values."""
        return ForwardStep(forward_step, self._engine)

    @cached_property
    def callbacks(self) -> list:
        """Bridge callbacks; add your own to the list."""
        engine = self._engine
        return [callbacks.callback(
            on_train_start=lambda context: engine.begin_training(context.state.train_state),
            on_train_step_start=lambda context: engine.begin_train_step(context.state.train_state.step),
            on_train_step_end=self._end_step,
            on_eval_start=lambda context: engine.begin_evaluation("valid"),
            on_eval_step_start=lambda context: engine.begin_eval_step(),
            on_test_start=lambda context: engine.begin_evaluation("test"),
            on_test_step_start=lambda context: engine.begin_eval_step(),
        )]

    def evaluating(self, rerun_iterator):
        """Context manager for an evaluation that you run yourself, on an iterator that Bridge did not make for this run."""
        return self._engine.evaluating(rerun_iterator)

    def close(self) -> None:
        """Close the teacher's side; also done when the process ends."""
        self._engine.close()

    def _end_step(self, context) -> None:
        step = context.state.train_state.step
        self._engine.check_flags(f"train step {step}")
        if step % max(1, context.state.cfg.logger.log_interval) == 0:
            self.source_metrics = self._engine.targets.source.metrics()
            callbacks.write_scalars(context.state, self.source_metrics)


def _close(engine: "weakref.ref[Engine]") -> None:
    if engine() is not None:
        engine().close()
