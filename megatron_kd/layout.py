"""ParallelLayout: the degrees of parallelism of one model, checked.

Called by config, planner, routes and attach. Imports no torch. The rank order inside a world is Megatron's default,
tp-cp-ep-dp-pp (tp fastest).
"""

from dataclasses import dataclass

from megatron_kd.errors import UnsupportedLayout, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism. `dp` follows from the world size: `ParallelLayout.for_world`.

    Errors: UnsupportedLayout where a degree is below 1 or degrees contradict each other.
    """

    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline parallel."""
    cp: int = 1
    """Context parallel."""
    ep: int = 1
    """Expert parallel; divides tp * cp * dp / etp."""
    etp: int | None = None
    """Expert tensor parallel; None means `tp`."""
    dp: int = 1
    """Data parallel (replicas of the dense part)."""
    vpp: int | None = None
    """Virtual pipeline chunks per stage; None means no interleaving."""
    sequence_parallel: bool = False
    """Activations between tensor-parallel regions split over tp along the sequence."""

    def __post_init__(self):
        for name in ("tp", "pp", "cp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise UnsupportedLayout(rule(name, getattr(self, name), "must be at least 1", "Give a positive degree"))
        if self.vpp is not None and self.pp == 1 and self.vpp > 1:
            raise UnsupportedLayout(rule("vpp", self.vpp, "interleaving needs pp > 1", "Set pp >= 2 or leave vpp out"))
        if self.sequence_parallel and self.tp == 1:
            raise UnsupportedLayout(rule("sequence_parallel", True, "needs tp > 1", "Set tp >= 2 or turn sequence_parallel off"))
        if (self.tp * self.cp * self.dp) % (self.ep * self.expert_tp):
            raise UnsupportedLayout(rule("ep", self.ep, f"ep * etp must divide tp * cp * dp = {self.tp * self.cp * self.dp}", "Lower ep or etp, or add ranks"))

    @property
    def expert_tp(self) -> int:
        """Expert tensor-parallel degree in force."""
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        """Ranks of this model's world."""
        return self.tp * self.pp * self.cp * self.dp

    @classmethod
    def for_world(cls, world_size: int, **degrees) -> "ParallelLayout":
        """The layout whose `dp` fills `world_size`. Errors: UnsupportedLayout where it does not divide."""
        model = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
        if world_size % model:
            raise UnsupportedLayout(rule("world_size", world_size, f"must divide by tp * pp * cp = {model}", "Start a multiple of that many ranks"))
        return cls(dp=world_size // model, **degrees)

    def describe(self) -> str:
        """Short text for logs and tables, e.g. `tp=2 pp=2 ep=2 dp=1 sp`."""
        parts = [f"{name}={getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1 or name == "tp"]
        parts += [f"etp={self.etp}"] * (self.etp not in (None, self.tp)) + [f"vpp={self.vpp}"] * bool(self.vpp) + [f"dp={self.dp}"] + ["sp"] * self.sequence_parallel
        return " ".join(parts)
