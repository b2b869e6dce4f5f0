"""`megatron-kd cache bench`: bytes and time a token of every payload on this machine, through a real store in a temporary folder.

Top-K rows have uniformly random ids, the worst case for the coding, and log-probabilities of a teacher with a long tail; hidden rows are normal.
"""

import tempfile
import time

import numpy as np
import torch

from megatron_kd.cache import upkeep
from megatron_kd.cache.codec import TopKRows, encode_hidden, encode_topk
from megatron_kd.cache.key import CacheContext, segment_key
from megatron_kd.cache.spec import Collection, PayloadSpec
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter


def top_k_rows(num_rows: int, k: int, vocab: int, generator: np.random.Generator) -> TopKRows:
    """Distinct random ids, log-probabilities of normal logits, tails of 0 to 0.3."""
    ids = np.sort(generator.integers(0, vocab - k + 1, (num_rows, k)), axis=1) + np.arange(k)
    tail = generator.uniform(0.0, 0.3, num_rows)
    logits = torch.from_numpy(generator.normal(0.0, 3.0, (num_rows, k)))
    log_probs = logits.log_softmax(1) + torch.from_numpy(np.log1p(-tail))[:, None]
    return TopKRows(torch.from_numpy(ids), log_probs.float(), torch.from_numpy(tail).float())


def draws(num_rows: int, k: int, vocab: int, generator: np.random.Generator) -> TopKRows:
    """Rows as draw_extract leaves them: a dozen distinct ids with log(count / K), the rest unused ids of weight 0."""
    counts = generator.multinomial(k, generator.dirichlet(np.full(12, 0.5), num_rows))
    ids = np.sort(generator.integers(2 * k, vocab - 12, (num_rows, 12)), axis=1) + np.arange(12)
    ids = np.concatenate([ids, np.broadcast_to(np.arange(k - 12), (num_rows, k - 12))], axis=1)
    weights = np.where(counts > 0, np.log(np.maximum(counts, 1) / k), -10_000.0)
    weights = np.concatenate([weights, np.full((num_rows, k - 12), -10_000.0)], axis=1)
    return TopKRows(torch.from_numpy(ids), torch.from_numpy(weights).float(), torch.zeros(num_rows))


def measure(*, vocab: int, k: int, hidden: int, num_tokens: int, segment_tokens: int, threads: int, read_s: float = 1.0) -> list[dict]:
    """One row a payload: bytes_per_token, encode_us and read_us a token on one thread, tokens_per_s of `threads` reader threads."""
    torch.set_num_threads(1)
    specs = [PayloadSpec(kind="topk", width=k, precision=precision, vocab_size=vocab) for precision in ("bf16", "fp32")]
    specs += [PayloadSpec(kind="sampled", width=k, precision="fp32", vocab_size=vocab)]
    specs += [PayloadSpec(kind="hidden", width=hidden, precision=precision, vocab_size=vocab) for precision in ("bf16", "fp8")]
    return [_measure(spec, num_tokens, segment_tokens, threads, read_s) for spec in specs]


def _measure(spec: PayloadSpec, num_tokens: int, segment_tokens: int, threads: int, read_s: float) -> dict:
    generator = np.random.default_rng(0)
    collection = Collection(context=CacheContext(teacher="bench", tokenizer="bench", head_transform="none"), spec=spec)
    with tempfile.TemporaryDirectory(prefix="kd_cache_bench_") as root:
        storage, encode_s = Storage(root), 0.0
        with CacheWriter(storage, collection) as writer:
            for index in range(max(1, num_tokens // segment_tokens)):
                rows = _rows(spec, segment_tokens, generator)
                started = time.perf_counter()
                payload, error = encode_hidden(rows, spec) if spec.kind == "hidden" else (encode_topk(rows, spec), 0.0)
                encode_s += time.perf_counter() - started
                writer.add(segment_key(np.array([index])), 0, segment_tokens, np.arange(segment_tokens), payload, error)
        report = upkeep.stat(storage)
        single = upkeep.bench(storage, collection, min_s=read_s)
        several = upkeep.bench(storage, collection, min_s=read_s, num_threads=threads)
    return {"payload": spec.describe(), "bytes_per_token": report["bytes_per_token"], "encode_us": 1e6 * encode_s / report["tokens"],
            "read_us": single["microseconds_per_token_and_thread"], "threads": threads, "tokens_per_s": several["tokens_per_s"],
            "relative_error": report["collections"][0]["relative_error"]}


def _rows(spec: PayloadSpec, num_rows: int, generator: np.random.Generator):
    if spec.kind == "hidden":
        return torch.from_numpy(generator.normal(0.0, 2.0, (num_rows, spec.width))).bfloat16()
    return (draws if spec.kind == "sampled" else top_k_rows)(num_rows, spec.width, spec.vocab_size, generator)


def table(results: list[dict]) -> str:
    """Markdown."""
    lines = ["| payload | bytes a token | encode, us a token | read and decode, us a token | tokens/s | relative error |", "|---|---|---|---|---|---|"]
    lines += [f"| {r['payload']} | {r['bytes_per_token']:,.0f} | {r['encode_us']:.2f} | {r['read_us']:.2f} | {r['tokens_per_s']:,.0f} ({r['threads']} threads) | {r['relative_error']:.2g} |"
              for r in results]
    return "\n".join(lines)
