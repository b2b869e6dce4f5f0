"""What two parts of a recipe must agree on. Called by config/load.py and, with the world's size, by the commands. Torch-free.

What only the model's own configuration can tell (heads, experts, vocabulary) is checked where that is read: attach and the planner.
"""

from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError, UnsupportedLayout, rule


def check(recipe: Recipe) -> None:
    """ConfigError or UnsupportedLayout for a combination that cannot be right, before anything is started."""
    _check_layout(recipe)
    _check_loss(recipe)
    _check_placement(recipe)
    _check_training(recipe)


def check_world(recipe: Recipe, world_size: int) -> None:
    """UnsupportedLayout or ConfigError where the student's layout or batch does not fit `world_size` ranks."""
    layout = recipe.student.layout.for_world(world_size)
    if recipe.train.global_batch % (recipe.train.micro_batch * layout.dp):
        raise ConfigError(
            rule(
                "train.global_batch",
                recipe.train.global_batch,
                f"must be a multiple of train.micro_batch x data-parallel ranks = {recipe.train.micro_batch} x {layout.dp}",
                "Raise train.global_batch, or start fewer ranks",
            )
        )


def _check_layout(recipe: Recipe) -> None:
    layout, seq = recipe.student.layout, recipe.data.seq_length
    if layout.sequence_parallel and seq % layout.tp:
        raise UnsupportedLayout(
            rule(
                "data.seq_length",
                seq,
                f"must be a multiple of student.layout.tp = {layout.tp} under sequence parallelism",
                f"Take {seq // layout.tp * layout.tp or layout.tp}",
            )
        )
    if layout.cp > 1 and seq % (2 * layout.cp):
        raise UnsupportedLayout(
            rule("data.seq_length", seq, f"must be a multiple of 2 x student.layout.cp = {2 * layout.cp}", "Choose another length")
        )
    for name, part in (("student", layout), ("teacher", recipe.teacher.layout)):
        if recipe.device == "cpu" and part and part.cp > 1:
            raise UnsupportedLayout(
                rule(f"{name}.layout.cp", part.cp, "attention on the CPU has no context parallelism", f"Set {name}.layout.cp=1, or device: cuda")
            )
    if recipe.device == "cpu" and recipe.data.packed:
        raise UnsupportedLayout(rule("data.packed", True, "attention on the CPU takes no packed sequences", "Set data.packed=false, or device: cuda"))
    if recipe.device == "cpu" and recipe.loss.backend == "triton":
        raise ConfigError(rule("loss.backend", "triton", "Triton needs a GPU", "Set loss.backend=auto"))


def _check_loss(recipe: Recipe) -> None:
    loss = recipe.loss
    if not any((loss.kd_weight, loss.ce_weight, loss.kd_weight_end, loss.ce_weight_end)):
        raise ConfigError(rule("loss.kd_weight", loss.kd_weight, "kd_weight and ce_weight are both 0, so nothing is learned", "Set one above 0"))
    if loss.divergence in ("skew_forward_kl", "skew_reverse_kl") and loss.skew == 1.0:
        raise ConfigError(rule("loss.skew", loss.skew, "at 1 both sides of the divergence are the same", "Choose a skew below 1"))


def _check_placement(recipe: Recipe) -> None:
    teacher, cache = recipe.teacher, recipe.cache
    if teacher.placement == "cached" and cache.payload == "topk":
        if recipe.loss.hidden_term is not None:
            raise ConfigError(
                rule(
                    "loss.hidden_term",
                    recipe.loss.hidden_term.kind,
                    "top-K targets hold no hidden states",
                    "Set cache.payload=hidden, or remove loss.hidden_term",
                )
            )
        if cache.selection == "sampled" and (recipe.loss.divergence != "forward_kl" or recipe.loss.top_k_mode == "renormalise"):
            raise ConfigError(
                rule(
                    "cache.selection",
                    "sampled",
                    f"draws estimate forward KL alone; loss is {recipe.loss.divergence}, {recipe.loss.top_k_mode}",
                    "Set loss.divergence=forward_kl and loss.top_k_mode=none",
                )
            )
        if recipe.loss.temperature != 1.0 and recipe.loss.top_k_mode != "renormalise":
            raise ConfigError(
                rule(
                    "loss.temperature",
                    recipe.loss.temperature,
                    "top-K targets are stored at temperature 1, where the mass outside K is known",
                    "Use 1.0, loss.top_k_mode=renormalise, or cache.payload=hidden",
                )
            )
    if (
        teacher.placement == "streamed"
        and recipe.stream.on_teacher_loss == "ce_only"
        and recipe.loss.ce_weight == 0
        and not recipe.loss.ce_weight_end
    ):
        raise ConfigError(
            rule(
                "stream.on_teacher_loss",
                "ce_only",
                "loss.ce_weight is 0, so a step without the teacher would learn nothing",
                "Raise loss.ce_weight, or choose fail or reroute",
            )
        )
    if teacher.placement == "cached" and cache.on_miss == "ce_only" and recipe.loss.ce_weight == 0 and not recipe.loss.ce_weight_end:
        raise ConfigError(
            rule(
                "cache.on_miss",
                "ce_only",
                "loss.ce_weight is 0, so a missing row would learn nothing",
                "Raise loss.ce_weight, or choose fail or build",
            )
        )
    if teacher.context_length is not None and teacher.context_length < recipe.data.seq_length:
        raise ConfigError(
            rule(
                "teacher.context_length",
                teacher.context_length,
                f"is shorter than data.seq_length = {recipe.data.seq_length}",
                "Shorten data.seq_length, or take another teacher",
            )
        )
    if teacher.layout and teacher.world_size and teacher.world_size % teacher.layout.min_world:
        raise UnsupportedLayout(
            rule(
                "teacher.world_size",
                teacher.world_size,
                f"must be a multiple of what teacher.layout takes, {teacher.layout.min_world}",
                "Change one of the two",
            )
        )


def _check_training(recipe: Recipe) -> None:
    train = recipe.train
    if train.eval_interval is not None and train.eval_iters == 0:
        raise ConfigError(
            rule(
                "train.eval_iters",
                0,
                f"train.eval_interval is {train.eval_interval}, but an evaluation reads no batch",
                "Set train.eval_iters, or remove train.eval_interval",
            )
        )
    if train.warmup_iters >= train.iters and train.lr_decay != "constant":
        raise ConfigError(
            rule(
                "train.warmup_iters",
                train.warmup_iters,
                f"leaves nothing of train.iters = {train.iters} to decay in",
                "Shorten the warm-up, or set train.lr_decay=constant",
            )
        )
    if train.global_batch % train.micro_batch:
        raise ConfigError(
            rule("train.global_batch", train.global_batch, f"must be a multiple of train.micro_batch = {train.micro_batch}", "Change one of the two")
        )
    if train.min_lr > train.lr:
        raise ConfigError(rule("train.min_lr", train.min_lr, f"is above train.lr = {train.lr}", "Lower it"))
