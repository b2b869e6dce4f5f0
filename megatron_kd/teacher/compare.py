"""How far stored rows are from what the teacher answers now. Called by `megatron-kd cache verify --against`."""

import numpy as np

from megatron_kd.rows import RowBlock, TopKBlock

MAX_PROBABILITY_ERROR = {"topk": 0.02, "sampled": 0.25}
MIN_SAME_IDS = {"topk": 0.9, "sampled": 0.9}
MAX_RELATIVE_ERROR = {"fp32": 0.02, "bf16": 0.02, "fp8": 0.06}


def compare(stored: RowBlock | TopKBlock, fresh: RowBlock | TopKBlock) -> dict[str, float]:
    """Numbers over the rows of one micro-batch: rows; same_ids (share of stored ids that the teacher keeps now) and max_probability_error
    for top-K and draws (tail included); relative_error for hidden rows."""
    if isinstance(stored, RowBlock):
        difference = (stored.hidden_NH.double() - fresh.hidden_NH.double()).norm() / fresh.hidden_NH.double().norm()
        return {"rows": stored.row_ids_N.numel(), "relative_error": float(difference)}
    row = np.arange(stored.ids_NK.shape[0])[:, None] << 32
    ours, theirs = ((row | block.ids_NK.numpy()).ravel() for block in (stored, fresh))
    _, at_ours, at_theirs = np.intersect1d(ours, theirs, return_indices=True)
    our_p, their_p = (block.log_probs_NK.exp().numpy().ravel() for block in (stored, fresh))
    error = np.abs(our_p[at_ours] - their_p[at_theirs]).max(initial=0.0)
    tail_error = float((stored.tail_N - fresh.tail_N).abs().max()) if stored.tail_N.numel() else 0.0
    return {"rows": stored.row_ids_N.numel(), "same_ids": len(at_ours) / max(len(ours), 1), "max_probability_error": max(float(error), tail_error)}


def join(findings: list[dict[str, float]]) -> dict[str, float]:
    """Worst numbers over all micro-batches; rows add up."""
    if not findings:
        return {"rows": 0}
    worst = {"same_ids": min}
    return {name: sum(f[name] for f in findings) if name == "rows" else worst.get(name, max)(f[name] for f in findings) for name in findings[0]}


def problems(result: dict[str, float], kind: str, precision: str) -> list[str]:
    """What is beyond rounding; empty where the store is the teacher's."""
    found = []
    if "relative_error" in result and result["relative_error"] > MAX_RELATIVE_ERROR[precision]:
        found.append(f"hidden rows differ by {result['relative_error']:.3g} of their norm, more than {MAX_RELATIVE_ERROR[precision]} ({precision})")
    if "same_ids" in result and result["same_ids"] < MIN_SAME_IDS[kind]:
        found.append(f"only {result['same_ids']:.1%} of the stored ids are kept by the teacher now")
    if "max_probability_error" in result and result["max_probability_error"] > MAX_PROBABILITY_ERROR[kind]:
        found.append(f"a stored probability differs by {result['max_probability_error']:.3g}")
    return found
