"""Time and peak memory of a recipe's training steps on this machine, with the fused loss or another one in its place.

    python tools/measure_training.py RECIPE [key=value ...] --json out.json
    torchrun --nproc-per-node 2 tools/measure_training.py RECIPE --loss dense --json out.json
    python tools/measure_training.py RECIPE --teach                     # the streamed teacher of such a run, until SIGTERM

Models come from config.json alone, with random weights: what a step costs does not depend on them. `--synthetic-top-k` replaces the cache's
reader by made-up rows of the same shapes in host memory, so that no cache has to be built first. Everything else is the product's own path.
Losses: `ours`; `dense`, `forward-chunked`, `checkpointed` (with online and top-K teachers), `published` (top-K), all of cli/bench_methods.py; `dense-rows`, the float64
reference's formula on fp32 logits, which reports KD and CE apart. `--evaluate-online` puts a colocated teacher behind evaluation whatever the training's placement is.
Writes one JSON object: per step seconds, per rank peak bytes, versions. Called by the scripts that fill docs/benchmarks.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import threading
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path

import torch

SEED = 7
NEARLY_EMPTY_MIB = 6000
"""Contexts of processes that wait for their gate."""


def random_teacher() -> None:
    """Teachers are built from their configuration; a streamed student makes up the head, which its teacher never reads.

    Weights depend on the parameter's name alone, so that a colocated and a streamed teacher of the same tensor-parallel degree are the same model.
    """
    import megatron_kd.mcore.model as models
    import megatron_kd.student.streamed as streamed
    import megatron_kd.teacher.identity as identity
    from megatron_kd.kernels.spec import HeadTransform
    from megatron_kd.student.targets import TeacherHead
    from megatron_kd.student.vocabulary import text_config

    models.teacher_provider = functools.partial(models.teacher_provider, load_weights=False)
    build = models.build_model

    def build_named(provider, **kwargs):
        chunks = build(provider, **kwargs)
        for chunk in chunks:
            lm = models.language_model(chunk)
            head = models.head_weight(lm) if lm.post_process else None
            for name, parameter in chunk.named_parameters():
                fill(parameter.data, "head" if parameter is head else name)
        return chunks

    models.build_model = build_named

    def identify(path, *, compute_fingerprint, context_length=None):
        return identity.Identity(fingerprint="0" * 32, head_digest="random", head_transform="scale=1 softcap=0 bias=no", hidden_size=text_config(str(path)).hidden_size,
                                 context_length=context_length or 2**31 - 1)

    def head(path, vocab, tp_rank, *, dtype, device):
        config = text_config(str(path))
        weight = torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        fill(weight, "head")
        first, last = vocab.teacher_rows(tp_rank)
        return TeacherHead(weight_VH=weight[first:last].clone(), transform=HeadTransform())

    identity.identify = streamed.identify = identify
    streamed.head_from_checkpoint = head


def fill(weight: torch.Tensor, name: str) -> None:
    """Matrices: normal, 0.02; the delta rule's decay: as Megatron draws it, log of uniform(1, 16); other vectors stay as they were built."""
    generator = torch.Generator(weight.device).manual_seed(SEED + zlib.crc32(name.encode()))
    if weight.dim() > 1:
        weight.normal_(0.0, 0.02, generator=generator)
    elif name.endswith("A_log"):
        weight.uniform_(1.0, 16.0, generator=generator).log_()


class SyntheticTopK:
    """TargetSource of made-up top-K rows in host memory: an arithmetic sequence of ids, equal probabilities, half of the mass in the tail."""

    def __init__(self, k: int, vocab_size: int):
        self._k, self._vocab = k, vocab_size

    def post(self, block) -> None:
        """Nothing to read."""

    def take(self, block):
        """Rows of `block`."""
        from megatron_kd.rows import TopKBlock

        row_ids = block.row_ids_N
        num = row_ids.numel()
        start = (row_ids * 7919) % self._vocab
        ids = (start[:, None] + torch.arange(self._k)[None] * 997) % self._vocab
        return TopKBlock(ids_NK=ids, log_probs_NK=torch.full((num, self._k), 0.5 / self._k).log(), tail_N=torch.full((num,), 0.5), row_ids_N=row_ids, hash=block.hash)

    def release(self, block) -> None:
        """Nothing is held."""

    def metrics(self) -> dict:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing to free."""


def synthetic_top_k(k: int) -> None:
    """The engine takes made-up rows instead of a cache's."""
    import megatron_kd.student.engine as engine
    from megatron_kd.student.targets import Targets

    engine.make_targets = lambda request: Targets(source=SyntheticTopK(k, request.vocab.true_size), head=None, name="made-up top-K rows")


def swap_loss(method_name: str) -> None:
    """The student's loss becomes one of cli/bench_methods.py (one vocabulary shard only)."""
    import megatron_kd.student.loss as student_loss
    from megatron_kd.cli import bench_methods
    from megatron_kd.loss.flags import DeviceFlags
    from megatron_kd.loss.fused import KDOutput
    from megatron_kd.loss.signals import TopKTeacher

    def loss(student_NH, head_VH, teacher, *, objective, labels_N, tp_group=None, flags=None, **_):
        assert tp_group is None, "the comparison losses know no tensor parallelism"
        sparse = isinstance(teacher, TopKTeacher)
        method = next(m for m in bench_methods.METHODS if m.name == method_name + (" top-k" if sparse else ""))
        targets = dict(ids_NK=teacher.ids_NK, log_probs_NK=teacher.log_probs_NK, tail_N=teacher.tail_N, teacher_NH=None, teacher_head_VH=None) if sparse else dict(
            teacher_NH=teacher.rows_NH, teacher_head_VH=teacher.head_VH, ids_NK=None, log_probs_NK=None, tail_N=None)
        case = bench_methods.Case(student_NH=student_NH, head_VH=head_VH, labels_N=labels_N.long(), kd_weight=objective.kd_weight, ce_weight=objective.ce_weight,
                                  tail_bucket=method.tail_bucket, **targets)
        mean = method.loss(case)
        loss_N = mean.expand(student_NH.shape[0])  # the sum over rows of a mean over rows: the same total and the same gradient
        detached = mean.detach().expand(student_NH.shape[0]).float()
        kept_N = 1 - teacher.tail_N if sparse else None
        return KDOutput(loss_N=loss_N.float(), kd_N=detached, ce_N=torch.zeros_like(detached), student_kept_N=kept_N, teacher_kept_N=kept_N,
                        flags=flags or DeviceFlags(student_NH.device))

    student_loss.fused_linear_kd = loss


def dense_rows() -> None:
    """The student's loss becomes dense logits, fp32 softmaxes and autograd, row by row (one vocabulary shard, hidden-state teachers)."""
    import megatron_kd.student.loss as student_loss
    import torch.nn.functional as F
    from megatron_kd.loss.flags import DeviceFlags
    from megatron_kd.loss.fused import KDOutput

    def loss(student_NH, head_VH, teacher, *, objective, labels_N, flags=None, **_):
        log_q_NV = F.log_softmax((student_NH @ head_VH.t()).float(), -1)
        with torch.no_grad():
            log_p_NV = F.log_softmax((teacher.rows_NH @ teacher.head_VH.t()).float(), -1)
        kd_N = F.kl_div(log_q_NV, log_p_NV, reduction="none", log_target=True).sum(-1)
        ce_N = F.nll_loss(log_q_NV, labels_N.long(), reduction="none")
        return KDOutput(loss_N=objective.kd_weight * kd_N + objective.ce_weight * ce_N, kd_N=kd_N.detach(), ce_N=ce_N.detach(), student_kept_N=None, teacher_kept_N=None,
                        flags=flags or DeviceFlags(student_NH.device))

    student_loss.fused_linear_kd = loss


class EvaluatesOnline:
    """TargetSource: one source for training, a colocated teacher for evaluation."""

    def __init__(self, training, evaluation):
        self._by_mode = {"train": training, "eval": evaluation}

    def post(self, block) -> None:
        """To the block's source."""
        self._by_mode[block.mode].post(block)

    def take(self, block):
        """From the block's source."""
        return self._by_mode[block.mode].take(block)

    def release(self, block) -> None:
        """To the block's source."""
        self._by_mode[block.mode].release(block)

    def metrics(self) -> dict:
        """Of the training's source."""
        return self._by_mode["train"].metrics()

    def close(self) -> None:
        """Both."""
        for source in self._by_mode.values():
            source.close()


def evaluate_online() -> None:
    """The engine's evaluation takes full-vocabulary targets."""
    import megatron_kd.student.engine as engine
    from megatron_kd.student.colocated import colocated_targets

    make = engine.make_targets

    def make_both(request):
        training, evaluation = make(request), colocated_targets(request)
        return dataclasses.replace(training, source=EvaluatesOnline(training.source, evaluation.source), head=evaluation.head)

    engine.make_targets = make_both


class Measure:
    """Bridge callback: seconds of each step and the device's peak over all steps from the second on."""

    def __init__(self):
        self.seconds, self.losses, self.peaks, self.evaluations = [], [], [], []

    def on_train_step_start(self, context) -> None:
        """Clock on."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def on_train_step_end(self, context) -> None:
        """Clock off."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.peaks.append(torch.cuda.max_memory_allocated())
        self.seconds.append(time.perf_counter() - self._started)
        self.losses.append({k: float(v) for k, v in (context.loss_dict or {}).items()})

    def on_eval_end(self, context) -> None:
        """Held-out numbers after so many steps."""
        self.evaluations.append({"step": len(self.seconds), **{k: float(v) for k, v in (context.total_loss_dict or {}).items()}})


def main() -> None:
    """Parse, patch what was asked for, run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--loss", choices=("ours", "dense", "forward-chunked", "checkpointed", "published", "dense-rows"), default="ours")
    parser.add_argument("--synthetic-top-k", type=int, metavar="K")
    parser.add_argument("--evaluate-online", action="store_true")
    parser.add_argument("--teach", action="store_true")
    parser.add_argument("--gate", metavar="FILE", action="append", default=[],
                        help="import everything, then wait for this lock (one for each device, in order): runs started together use a device one after another")
    parser.add_argument("--limit-s", type=float, help="end with exit code 3 so long after the gates: waiting for them does not count")
    parser.add_argument("--announce", metavar="FILE", help="write this file once the gate is passed")
    parser.add_argument("--wait-for", metavar="FILE", help="import everything, then wait for this file: a teacher whose student is behind a gate")
    parser.add_argument("--own-weights", action="store_true", help="load the models' weights instead of random ones")
    parser.add_argument("--json")
    args = parser.parse_intermixed_args()
    from megatron_kd.cli.train import rank_and_world, start_runtime
    from megatron_kd.config.load import load

    overrides = list(args.overrides) + ([] if args.own_weights else ["student.init=random"])
    recipe = load(args.recipe, overrides)
    rank, world = rank_and_world()
    start_runtime(recipe)
    gates = [pass_gate(path, rank) for path in args.gate]
    if gates and rank == 0:
        wait_for_memory()
    if args.limit_s and rank == 0 and not args.teach:  # other ranks wait for rank 0, and a teacher for its student, without knowing
        limit = threading.Timer(args.limit_s, os._exit, [3])
        limit.daemon = True
        limit.start()
    if args.announce and rank == 0:
        Path(args.announce).touch()
    if args.wait_for:
        wait_for(Path(args.wait_for))
    if recipe.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not args.own_weights:
        random_teacher()
    if args.teach:
        teach(recipe, world, args.json)
        return
    if args.synthetic_top_k:
        synthetic_top_k(args.synthetic_top_k)
    if args.evaluate_online:
        evaluate_online()
    if args.loss == "dense-rows":
        dense_rows()
    elif args.loss != "ours":
        swap_loss(args.loss)
    train(recipe, args, rank, world)
    del gates


def pass_gate(path: str, rank: int):
    """The open lock file, once it is ours; rank 0 of a run takes it, the others meet it in the first collective."""
    import fcntl

    import_megatron()
    file = open(path, "w")
    if rank == 0:
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def wait_for_memory(deadline_s: float = 60.0) -> None:
    """Until the visible devices are nearly empty, or the deadline: the run before gives its gate back first and its memory when its last process is gone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *(["-i", visible] if visible else [])]
    until = time.monotonic() + deadline_s
    while max(map(int, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())) > NEARLY_EMPTY_MIB and time.monotonic() < until:
        time.sleep(0.5)


def import_megatron() -> None:
    """What takes half a minute to import comes before any wait."""
    import megatron.bridge.training.gpt_step  # noqa: F401
    import megatron.bridge.training.pretrain  # noqa: F401


def wait_for(path: Path) -> None:
    """Until `path` exists."""
    import_megatron()
    while not path.exists():
        time.sleep(0.1)


def teach(recipe, world: int, target: str | None) -> None:
    """The product's teacher loop; its peak is written to `target` every two seconds, since such a process is often killed."""
    import signal

    from megatron_kd.cli import teach as command

    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    if target and torch.cuda.is_available():
        threading.Thread(target=write_peak, args=(Path(target), recipe.name, torch.cuda.current_device()), daemon=True).start()
    command.teach(recipe, name="teacher", world=world, stop=lambda: bool(stopped), say=print)


def write_peak(path: Path, name: str, device: int) -> None:
    """Forever."""
    while True:
        time.sleep(2.0)
        path.write_text(json.dumps({"name": name, "role": "teacher", "peak_bytes": [0, torch.cuda.max_memory_allocated(device)]}) + "\n")


def train(recipe, args, rank: int, world: int) -> None:
    """The product's training, measured."""
    from megatron_kd.mcore import bridge_config, pretraining
    from megatron_kd.student.attach import attach

    from megatron_kd.cli.prepare import prepare_models, prepare_text_of

    models = prepare_models(recipe) if args.own_weights else None
    text = prepare_text_of(recipe, models) if args.own_weights else None
    sources = bridge_config.Sources(student=models.student if models else recipe.student.model, tokenizer=models.student_tokenizer if text else None, text=text)
    cfg = bridge_config.config_container(recipe, sources, world)
    teacher = dataclasses.replace(recipe.teacher, model=models.teacher, tokenizer=models.teacher_tokenizer if text else recipe.teacher.tokenizer) if models else recipe.teacher
    kd = attach(cfg, teacher=teacher, loss=recipe.loss, stream=recipe.stream, cache=recipe.cache,
                per_token_loss=recipe.train.calculate_per_token_loss, output_dir=recipe.output_dir)
    measure = Measure()
    result = {"name": recipe.name, "loss": args.loss, "placement": recipe.teacher.placement, "layout": recipe.student.layout.for_world(world).describe(), "rank": rank,
              "seq_length": recipe.data.seq_length, "global_batch": recipe.train.global_batch, "micro_batch": recipe.train.micro_batch, "recompute": recipe.train.recompute}
    try:
        pretraining.pretrain(cfg, kd.forward_step, [*kd.callbacks, measure])
        metrics = kd.source_metrics
        result |= {"step_s": measure.seconds, "peak_bytes": measure.peaks, "losses": measure.losses, "evaluations": measure.evaluations, "metrics": metrics}
    except torch.OutOfMemoryError as error:
        result |= {"error": "out of memory", "message": str(error).split(".")[0]}
    result |= {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
               "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": " ".join(["tools/measure_training.py", *os.sys.argv[1:]])}
    if args.json:
        path = Path(args.json if world == 1 else f"{args.json}.rank{rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    if rank == world - 1:
        print(json.dumps({k: v for k, v in result.items() if k not in ("losses", "command", "evaluations")}), flush=True)
    os._exit(0) if "error" in result else None


if __name__ == "__main__":
    main()
