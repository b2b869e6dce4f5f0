"""Runs side by side: the losses of the steps that they share, step time, what the stream or the cache did.

    megatron-kd compare out/demo out/demo/colocated [--json out/demo/compare.json]
The first run is the one that the others are compared with. Reads history.jsonl and summary.json of each folder.
"""

import argparse
import json
from pathlib import Path

from megatron_kd.cli.report import CE_METRIC, KD_METRIC
from megatron_kd.errors import ConfigError, rule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Output folders of finished runs."""
    parser.add_argument("folders", nargs="+", metavar="OUTPUT_DIR")
    parser.add_argument("--json", metavar="FILE", help="also write the comparison there")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console

    rows = compare([Path(folder) for folder in args.folders])
    Console(width=140).print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def compare(folders: list[Path]) -> list[dict]:
    """One row a run. `max_kd_difference` is over the steps that a run shares with the first one; None for the first."""
    runs = [_read(folder) for folder in folders]
    first = runs[0][1]
    rows = []
    for (summary, steps), folder in zip(runs, folders):
        shared = sorted(set(steps) & set(first))
        differences = {metric: max((abs(steps[s][metric] - first[s][metric]) for s in shared), default=None) for metric in (KD_METRIC, CE_METRIC)}
        is_first = steps is first
        rows.append(
            {
                "folder": str(folder),
                "placement": summary["placement"],
                "targets": summary["targets"],
                "layout": summary["layout"],
                "steps": len(steps),
                "shared_steps": len(shared),
                "first_kd": [steps[s][KD_METRIC] for s in sorted(steps)[:3]],
                "max_kd_difference": None if is_first else differences[KD_METRIC],
                "max_ce_difference": None if is_first else differences[CE_METRIC],
                "step_s": summary["step_s"],
            }
            | {name: value for name, value in summary.items() if name.startswith(("stream_", "cache_"))}
        )
    return rows


def table(rows: list[dict]):
    """For a person."""
    from rich.table import Table

    view = Table(title="the same student from the same start")
    for column in ("teacher", "steps", "KD loss of the first steps", "largest difference", "s/step", "target source"):
        view.add_column(column, justify="right" if column in ("steps", "s/step") else "left")
    for row in rows:
        difference = "" if row["max_kd_difference"] is None else f"KD {row['max_kd_difference']:.2g}, CE {row['max_ce_difference']:.2g}"
        if difference and row["targets"] != rows[0]["targets"]:
            difference = f"CE {row['max_ce_difference']:.2g} (KD is over {row['targets']} and the rest)"
        view.add_row(
            row["placement"], str(row["steps"]), "  ".join(f"{v:.4f}" for v in row["first_kd"]), difference, f"{row['step_s']:.2f}", _source(row)
        )
    return view


def _source(row: dict) -> str:
    if "stream_bytes" in row:
        expected = row.get("stream_bytes_expected")
        moved = f"{row['stream_bytes'] / 1e6:.2f} MB a rank" + (f" ({expected / 1e6:.2f} by the closed form)" if expected is not None else "")
        return f"waited {100 * row['stream_wait_share']:.0f}% of the step, ring {100 * row['stream_occupancy']:.0f}% ready, {moved}"
    if "cache_rows" in row:
        kept = f"{100 * row['cache_teacher_mass_kept']:.1f}% of the teacher's mass kept"
        return f"{row['cache_rows']:,.0f} rows read, {row['cache_missing_rows']:,.0f} missing, {kept}"
    return ""


def _read(folder: Path) -> tuple[dict, dict[int, dict]]:
    try:
        summary = json.loads((folder / "summary.json").read_text())
        records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    except OSError as e:
        raise ConfigError(
            rule(
                "compare",
                str(folder),
                f"holds no finished run ({e.strerror}: {Path(e.filename).name})",
                "Give the output_dir of a `megatron-kd train`",
            )
        ) from e
    return summary, {r["step"]: r for r in records if r["kind"] == "step"}
