"""Build, inspect and check a teacher's stored targets.

    megatron-kd cache build RECIPE [key=value ...]      (alone, or under torchrun with the teacher's layout)
    megatron-kd cache coverage RECIPE [key=value ...]   how much of what the recipe will read is stored
    megatron-kd cache stat STORE [--json] [--bench]     STORE: a folder, a URL such as s3://bucket/prefix, or a recipe
    megatron-kd cache verify STORE [--against RECIPE [key=value ...]]   every byte; with a recipe also a sample through the teacher
    megatron-kd cache merge TARGET SOURCE [SOURCE ...]
    megatron-kd cache repair STORE
    megatron-kd cache bench                             bytes and time a token of every payload here
"""

import argparse
import json
import sys
import time
import traceback

from megatron_kd.config.load import load
from megatron_kd.errors import ConfigError, KDError, rule

RECIPE_SUFFIXES = (".yaml", ".yml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand each."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (("build", "run the teacher over the recipe's data and store its answers; continues where it stopped"), ("coverage", "share of the recipe's rows that is stored")):
        action = actions.add_parser(name, help=text)
        action.add_argument("recipe")
        action.add_argument("overrides", nargs="*", metavar="key=value")
        action.add_argument("--json", action="store_true", help="print the result as JSON")
    stat = actions.add_parser("stat", help="segments, tokens, bytes a token, teacher, tokenizer")
    stat.add_argument("store")
    stat.add_argument("--json", action="store_true", help="print the result as JSON")
    stat.add_argument("--bench", action="store_true", help="measure how fast records are read and decoded here")
    stat.add_argument("--threads", type=int, default=1, help="reader threads of --bench")
    stat.add_argument("--seconds", type=float, default=3.0, help="length of --bench")
    verify = actions.add_parser("verify", help="check every byte; exit code 1 on any finding")
    verify.add_argument("store")
    verify.add_argument("--against", nargs="+", metavar=("RECIPE", "key=value"), help="run a sample of the recipe's data through its teacher again and compare")
    verify.add_argument("--samples", type=int, default=8, help="micro-batches of that sample")
    merge = actions.add_parser("merge", help="copy what TARGET lacks from other stores")
    merge.add_argument("target")
    merge.add_argument("sources", nargs="+")
    bench = actions.add_parser("bench", help="bytes and time a token of every payload on this machine, in a temporary store")
    bench.add_argument("--vocab", type=int, default=248_320)
    bench.add_argument("--k", type=int, default=100)
    bench.add_argument("--hidden", type=int, default=2048)
    bench.add_argument("--tokens", type=int, default=32_768)
    bench.add_argument("--segment", type=int, default=4096, help="tokens of a segment")
    bench.add_argument("--threads", type=int, default=2)
    bench.add_argument("--seconds", type=float, default=1.0, help="length of each reading")
    bench.add_argument("--json", action="store_true", help="print the result as JSON")
    repair = actions.add_parser("repair", help="drop damage, rebuild indexes, seal what a dead writer left")
    repair.add_argument("store")


def run(args: argparse.Namespace) -> int:
    """One action; returns the exit code."""
    return {"build": build, "coverage": coverage, "stat": stat, "verify": verify, "merge": merge, "repair": repair, "bench": bench}[args.action](args)


def open_store(text: str):
    """The Storage of a folder, a URL or a recipe."""
    from megatron_kd.cache.storage import Storage

    if not text.endswith(RECIPE_SUFFIXES):
        return Storage(text)
    from pathlib import Path

    recipe = load(text)
    return Storage(recipe.cache.location or str(Path(recipe.output_dir) / "cache"))


def stat(args: argparse.Namespace) -> int:
    """Print sums; with --bench the reader's throughput."""
    from megatron_kd.cache import upkeep
    from megatron_kd.cache.manifest import Manifest

    storage = open_store(args.store)
    report = upkeep.stat(storage)
    if args.bench:
        report["bench"] = [upkeep.bench(storage, collection, num_threads=args.threads, min_s=args.seconds) | {"payload": collection.spec.describe()} for collection in Manifest(storage).collections]
    print(json.dumps(report, indent=1) if args.json else describe(report))
    return 0


def describe(report: dict) -> str:
    """A stat report for people."""
    lines = [f"{report['location']}: {report['segments']:,} segments, {report['tokens']:,} tokens, {report['bytes']:,} bytes in {report['shards']} shards"
             + (f", {report['open_shards']} shards still open" if report["open_shards"] else "")]
    for c in report["collections"]:
        lines.append(f"  {c['payload']} width {c['width']} {c['precision']}, vocabulary {c['vocab_size']:,}: {c['tokens']:,} tokens, {c['bytes_per_token'] or 0:.1f} bytes a token"
                     + (f", relative error {c['relative_error']:.2g}" if c["relative_error"] else ""))
        lines.append(f"    teacher {c['teacher'][:16]}, tokenizer {c['tokenizer'][:16]}, head {c['head_transform']}, segments of {c['segment_tokens']} tokens")
    for b in report.get("bench", ()):
        lines.append(f"  reading {b['payload']}: {b['tokens_per_s']:,.0f} tokens/s, {b['bytes_per_s'] / 1e6:.0f} MB/s on {b['threads']} thread(s), "
                     f"{b['microseconds_per_token_and_thread']:.2f} us a token and thread")
    return "\n".join(lines)


def bench(args: argparse.Namespace) -> int:
    """Print a table of payloads."""
    from megatron_kd.cli import cache_bench

    results = cache_bench.measure(vocab=args.vocab, k=args.k, hidden=args.hidden, num_tokens=args.tokens, segment_tokens=args.segment,
                                  threads=args.threads, read_s=args.seconds)
    print(json.dumps(results, indent=1) if args.json else cache_bench.table(results))
    return 0


def merge(args: argparse.Namespace) -> int:
    """Copy records between stores."""
    from megatron_kd.cache import upkeep
    from megatron_kd.cache.writer import DEFAULT_SHARD_BYTES

    counts = upkeep.merge([open_store(source) for source in args.sources], open_store(args.target), shard_bytes=DEFAULT_SHARD_BYTES, progress=_percent("merging"))
    print(f"{counts['copied']:,} segments copied, {counts['skipped']:,} were there already")
    return 0


def repair(args: argparse.Namespace) -> int:
    """Mend a store in place."""
    from megatron_kd.cache import upkeep

    report = upkeep.repair(open_store(args.store))
    print(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in report.items()))
    return 0


def verify(args: argparse.Namespace) -> int:
    """Checksums of everything; then, where asked, the teacher's word."""
    from megatron_kd.cache import upkeep

    if args.against is None:
        findings = upkeep.verify(open_store(args.store), _percent("verifying"))
        print("\n".join(findings) if findings else "every byte is as it was written")
        return 1 if findings else 0
    return _on_ranks(args.against[0], args.against[1:], lambda recipe, say: _against(recipe, open_store(args.store), args.samples))


def build(args: argparse.Namespace) -> int:
    """Store what is missing."""
    return _on_ranks(args.recipe, args.overrides, lambda recipe, say: _build(recipe, say, as_json=args.json))


def coverage(args: argparse.Namespace) -> int:
    """Look every segment up; no teacher runs."""
    return _on_ranks(args.recipe, args.overrides, lambda recipe, say: _coverage(recipe, as_json=args.json))


def _on_ranks(path: str, overrides: list[str], work) -> int:
    """Run `work(recipe, say) -> (exit code, text for stdout or None)` with a process group, its own output in this rank's log file, progress by
    `say` on the terminal's stderr."""
    from pathlib import Path

    import torch.distributed

    from megatron_kd.cli import logs
    from megatron_kd.cli.train import rank_and_world

    recipe = load(path, overrides)
    rank, _ = rank_and_world()
    log = Path(recipe.output_dir) / "logs" / f"cache_rank{rank}.log"
    joined_before = torch.distributed.is_initialized()
    with logs.to_file(log) as terminal:
        try:
            code, result = work(recipe, lambda text: print(text, file=terminal, flush=True))
        except Exception as error:  # noqa: BLE001 -- Megatron and torch raise anything; the log has the traceback
            traceback.print_exc()
            hint = "" if isinstance(error, KDError) else f"\n  (traceback in {log})"
            print(f"cache, rank {rank}: {type(error).__name__}: {error}{hint}", file=terminal, flush=True)
            return 1
        finally:
            if torch.distributed.is_initialized() and not joined_before:
                torch.distributed.destroy_process_group()
    if result is not None:
        print(result, flush=True)
    return code


def _build(recipe, say, *, as_json: bool) -> tuple[int, str | None]:
    import torch.distributed as dist

    from megatron_kd.cache.manifest import Manifest
    from megatron_kd.cache.writer import CacheWriter, recover
    from megatron_kd.cli.cache_recipe import blocks_of, build_teacher, open_job
    from megatron_kd.mcore.data_walk import datasets_of, num_samples
    from megatron_kd.mcore.groups import Groups
    from megatron_kd.teacher.dump import Plan, Recorder, lanes

    job = open_job(recipe)
    recovered = recover(job.storage) if dist.get_rank() == 0 else 0
    dist.barrier()
    plan = Plan(Manifest(job.storage), job.collection)
    answers = build_teacher(job)
    groups = Groups.current()
    lane, num_lanes = groups.dp.rank(), groups.dp.size()
    reports = answers.writes and lane == 0
    datasets = datasets_of(job.cfg)
    progress = BuildProgress(num_samples(datasets, recipe.cache.max_sequences), say if reports else lambda _: None)
    if recovered:
        say(f"{recovered:,} segments of an interrupted build recovered")

    def needed():
        for block, count in blocks_of(job, datasets):
            progress.samples += count
            cut = plan.need(block)
            if cut is not None:
                yield cut

    writer = CacheWriter(job.storage, job.collection, shard_bytes=recipe.cache.shard_bytes, recover_first=False) if answers.writes else None
    recorder = None if writer is None else Recorder(writer, job.collection.spec)
    try:
        for blocks, num_real in lanes(needed(), num_lanes, lane, answers.depth):
            answered = answers.many(blocks)
            for block, rows in list(zip(blocks, answered, strict=True))[:num_real] if recorder is not None else ():
                recorder.put(block, rows)
            progress.step(plan.new_rows, recorder.num_bytes * num_lanes if recorder is not None else 0)
        if recorder is not None:
            recorder.close()
    finally:
        if recorder is not None:
            recorder.close(finish=False)
    dist.barrier()
    if not reports:
        return 0, None
    result = {"new_segments": plan.new_segments, "new_rows": plan.new_rows, "known_segments": plan.known_segments, "recovered_segments": recovered,
              "seconds": progress.elapsed_s, "store": job.storage.location}
    text = f"{plan.new_segments:,} segments ({plan.new_rows:,} rows) stored in {progress.elapsed_s:.0f} s, {plan.known_segments:,} were there; {job.storage.location}"
    return 0, json.dumps(result) if as_json else text


class BuildProgress:
    """Lines with ETA, tokens/s and bytes/s, at most one every `interval_s`."""

    def __init__(self, total_samples: int, say, interval_s: float = 5.0):
        self._total, self._say, self._interval_s = max(total_samples, 1), say, interval_s
        self._started = self._last = time.monotonic()
        self.samples = 0

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def step(self, rows: int, num_bytes: int) -> None:
        """Report if it is time."""
        if time.monotonic() - self._last < self._interval_s:
            return
        self._last = time.monotonic()
        elapsed = self.elapsed_s
        left = elapsed * (self._total - self.samples) / max(self.samples, 1)
        self._say(f"{self.samples:,} of {self._total:,} sequences ({self.samples / self._total:.0%}), {rows / elapsed:,.0f} tokens/s, {num_bytes / elapsed / 1e6:.2f} MB/s, "
                  f"{left / 60:.1f} minutes left")


def _coverage(recipe, *, as_json: bool) -> tuple[int, str | None]:
    import torch.distributed as dist

    from megatron_kd.cache.reader import CacheReader
    from megatron_kd.cache.segments import split
    from megatron_kd.cli.cache_recipe import blocks_of, open_job
    from megatron_kd.mcore.data_walk import datasets_of

    job = open_job(recipe)
    totals = {"segments": 0, "rows": 0, "stored_segments": 0, "stored_rows": 0}
    first_miss = None
    with CacheReader(job.storage, job.collection, num_threads=1) as reader:
        for block, _ in blocks_of(job, datasets_of(job.cfg)):
            segments, missing = list(split(block)), reader.missing(block)
            lost = {segment.start for segment in missing}
            totals["segments"] += len(segments)
            totals["rows"] += sum(len(segment.asked) for segment in segments)
            totals["stored_segments"] += len(segments) - len(missing)
            totals["stored_rows"] += sum(len(segment.asked) for segment in segments if segment.start not in lost)
            if missing and first_miss is None:
                first_miss = f"{missing[0].describe()}: {reader.manifest.explain(reader.collection, missing[0])}"
    totals |= {"hit_rate": totals["stored_rows"] / max(totals["rows"], 1), "first_miss": first_miss, "store": job.storage.location}
    if dist.get_rank() != 0:
        return 0, None
    text = f"{totals['stored_rows']:,} of {totals['rows']:,} rows ({totals['hit_rate']:.1%}), {totals['stored_segments']:,} of {totals['segments']:,} segments are stored in {totals['store']}"
    return 0, json.dumps(totals) if as_json else text + (f"\nfirst miss: {first_miss}" if first_miss else "")


def _against(recipe, storage, num_blocks: int) -> tuple[int, str | None]:
    from megatron_kd.cache.reader import CacheReader
    from megatron_kd.cli.cache_recipe import blocks_of, build_teacher, open_job
    from megatron_kd.mcore.data_walk import datasets_of
    from megatron_kd.teacher import compare

    job = open_job(recipe)
    answers, findings = build_teacher(job), []
    with CacheReader(storage, job.collection, num_threads=1) as reader:
        for block, _ in blocks_of(job, datasets_of(job.cfg)):
            if len(findings) == num_blocks:
                break
            if not block.row_ids_N.numel() or reader.missing(block):
                continue
            fresh = answers(block)
            findings.append(compare.compare(reader.read(block).rows, fresh) if fresh is not None else {"rows": 0})
    if not findings:
        raise ConfigError(rule("rows of the recipe that are stored", 0, f"there is nothing to compare in {storage.location} for {job.collection.spec.describe()} of this teacher",
                               "Run `megatron-kd cache coverage RECIPE`"))
    if not answers.writes:
        return 0, None
    result = compare.join(findings)
    problems = compare.problems(result, job.collection.spec.kind, job.collection.spec.precision)
    return int(bool(problems)), "\n".join([", ".join(f"{name} {value:.4g}" for name, value in result.items()), *problems])


def _percent(what: str):
    """Progress on a terminal; silent elsewhere."""
    if not sys.stderr.isatty():
        return None
    return lambda done, total: print(f"\r{what} {done / max(total, 1):.0%} of {total / 1e6:,.0f} MB", end="" if done < total else "\n", file=sys.stderr, flush=True)
