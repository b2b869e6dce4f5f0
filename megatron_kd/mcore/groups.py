"""Groups: the process groups and ranks of one Megatron model, read once from its `pg_collection`.

Called by the output-layer hook, the teacher's forward and attach, so that groups are arguments and never globals.
"""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_kd.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Process groups that this rank shares with others of the same model."""

    tp: dist.ProcessGroup
    """Tensor parallel."""
    pp: dist.ProcessGroup
    """Pipeline parallel."""
    cp: dist.ProcessGroup
    """Context parallel."""
    dp: dist.ProcessGroup
    """Data parallel, context parallelism not counted."""
    dp_cp: dist.ProcessGroup
    """Data and context parallel: the ranks over which Megatron sums gradients and losses."""
    mp: dist.ProcessGroup
    """Tensor and pipeline parallel: one replica of the model at one context-parallel rank."""

    @classmethod
    def current(cls) -> "Groups":
        """Those of megatron-core's global parallel state, which must be initialised."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        return cls.of(ProcessGroupCollection.use_mpu_process_groups())

    @classmethod
    def of(cls, collection) -> "Groups":
        """Those of a megatron-core ProcessGroupCollection."""
        return cls(**{name: getattr(collection, name) for name in ("tp", "pp", "cp", "dp", "dp_cp", "mp")})

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding (of its first chunk)."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer (of its last chunk)."""
        return self.pp.rank() == self.pp.size() - 1


def layout_of(model_config) -> ParallelLayout:
    """The ParallelLayout that a Megatron model configuration asks for, at the world size that is running."""
    sizes = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size", "ep": "expert_model_parallel_size"}
    degrees = {short: getattr(model_config, name, None) or 1 for short, name in sizes.items()}
    vpp = getattr(model_config, "virtual_pipeline_model_parallel_size", None)
    return ParallelLayout.for_world(dist.get_world_size() if dist.is_initialized() else degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["ep"], **degrees,
                                    etp=getattr(model_config, "expert_tensor_parallel_size", None), vpp=vpp if vpp and vpp > 1 else None,
                                    sequence_parallel=bool(model_config.sequence_parallel) and degrees["tp"] > 1)
