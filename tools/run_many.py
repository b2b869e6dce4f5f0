"""Runs a list of measurements, each in its own process with its own deadline, and joins their JSON into one file.

    python tools/run_many.py docs/benchmarks/runs_h200.json --out out/h200 [--only NAME ...]

The list: {"env": {...}, "runs": [{"name", "command", "timeout_s", "lane", "after"}]}. Runs of one lane go one after another, lanes beside each
other; `after` names a run that must have ended first; `{out}` and `{name}` in a command are replaced. A failure ends nothing but its own run,
and a run's end ends every process it started, torchrun's workers too, which have sessions of their own.
Prints a line per run and a table last; exit code 0 if all ran.
"""

import argparse
import json
import os
import subprocess
import threading
import time
from pathlib import Path


def run_one(run: dict, out: Path, env: dict) -> dict:
    """One process group, its log beside its JSON; killed whole at its deadline."""
    log = out / f"{run['name']}.log"
    command = run["command"].format(out=out, name=run["name"])
    started = time.monotonic()
    with log.open("w") as file:
        mark = f"RUN_MANY={os.getpid()}_{run['name']}"
        environment = {**os.environ, **env, **run.get("env", {}), "RUN_MANY": mark.split("=")[1]}
        process = subprocess.Popen(["bash", "-c", command], stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code = process.wait(run["timeout_s"])
        except subprocess.TimeoutExpired:
            code = "timeout"
        kill_marked(mark.encode())
    result = {"name": run["name"], "command": command, "exit": code, "wall_s": round(time.monotonic() - started, 1)}
    parts = sorted(out.glob(f"{run['name']}.json*"))
    result["results"] = [json.loads(p.read_text()) for p in parts]
    if code != 0:
        result["log_tail"] = log.read_text(errors="replace")[-1500:]
    print(f"[{run['name']}] exit {code} after {result['wall_s']} s", flush=True)
    return result


def kill_marked(mark: bytes) -> None:
    """SIGKILL to every process that inherited `mark` in its environment (Linux)."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), 9)
        except (OSError, ValueError):
            continue


def run_lane(runs: list[dict], out: Path, env: dict, done: dict, ended: dict, deadline: float) -> None:
    """The runs of one lane in order."""
    for run in runs:
        if run.get("after"):
            ended[run["after"]].wait(max(0.0, deadline - time.monotonic()))
        left = deadline - time.monotonic()
        if left < 15:
            done[run["name"]] = {"name": run["name"], "exit": "no time left", "results": []}
        else:
            done[run["name"]] = run_one({**run, "timeout_s": min(run["timeout_s"], left)}, out, env)
        ended[run["name"]].set()


def table(results: list[dict]) -> str:
    """One line a result."""
    lines = [f"{'run':46} {'loss':15} {'exit':>8} {'s/step':>8} {'peak GiB':>9}  last loss"]
    for result in results:
        for part in result["results"] or [{}]:
            seconds, peaks = part.get("step_s") or [], part.get("peak_bytes") or []
            loss = (part.get("losses") or [{}])[-1]
            lines.append(f"{result['name'][:46]:46} {part.get('loss', ''):15} {part.get('error') or str(result['exit']):>8} {min(seconds[1:], default=float('nan')):8.3f} "
                         f"{max(peaks[1:], default=float('nan')) / 2**30:9.2f}  " + " ".join(f"{k}={v:.4f}" for k, v in loss.items() if "loss" in k))
    return "\n".join(lines)


def main() -> int:
    """All lanes, one file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("list")
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    plan = json.loads(Path(args.list).read_text())
    runs = [r for r in plan["runs"] if not args.only or r["name"] in args.only]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    done, ended = {}, {r["name"]: threading.Event() for r in plan["runs"]}
    for name in ended.keys() - {r["name"] for r in runs}:
        ended[name].set()
    lanes: dict[str, list] = {}
    for run in runs:
        lanes.setdefault(run.get("lane", "0"), []).append(run)
    deadline = time.monotonic() + args.limit_s
    threads = [threading.Thread(target=run_lane, args=(lane, out, plan.get("env", {}), done, ended, deadline)) for lane in lanes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = [done[r["name"]] for r in runs]
    (out / "all.json").write_text(json.dumps(results, indent=1) + "\n")
    for result in results:
        if result.get("log_tail"):
            print(f"--- {result['name']}\n{result['log_tail'][-700:]}")
    print(table(results))
    return int(any(r["exit"] != 0 for r in results))


if __name__ == "__main__":
    raise SystemExit(main())
