"""Dumps and cached trainings of the tiny models of tests/mcore_training.py. Run inside the processes of `megatron_ranks`."""

from unittest import mock

import torch

from tests import mcore_training as tiny

TRUE_VOCAB = tiny.TRUE_VOCAB
CE_WEIGHT = {"kd_weight": 0.7, "ce_weight": 0.3}


def write_tokenizer(folder: str) -> None:
    """A word-level tokenizer beside a tiny teacher, so that the cache can hash it."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(TRUE_VOCAB)}, unk_token="w0")).save(f"{folder}/tokenizer.json")


def cache_config(location: str, **changes):
    """fp32 log-probabilities unless changed."""
    from megatron_kd.config.schema import CacheConfig

    return CacheConfig(**{"location": location, "log_probs": "fp32", "shard_bytes": 20_000, "hidden_rows": "fp32", **changes})


def dump(rank, world, *, teacher, location, num_samples, batch, layout, reverse=False, **changes):
    """Store the rows of samples 0..num_samples - 1 of PatternData, `batch` at a time, as `cache build` does; returns (new segments, known segments)."""
    from megatron_kd.cache.manifest import Manifest
    from megatron_kd.cache.writer import CacheWriter
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore import model as models
    from megatron_kd.mcore.groups import Groups
    from megatron_kd.rows import TokenBlock
    from megatron_kd.teacher.cache_of import collection_of, storage_of
    from megatron_kd.teacher.dump import Answers, Plan, Recorder, lanes
    from tests.mcore_data import PatternDataset

    cache = cache_config(location, **changes)
    collection, storage = collection_of(cache, teacher_dir=teacher, true_vocab=TRUE_VOCAB), storage_of(cache, None)
    with tiny.quiet():
        provider = models.teacher_provider(teacher, layout=ParallelLayout.for_world(world, **layout), dtype=torch.float32, seq_length=tiny.SEQ)
        (chunk,) = models.build_model(provider, seed=1)
    answers, groups = Answers(models.language_model(chunk), collection.spec, window_rows=7), Groups.current()
    data = PatternDataset(num_samples, tiny.SEQ, TRUE_VOCAB, 1.0)
    order = list(range(num_samples))[::-1 if reverse else 1]
    plan = Plan(Manifest(storage), collection)
    torch.distributed.barrier()
    recorder = Recorder(CacheWriter(storage, collection, shard_bytes=cache.shard_bytes, recover_first=False), collection.spec) if answers.writes else None

    def blocks():
        for index, start in enumerate(range(0, num_samples, batch)):
            samples = [data[i] for i in order[start:start + batch]]
            block = TokenBlock(tokens_bs=torch.stack([s["tokens"] for s in samples]), loss_mask_bs=torch.stack([s["loss_mask"] for s in samples]), step=index, micro_batch=0)
            needed = plan.need(block)
            if needed is not None:
                yield needed

    for asked, num_real in lanes(blocks(), groups.dp.size(), groups.dp.rank(), answers.depth):
        answered = answers.many(asked)
        for block, rows in list(zip(asked, answered))[:num_real] if recorder is not None else ():
            recorder.put(block, rows)
    if recorder is not None:
        recorder.close()
    torch.distributed.barrier()
    return plan.new_segments, plan.known_segments


def train(run: tiny.Run, world: int, *, cache, loss=None, placement="cached"):
    """A Recorder of `run` trained against the cache (or with a colocated teacher), with the sums of what the source logged as `metrics`."""
    import megatron_kd
    from megatron.bridge.training.pretrain import pretrain

    from megatron_kd.config.schema import LossConfig, TeacherConfig

    from megatron_kd.student import attach as attaching

    recorder = tiny.Recorder()
    recorder.metrics = {}

    def collect(_, numbers):
        recorder.metrics |= {name: recorder.metrics.get(name, 0.0) + value for name, value in numbers.items()}

    with tiny.quiet(), mock.patch.object(attaching.callbacks, "write_scalars", collect):
        cfg = tiny.config(run, world)
        kd = megatron_kd.attach(cfg, teacher=TeacherConfig(model=run.teacher, placement=placement, precision="fp32"), loss=LossConfig(**(loss or CE_WEIGHT)), cache=cache)
        try:
            pretrain(cfg, kd.forward_step, callbacks=[*kd.callbacks, recorder.callback()])
        finally:
            kd.close()
    return recorder


def trainings(rank, world, *, plans):
    """[(steps, parameters by name, source metrics)] of several runs of one layout after each other. `plans`: keyword arguments of `train` each."""
    from tests.megatron_cleanup import cleanup

    results = []
    for plan in plans:
        plan = dict(plan)
        recorder = train(plan.pop("run"), world, **plan)
        results.append((recorder.steps, {name: value.numpy() for name, value in recorder.after.items()}, recorder.metrics))
        cleanup()
    return results


def failing(rank, world, *, run, cache):
    """The text of the CacheMiss that ends the run."""
    from megatron_kd.errors import CacheMiss

    try:
        train(run, world, cache=cache)
    except CacheMiss as error:
        return str(error)
    raise AssertionError("the run did not end with a CacheMiss")

