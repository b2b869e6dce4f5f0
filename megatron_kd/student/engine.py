"""Engine: what attach installs in one Megatron process. Joins look-ahead, target source, output-layer hook and Megatron's events.

Owns the order of things within a step: plans, posts, takes, the loss, the step's numbers. Built by attach; its methods are called by Bridge
through a pre-wrap hook, callbacks and the forward step. Holds no collective of its own outside of start-up.
"""

import contextlib
from dataclasses import dataclass, field, replace

import torch

from megatron_kd.errors import ConfigError, DataEnded, DataError, rule
from megatron_kd.loss.denominator import WEIGHT_UNITS, Denominator, denominator_of
from megatron_kd.loss.flags import DeviceFlags
from megatron_kd.loss.hidden_term import HiddenTerm
from megatron_kd.loss.objective import Objective
from megatron_kd.mcore import configure, iterators
from megatron_kd.mcore.groups import Groups
from megatron_kd.mcore.model import language_model
from megatron_kd.mcore.output_layer import HeadCall, OutputLayerHook
from megatron_kd.mcore.transfer import to_device
from megatron_kd.rows import TokenBlock, token_hash
from megatron_kd.student import loss as losses
from megatron_kd.student.lookahead import LookAhead
from megatron_kd.student.plans import eval_plans, train_plans
from megatron_kd.student.selection import RowSelection, select_all, select_rows
from megatron_kd.student.settings import Settings
from megatron_kd.student.targets import SourceRequest, Targets, make_targets
from megatron_kd.student.vocabulary import check_context, resolve_vocab, text_config


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the last stage, from its forward to its loss function."""

    mode: str
    """`train` or `eval`."""
    step: int
    """Step of its TokenBlock."""
    index: int
    """Index within the step."""
    lookahead: LookAhead
    """Where its TokenBlock is."""
    batch: dict | None = None
    """What the forward step read from its iterator."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weighted sums over this rank's rows, fp32, by their name in Megatron's log."""
    denominator: Denominator | None = None
    """What these sums are divided by."""
    has_teacher: bool = True
    """False where the source gave no rows and the micro-batch trained on cross-entropy alone."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.mode} step {self.step}, micro-batch {self.index}"


@dataclass(slots=True, kw_only=True)
class _Progress:
    """Where the trainer is."""

    mode: str = "train"
    step: int = -1
    num_microbatches: int = 0
    next_index: int = 0
    next_eval: int = 0
    train_step: int = 0
    posted: set = field(default_factory=set)


class Engine:
    """State of one attached process; see the module."""

    def __init__(self, cfg, settings: Settings):
        self._cfg, self._settings = cfg, settings
        self._lookaheads: dict[str, LookAhead | None] = {"train": None, "valid": None, "test": None, "current": None}
        self._progress = _Progress()
        self._hook: OutputLayerHook | None = None
        self._targets: Targets | None = None
        self._groups: Groups | None = None
        self._vocab = self._lm = self._flags = self._hidden_term = None

    @property
    def targets(self) -> Targets:
        """The target source; exists once the student's model does."""
        assert self._targets is not None
        return self._targets

    @property
    def evaluates(self) -> bool:
        """Whether evaluation runs the teacher."""
        return self._settings.evaluates

    @property
    def num_reports(self) -> int:
        """Reports that Bridge adds up for this step: micro-batches x data- and context-parallel ranks."""
        return self._progress.num_microbatches * self._groups.dp_cp.size()

    def on_model(self, chunks: list) -> list:
        """Bridge's pre-wrap hook: the student exists, unwrapped; its weights are loaded if they come from Hugging Face."""
        configure.check_config(self._cfg)
        self._lm = language_model(chunks[-1])
        self._groups = Groups.of(self._lm.pg_collection)
        self._vocab = self._resolve_vocab()
        self.close()
        self._targets = make_targets(self._request())
        if self._lm.post_process:
            self._hook = OutputLayerHook(self._lm, self._handle)
            self._hidden_term = self._add_hidden_term()
        iterators.intercept_iterators(self._on_iterators)
        return chunks

    def _resolve_vocab(self):
        lm = self._lm
        tp = self._groups.tp.size()
        padded = lm.output_layer.weight.shape[0] * tp if lm.post_process and lm.output_layer.weight is not None else lm.vocab_size
        teacher, tokenizer = self._settings.teacher, self._cfg.tokenizer
        student_tokenizer = getattr(tokenizer, "tokenizer_model", None) if "HuggingFace" in str(getattr(tokenizer, "tokenizer_type", "")) else None
        config = text_config(teacher.model)
        check_context(teacher, config, self._cfg.model.seq_length)
        return resolve_vocab(student_padded=padded, student_vocab=self._cfg.model.vocab_size, teacher_vocab=config.vocab_size, tp=tp, explicit=self._settings.vocab_size,
                             student_tokenizer=student_tokenizer, teacher_tokenizer=teacher.tokenizer or teacher.model)

    def _request(self) -> SourceRequest:
        settings, cfg = self._settings, self._cfg
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return SourceRequest(teacher=settings.teacher, loss=settings.loss, stream=settings.stream, cache=settings.cache, cfg=cfg, student_lm=self._lm, groups=self._groups,
                             vocab=self._vocab, device=device, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[settings.teacher.precision],
                             seq_length=cfg.model.seq_length, micro_batch=cfg.train.micro_batch_size, output_dir=settings.output_dir)

    def _add_hidden_term(self) -> HiddenTerm | None:
        """The optional term on hidden states: a part of the student's model, so that DDP, optimizer and checkpoint hold its projection."""
        term, head = self._settings.loss.hidden_term, self.targets.head
        if term is None:
            return None
        if head is None:
            raise ConfigError(rule("loss.hidden_term", term.kind, "top-K targets hold no hidden states", "Remove it, or use hidden-state targets"))
        if "ce_only" in (self._settings.stream.on_teacher_loss, self._settings.cache.on_miss):
            raise ConfigError(rule("loss.hidden_term", term.kind, "a micro-batch without its teacher would leave its projection without a gradient",
                                   "Set stream.on_teacher_loss and cache.on_miss to something other than ce_only"))
        config = self._cfg.model
        self._lm.kd_hidden_term = HiddenTerm(term.kind, config.hidden_size, head.weight_VH.shape[1], sequence_parallel=bool(config.sequence_parallel),
                                             dtype=config.params_dtype, device=next(self._lm.parameters()).device)
        return self._lm.kd_hidden_term

    @property
    def _weight_units(self) -> int:
        """Units of a weight in Megatron's int32 token count: 1/1024, coarser where a global batch would overflow it, 1 beside MoE
        auxiliary losses and multi-token prediction, which the same count divides."""
        config = self._cfg.model
        if getattr(config, "num_moe_experts", None) or getattr(config, "mtp_num_layers", None):
            return 1
        return max(1, min(WEIGHT_UNITS, 2**30 // (self._cfg.train.global_batch_size * config.seq_length)))

    # Data

    def _on_iterators(self, train, valid, test) -> None:
        for name, iterator in (("train", train), ("valid", valid), ("test", test)):
            if iterator is not None:
                if isinstance(iterator, list):
                    raise ConfigError(rule("external data iterators", len(iterator), "one iterator a model chunk cannot be read ahead", "Give one iterator"))
                self._lookaheads[name] = self._watch(iterator, "train" if name == "train" else "eval")

    def _watch(self, rerun_iterator, mode: str) -> LookAhead:
        return iterators.slide_under(rerun_iterator, lambda inner: LookAhead(inner, plans=(), mode=mode, split=iterators.splitter(self._cfg)))

    @contextlib.contextmanager
    def evaluating(self, rerun_iterator):
        """For an evaluation outside of Bridge's own: its iterator stands in for the validation set's inside this block."""
        before = self._lookaheads["valid"]
        self._lookaheads["valid"] = self._watch(rerun_iterator, "eval")
        try:
            yield
        finally:
            self._lookaheads["valid"] = before

    def _train_plans(self, train_state):
        train, validation = self._cfg.train, self._cfg.validation
        return train_plans(first_step=train_state.step, consumed_samples=train_state.consumed_train_samples, train_iters=train.train_iters,
                           samples_per_microbatch=train.micro_batch_size * self._groups.dp.size(), num_microbatches_at=iterators.num_microbatches_at,
                           skipped=frozenset(train.iterations_to_skip or ()), eval_interval=validation.eval_interval if train_state.do_valid else None)

    # Events

    def begin_training(self, train_state) -> None:
        """Before the first step: what the training iterator will be asked for is known."""
        if self._lookaheads["train"] is not None:
            self._lookaheads["train"].extend(self._train_plans(train_state))

    def begin_train_step(self, step: int) -> None:
        """A training step starts on every rank."""
        self._lookaheads["current"] = self._lookaheads["train"]
        self._progress.train_step = step
        self._begin("train", step, iterators.num_microbatches_now())

    def begin_evaluation(self, which: str) -> None:
        """An evaluation run starts: `valid` or `test`."""
        if not self.evaluates:
            return
        num = iterators.num_eval_microbatches(self._cfg, self._groups.dp.size())
        self._lookaheads["current"] = self._lookaheads[which]
        if self._lookaheads[which] is not None:
            self._lookaheads[which].extend(eval_plans(first=self._progress.next_eval, iters=self._cfg.validation.eval_iters, num_microbatches=num))

    def begin_eval_step(self) -> None:
        """One evaluation batch starts on every rank."""
        if not self.evaluates:
            return
        step = self._progress.next_eval
        self._progress.next_eval += 1
        self._begin("eval", step, iterators.num_eval_microbatches(self._cfg, self._groups.dp.size()))

    def _begin(self, mode: str, step: int, num_microbatches: int) -> None:
        progress = self._progress
        progress.mode, progress.step, progress.num_microbatches, progress.next_index = mode, step, num_microbatches, 0
        lookahead = self._lookaheads["current"]
        if lookahead is not None:
            lookahead.begin_step(step)
        if getattr(self.targets.source, "is_pipelined", False):
            self.targets.source.run_step(self._blocks_of_step(lookahead))

    def _blocks_of_step(self, lookahead: LookAhead) -> list[TokenBlock]:
        """All micro-batches of the step that begins; on middle stages, which read no data, blocks of the same shape."""
        progress, groups = self._progress, self._groups
        reads = groups.is_first_stage or groups.is_last_stage or iterators.splitter(self._cfg) is not None
        if reads:
            blocks = lookahead.upcoming(progress.num_microbatches)
            if len(blocks) < progress.num_microbatches:
                raise DataEnded(rule("data iterator", f"{progress.mode} step {progress.step}", f"has {len(blocks)} of {progress.num_microbatches} micro-batches",
                                     "Provide more data, or train fewer steps"))
            return blocks
        size = self._cfg.train.micro_batch_size if progress.mode == "train" else self._cfg.validation.eval_micro_batch_size or self._cfg.train.micro_batch_size
        shape = (size, self._cfg.model.seq_length)
        return [TokenBlock(tokens_bs=torch.zeros(shape, dtype=torch.int64), loss_mask_bs=torch.zeros(shape), step=progress.step, micro_batch=i, mode=progress.mode)
                for i in range(progress.num_microbatches)]

    # One micro-batch on the last stage

    def owns_head(self, model) -> bool:
        """Whether this chunk's forward ends in the output layer."""
        return self._hook is not None and language_model(model) is self._lm

    def begin_microbatch(self) -> MicroBatch:
        """The next micro-batch of the current step; rows of the ones to come are asked for."""
        progress = self._progress
        lookahead = self._lookaheads["current"]
        if progress.step < 0 or lookahead is None:
            raise ConfigError(rule("callbacks", None, "the forward step ran before any callback of this attachment", "Call pretrain(cfg, kd.forward_step, callbacks=kd.callbacks)"))
        micro = MicroBatch(mode=progress.mode, step=progress.step, index=progress.next_index, lookahead=lookahead)
        scheduled = iterators.current_microbatch(self._lm)
        if scheduled is not None and scheduled != micro.index:
            raise DataError(rule("micro-batch", scheduled, f"the schedule runs it where the forward step counts {micro.index}", "Replayed micro-batches are not supported"))
        progress.next_index += 1
        if self.targets.ahead:
            for block in lookahead.upcoming(micro.index + 1 + self.targets.ahead)[micro.index:]:
                self._post(block)
        return micro

    def _post(self, block: TokenBlock) -> None:
        if block.key not in self._progress.posted:
            self._progress.posted.add(block.key)
            self.targets.source.post(block)

    def bind(self, micro: MicroBatch):
        """Forwards inside this block end in the fused loss."""
        return self._hook.bind(micro)

    def _block(self, micro: MicroBatch) -> TokenBlock:
        """The TokenBlock of `micro`, compared with the batch that its forward step read. Errors: DataError."""
        block = micro.lookahead.at(micro.step, micro.index)
        tokens = None if micro.batch is None else micro.batch.get("tokens", micro.batch.get("input_ids"))
        if tokens is not None and token_hash(tokens, block.cu_seqlens) != block.hash:
            raise DataError(rule("tokens", micro.where, "are not those that were read ahead", "The data iterator must yield the same items in the same order"))
        return block

    def _handle(self, call: HeadCall, micro: MicroBatch) -> torch.Tensor:
        """OutputLayerHook's handler: per-token losses [b, t]."""
        if call.mtp_weights_bt is not None:
            selection = select_all(call.mtp_weights_bt)
            objective = Objective(kd_weight=0.0, ce_weight=1.0)
            out, _ = losses.fused_loss(call, selection, None, objective, self._vocab, self._settings.loss, self._flags_on(call))
            return losses.scatter(out.loss_N, selection, call.labels_bt.shape)
        block = self._block(micro)
        selection = select_rows(block, self._groups.cp)
        objective = losses.objective_of(self._settings.loss, self._progress.train_step, self._cfg.train.train_iters)
        rows = self._take(block)
        if rows is None:  # degraded, agreed by all ranks: this micro-batch trains on cross-entropy alone
            return self._without_teacher(call, micro, selection, objective)
        teacher = losses.teacher_of(rows, self.targets.head, selection, call)
        drops = self._settings.loss.on_nonfinite == "drop_rows"
        finite_N = losses.finite_rows(teacher, selection, call) if drops or call.hidden_pbH.device.type == "cpu" else None
        if not drops and finite_N is not None:
            losses.check_finite(finite_N, self.targets.name, micro.where)
        out, extra = losses.fused_loss(call, selection, teacher, objective, self._vocab, self._settings.loss, self._flags_on(call), hidden_term=self._hidden_term,
                                       finite_N=finite_N if drops else None)
        self.targets.source.release(block)
        weights = to_device(selection.weights_N, out.kd_N.device)
        weights = weights * finite_N if drops else weights  # the denominator counts what drop_rows leaves
        micro.denominator = denominator_of(weights, self._settings.loss.denominator, self._weight_units)
        kept = {} if self.targets.head is not None else {"student mass kept": out.student_kept_N, "teacher mass kept": out.teacher_kept_N}
        micro.sums = {name: (value.detach() * weights).sum() for name, value in {"kd loss": out.kd_N, "ce loss": out.ce_N, **kept, **extra}.items()}
        total = out.loss_N + sum(self._settings.loss.hidden_term.weight * value for value in extra.values()) if extra else out.loss_N
        return losses.scatter(total, selection, call.labels_bt.shape)

    def _without_teacher(self, call: HeadCall, micro: MicroBatch, selection: RowSelection, objective: Objective) -> torch.Tensor:
        """Cross-entropy of the same rows over the same denominator; its rows do not count in the mean of KD."""
        out, _ = losses.fused_loss(call, selection, None, replace(objective, kd_weight=0.0), self._vocab, self._settings.loss, self._flags_on(call))
        weights = to_device(selection.weights_N, out.ce_N.device)
        micro.denominator = denominator_of(weights, self._settings.loss.denominator, self._weight_units)
        of_teacher = ("kd loss",) if self.targets.head is not None else ("kd loss", "student mass kept", "teacher mass kept")
        micro.sums = {**dict.fromkeys(of_teacher, out.kd_N.new_zeros(())), "ce loss": (out.ce_N * weights).sum()}
        micro.has_teacher = False
        return losses.scatter(out.loss_N, selection, call.labels_bt.shape)

    def _take(self, block: TokenBlock):
        self._post(block)
        rows = self.targets.source.take(block)
        self._progress.posted.discard(block.key)
        return rows

    def _flags_on(self, call: HeadCall) -> DeviceFlags:
        if self._flags is None:
            self._flags = DeviceFlags(call.hidden_pbH.device)
        return self._flags

    def check_flags(self, where: str) -> None:
        """Waits for the device and raises what the loss counted there; free on the CPU, where the loss raised at once."""
        if self._flags is not None and self._flags.counts.is_cuda:
            self._flags.check(source=self.targets.name, where=where, allow_nonfinite=self._settings.loss.on_nonfinite == "drop_rows")

    def close(self) -> None:
        """Close the target source; harmless twice."""
        if self._targets is not None:
            self._targets.source.close()
            self._targets = None
