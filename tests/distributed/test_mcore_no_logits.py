"""No matrix of all rows by the vocabulary shard exists in a Megatron training step with the plugin, not even for multi-token prediction."""

import pytest

SHARD, ROWS, WINDOW = 66, 48, 8
"""Columns of a rank's vocabulary shard (132 over 2), rows of a micro-batch (2 x 24), rows of a window."""


def tallest(rank, world, run, distil):
    """Rows of the largest tensor made with the shard's columns as its last axis, over a whole training."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tests.mcore_training import train_dense, train_distilled

    class Watch(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                is_new = isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known  # not a transposed weight
                if is_new and tensor.dim() > 1 and tensor.shape[-1] == SHARD:
                    self.rows = max(self.rows, tensor.numel() // SHARD)
            return result

    loss = {"kd_weight": 0.7, "ce_weight": 0.3, "temperature": 2.0}
    with Watch() as watch:
        recorder = train_distilled(run, world, loss={**loss, "window_rows": WINDOW}) if distil else train_dense(run, world, loss=loss)
    assert recorder.steps
    return watch.rows


@pytest.mark.parametrize("mtp", [False, True], ids=["main head", "with multi-token prediction"])
def test_logits_of_a_window_are_all_there_is(megatron_ranks, tmp_path, mtp):
    """Two windows, since with several shards one waits while the next is measured; dense logits have all rows."""
    from tests.mcore_training import Run, make_models

    models = make_models(tmp_path)
    overrides = (("mtp_num_layers", 1), ("cross_entropy_loss_fusion", False)) if mtp else ()
    run = Run(student=models["llama"], teacher=models["teacher_full"], tp=2, iters=1, random_init=mtp, overrides=overrides)
    assert max(megatron_ranks.run(tallest, 2, run=run, distil=True, timeout_s=120)) <= 2 * WINDOW
    assert min(megatron_ranks.run(tallest, 2, run=run, distil=False, timeout_s=120)) >= ROWS
