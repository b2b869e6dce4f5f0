"""Progress of a training run for a person: a bar with the time left on a terminal, plain lines elsewhere; and the history behind it.

Owns the callback that Bridge calls around steps and evaluations on the reporting rank (the last one: it is on the last pipeline stage, where
the losses are). Called by `train`. It reads the device only every `log_interval` steps.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_kd.cli.history import History

SECONDS_BETWEEN_LINES = 5.0


class Reporter:
    """Says what happens. Bar on a terminal, lines otherwise."""

    def __init__(self, terminal: TextIO | None):
        self._console = Console(file=terminal, highlight=False) if terminal is not None else None
        self._bar, self._task, self._last_line_s = None, None, 0.0

    def say(self, text) -> None:
        """A line, a table or another Rich object, above the bar if there is one."""
        if self._console is not None:
            (self._bar.console if self._bar else self._console).print(text, soft_wrap=isinstance(text, str))

    def start(self, title: str, total: int, done: int = 0) -> None:
        """Begin counting to `total`."""
        self.finish()
        if self._console is not None and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, completed=done, note="")

    def advance(self, title: str, done: int, total: int, note: str, seconds_left: float | None) -> None:
        """`done` of `total`; `seconds_left` is for the plain lines."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif self._console is not None and (done == total or time.monotonic() - self._last_line_s > SECONDS_BETWEEN_LINES):
            self._last_line_s = time.monotonic()
            left = "" if seconds_left is None else f"  {int(seconds_left) // 60}:{int(seconds_left) % 60:02d} left"
            self.say(f"{title} {done}/{total}  {note}{left}")

    def note(self, text: str) -> None:
        """A passing remark beside the bar; nothing where there is none."""
        if self._bar is not None:
            self._bar.update(self._task, note=text)

    def finish(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressCallback:
    """Megatron-Bridge's callback events (duck-typed: Bridge looks methods up by name)."""

    def __init__(
        self,
        reporter: Reporter,
        history: History,
        *,
        train_iters: int,
        tokens_per_step: int,
        log_interval: int,
        eval_iters: int,
        source_metrics: Callable[[], Mapping[str, float]],
    ):
        self._reporter, self._history, self._source_metrics = reporter, history, source_metrics
        self._train_iters, self._tokens, self._log_interval, self._eval_iters = train_iters, tokens_per_step, log_interval, eval_iters
        self._pending: list[tuple[int, float, Mapping]] = []
        self._started_s, self._step, self._eval_done = 0.0, 0, 0

    def on_train_step_start(self, context) -> None:
        """Remember when and which."""
        if self._step == 0 and not self._pending:
            self._reporter.start("training", self._train_iters, context.state.train_state.step)
        self._started_s, self._step = time.monotonic(), context.state.train_state.step

    def on_train_step_end(self, context) -> None:
        """Keep the losses; every log interval write them down and show them."""
        self._pending.append((self._step, time.monotonic() - self._started_s, context.loss_dict or {}))
        done = self._step + 1
        if done % self._log_interval == 0 or done == self._train_iters:
            self._flush(done)

    def _flush(self, done: int) -> None:
        started_s = time.monotonic()
        rows = [(step, seconds, numbers(losses)) for step, seconds, losses in self._pending]
        self._pending = []
        waited_s = time.monotonic() - started_s  # the device catching up belongs to the steps
        for i, (step, seconds, metrics) in enumerate(rows):
            last = i == len(rows) - 1
            source = {name: value for name, value in self._source_metrics().items() if math.isfinite(value)} if last else {}
            self._history.add_step(step, seconds=seconds + (waited_s if last else 0.0), tokens=self._tokens, metrics=metrics | source)
        recent = [r["seconds"] for r in list(self._history.steps.values())[-20:]]
        note = shown(rows[-1][2]) + f"  {self._tokens * len(recent) / sum(recent):,.0f} tokens/s"
        self._reporter.advance("training", done, self._train_iters, note, (self._train_iters - done) * sum(recent) / len(recent))
        if done == self._train_iters:
            self._reporter.finish()

    def on_eval_start(self, context) -> None:
        """Count evaluation batches."""
        self._eval_done = 0

    def on_eval_step_end(self, context) -> None:
        """One more evaluation batch."""
        self._eval_done += 1
        self._reporter.note(f"evaluating {self._eval_done}/{self._eval_iters}")

    def on_eval_end(self, context) -> None:
        """Write the result down and say it."""
        metrics, step = numbers(context.total_loss_dict or {}), context.state.train_state.step
        self._history.add_evaluation(step, metrics)
        self._reporter.say(f"held-out after {step} steps: " + shown(metrics))


def shown(metrics: Mapping[str, float]) -> str:
    """KD and cross-entropy where there are both, else every loss."""
    names = [name for name in ("kd loss", "ce loss") if name in metrics] or [name for name in metrics if name.endswith("loss")]
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in names)


def numbers(losses: Mapping) -> dict[str, float]:
    """Plain floats by metric name, tensors read from the device."""
    return {name: float(value) for name, value in losses.items()}
