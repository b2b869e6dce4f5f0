"""The numbers of one run, step by step, kept in a file so that a resumed run goes on with them.

Owns `history.jsonl`: one record a training step and one an evaluation. Called by `train` on rank 0; read by cli/report.py.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class History:
    """Records in the order of steps. A record whose step is repeated after a resume replaces the old one."""

    path: Path
    steps: dict[int, dict] = field(default_factory=dict)
    """step -> {"step", "seconds", "tokens", metric: value}."""
    evaluations: dict[int, dict] = field(default_factory=dict)
    """Training steps done -> {"step", metric: value}."""

    @classmethod
    def open(cls, path: Path, resume_step: int) -> "History":
        """The history up to `resume_step` finished steps (0: a new one)."""
        history = cls(path)
        if resume_step and path.is_file():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                kind = record.pop("kind")
                if record["step"] < resume_step or (kind == "evaluation" and record["step"] == resume_step):
                    (history.steps if kind == "step" else history.evaluations)[record["step"]] = record
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(
                json.dumps({"kind": kind, **r}) + "\n"
                for kind, records in (("step", history.steps), ("evaluation", history.evaluations))
                for r in records.values()
            )
        )
        return history

    def add_step(self, step: int, *, seconds: float, tokens: int, metrics: dict[str, float]) -> None:
        """One finished training step (0-based)."""
        self.steps[step] = {"step": step, "seconds": seconds, "tokens": tokens, **metrics}
        self._append("step", self.steps[step])

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation after `step` finished training steps."""
        self.evaluations[step] = {"step": step, **metrics}
        self._append("evaluation", self.evaluations[step])

    def tokens_per_s(self) -> float | None:
        """Tokens trained on over the seconds of all steps; None before the first."""
        seconds = sum(r["seconds"] for r in self.steps.values())
        return sum(r["tokens"] for r in self.steps.values()) / seconds if seconds else None

    def _append(self, kind: str, record: dict) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps({"kind": kind, **record}) + "\n")
