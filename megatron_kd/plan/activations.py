"""What a decoder layer keeps for backward, and what it needs beside that while it runs.

Owns the activation closed forms, per token of one rank. Called by memory. No torch.

Each block (token mixer, MLP) is a list of tensors that autograd saves, in elements per token with the dtype's size, and the extra
bytes that its backward needs at its worst moment. Two implementations are written down:
  te     Transformer Engine layers, fused attention, FLA delta net, grouped GEMM, fused permutation (what runs on a GPU). LayerNormLinear
         keeps its input and the normalised input; q, k, v are kept after RoPE; scores never exist.
  torch  megatron-core's local modules (what runs on the CPU): norms keep intermediate tensors, scores are kept, experts run one by one.
Sources: megatron-core 0.19.2 (transformer/attention.py, transformer/mlp.py, transformer/moe, ssm/gated_delta_net), Transformer Engine 2.x
(LayerNormLinear, GroupedLinear, moe_permute_with_probs), FLA 0.6 (ChunkGatedDeltaRuleFunction, causal_conv1d, l2norm).
Tensors between tensor-parallel regions ("sp") are split over tp with sequence parallelism; those inside ("tp") always are.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_kd.plan.models import ModelShape

CHUNK = 64  # rows of a delta-net chunk (FLA and Megatron)
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSpec:
    """How a layer is implemented and split."""

    tp: int = 1
    """Tensor parallel."""
    sequence_parallel: bool = False
    """Split "sp" tensors over tp."""
    ep: int = 1
    """Expert parallel; above 1 the dispatched tokens exist twice during the all-to-all."""
    expert_tp: int = 1
    """Expert tensor parallel."""
    seq: int
    """Tokens of a sequence on one context-parallel rank; unfused scores grow with it."""
    micro_batch: int = 1
    """Sequences; tables that all of them share cost each one less."""
    kernels: Literal["te", "torch"] = "te"
    """Implementation, see the module's docstring."""
    fused_activation: bool = True
    """Megatron's bias_activation_fusion: one function from fc1's output to fc2's input; without it each step's result is kept."""
    dtype_bytes: int = 2
    """Bytes of an activation element."""
    recompute: Recompute = "none"
    """selective recomputes `recompute_modules`, full keeps each layer's input only."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Megatron's recompute_modules: core_attn, layernorm, mlp, moe, moe_act, shared_experts."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor kept for backward."""

    name: str
    bytes: float
    """Bytes per token of the (context-parallel) sequence on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Token mixer or MLP of one layer, on one rank."""

    saved: tuple[Saved, ...]
    """Kept from forward to backward."""
    backward_extra: float
    """Bytes per token beyond `saved` at backward's worst moment."""
    weight_grad: int
    """Bytes of the largest weight gradient that exists before it is added to main_grad, in the activations' dtype."""
    weight_grad_extra: float
    """Bytes per token beyond `saved` while that gradient exists; negative where backward has freed more than it made."""

    @property
    def saved_bytes(self) -> float:
        """Bytes per token kept for backward."""
        return sum(item.bytes for item in self.saved)


class _Sizes:
    """Turns widths into bytes per token: `sp` for tensors between tensor-parallel regions, `tp` for those inside."""

    def __init__(self, spec: ActivationSpec):
        self.e = spec.dtype_bytes
        self.sp_parts = spec.tp if spec.sequence_parallel else 1
        self.tp_parts = spec.tp

    def sp(self, width: float, bytes_: int | None = None) -> float:
        return width * (self.e if bytes_ is None else bytes_) / self.sp_parts

    def tp(self, width: float, bytes_: int | None = None) -> float:
        return width * (self.e if bytes_ is None else bytes_) / self.tp_parts


def _norm(spec: ActivationSpec, z: _Sizes, name: str, h: int) -> list[Saved]:
    """Input, normalised input and statistics of an RMS norm that feeds a linear layer."""
    if spec.kernels == "te":
        return [Saved(f"{name} input", z.sp(h)), Saved(f"{name} output", z.sp(h)), Saved(f"{name} statistics", z.sp(1, 4))]
    # torch.rms_norm on the CPU keeps its input, the input times its inverse root, and the root; then the weight's product
    return [Saved(f"{name} input", z.sp(h)), Saved(f"{name} normalised", z.sp(h)), Saved(f"{name} output", z.sp(h)),
            Saved(f"{name} statistics", z.sp(1))]


def final_norm_saved(model: ModelShape, spec: ActivationSpec) -> float:
    """Bytes per token that the final norm keeps, its output included (the loss reads it)."""
    return sum(item.bytes for item in _norm(spec, _Sizes(spec), "final norm", model.hidden))


def attention_block(model: ModelShape, spec: ActivationSpec) -> Block:
    """Input norm, q/k/v, RoPE, scores, output gate and projection of a softmax-attention layer."""
    z = _Sizes(spec)
    h, q, kv, heads = model.hidden, model.q, model.kv, model.heads
    core_recompute = spec.recompute == "selective" and "core_attn" in spec.recompute_modules
    saved = _norm(spec, z, "input norm", h)
    if model.qk_norm:
        saved += [Saved("q and k before their norms", z.tp(q + kv)), Saved("q/k norm statistics", z.tp(heads + model.kv_heads, 4))]
        if spec.kernels == "torch":
            saved += [Saved("q and k normalised", z.tp(q + kv))]
    expanded = kv if spec.kernels == "te" else q  # the local module repeats k and v to all query heads
    saved += [Saved("q after RoPE", z.tp(q)), Saved("k after RoPE", z.tp(expanded)), Saved("v", z.tp(expanded))]
    if spec.kernels == "te":
        if not core_recompute:
            saved += [Saved("log-sum-exp", z.tp(heads, 4))]
    elif not core_recompute:
        saved += [Saved("attention probabilities", z.tp(heads * spec.seq))]
    tables = 4 * model.head_dim * model.rotary_share * spec.dtype_bytes / spec.micro_batch
    saved += [Saved("attention output", z.tp(q)), Saved("rotary tables", tables)]
    if model.output_gate:
        saved += [Saved("gate", z.tp(q)), Saved("gated output", z.tp(q))]
    width = q * (2 if model.output_gate else 1) + 2 * kv
    # fused backward: dO, fp32 accumulator of dQ, dQ, dK, dV; unfused: two gradients of the score matrix
    core = z.tp(q) + z.tp(q, 4) + z.tp(q + 2 * kv) if spec.kernels == "te" else z.tp(q) + 2 * z.tp(heads * spec.seq)
    if core_recompute and spec.kernels == "torch":
        core += z.tp(heads * spec.seq)
    extra = z.sp(h) + max(core, 2 * z.tp(width))
    return Block(saved=tuple(_drop_norms(saved, spec)), backward_extra=extra, weight_grad=spec.dtype_bytes * h * width // spec.tp,
                 weight_grad_extra=z.tp(width) + 2 * z.sp(h) - sum(item.bytes for item in saved[3:]))


def _torch_recurrence(model: ModelShape, z: _Sizes) -> list[Saved]:
    """What autograd keeps of Megatron's torch_chunk_gated_delta_rule: row i of a chunk's inverse copies an i x i block, so a chunk of C rows keeps
    the sum of i^2 + i; seven more C x C matrices; and about five tensors of the width of q and of v. The projection's output stays alive."""
    g = model.gdn
    wide, heads = g.value_heads * g.key_dim, g.value_heads
    rows = sum(i * i + i for i in range(1, CHUNK)) / CHUNK
    return [Saved("chunk inverses", z.tp(heads * (rows + 7 * CHUNK), 4)), Saved("recurrence operands", z.tp(5 * wide + 4 * g.v, 4)),
            Saved("projection output beside the convolution's input", z.tp(g.v + 2 * heads))]


def gdn_block(model: ModelShape, spec: ActivationSpec) -> Block:
    """Input norm, projections, convolution, gated delta rule, gated output norm and projection of a delta-net layer."""
    z, g, h = _Sizes(spec), model.gdn, model.hidden
    qk, v, heads = g.qk, g.v, g.value_heads
    wide = heads * g.key_dim  # queries (and keys) after repetition to the value heads
    states = heads * g.key_dim * g.value_dim / CHUNK
    saved = _norm(spec, z, "input norm", h)
    saved += [Saved("convolution input", z.tp(2 * qk + v)), Saved("q and k before repetition", z.tp(2 * qk)),
              Saved("q, k, v of the delta rule", z.tp((2 * wide if wide != qk else 0) + v)), Saved("decay and beta", z.tp(heads, 4) + z.tp(heads)),
              Saved("chunk matrices", z.tp(heads * CHUNK)), Saved("delta-rule output", z.tp(v)), Saved("gate", z.tp(v)),
              Saved("output norm", z.tp(v)),
              Saved("projection input", z.tp(v)), Saved("decay inputs", 2 * z.tp(heads))]
    if spec.kernels == "torch":
        saved += _torch_recurrence(model, z)
    # w, u, v_new, dv; h and dh of all chunks; dq, dk
    extra = z.sp(h) + z.tp(2 * wide + 5 * v) + 2 * z.tp(states) + 2 * z.tp(wide)
    return Block(saved=tuple(_drop_norms(saved, spec)), backward_extra=extra,
                 weight_grad=spec.dtype_bytes * h * (2 * qk + 2 * v + 2 * heads) // spec.tp,
                 weight_grad_extra=z.tp(2 * qk + 2 * v) + 2 * z.sp(h) - sum(item.bytes for item in saved[3:]))


def dense_mlp_block(model: ModelShape, spec: ActivationSpec) -> Block:
    """Pre-MLP norm and gated MLP."""
    z, h, f = _Sizes(spec), model.hidden, model.ffn
    saved = _norm(spec, z, "pre-MLP norm", h)
    inner = [Saved("fc1 output", z.tp(2 * f)), Saved("activation", z.tp(f))]
    if not spec.fused_activation:
        inner.append(Saved("silu(gate) and linear half", z.tp(2 * f)))
    inner_bytes = sum(item.bytes for item in inner)
    if spec.recompute == "selective" and "mlp" in spec.recompute_modules:
        # the checkpoint keeps the norm's input; norm, fc1 and activation come back for backward
        kept, again = (saved[:1], inner_bytes + sum(item.bytes for item in saved[1:]))
    else:
        kept, again = _drop_norms(saved, spec) + inner, 0.0
    return Block(saved=tuple(kept), backward_extra=again + z.sp(h) + z.tp(2 * f), weight_grad=spec.dtype_bytes * h * 2 * f // spec.tp,
                 weight_grad_extra=again + z.tp(2 * f) + 2 * z.sp(h) - inner_bytes)


def moe_block(model: ModelShape, spec: ActivationSpec) -> Block:
    """Pre-MLP norm, router, dispatched experts (balanced load assumed), shared expert."""
    z, h, m = _Sizes(spec), model.hidden, model.moe
    local = m.experts // spec.ep
    # tokens that this rank's experts process: each tp rank dispatches its slice (sp) or all of its tokens, and etp ranks gather them
    rate = m.top_k * spec.expert_tp / z.sp_parts
    e = spec.dtype_bytes
    act = spec.recompute == "selective" and "moe_act" in spec.recompute_modules
    norm = _norm(spec, z, "pre-MLP norm", h)
    # fused permutation keeps an int32 map [tokens, 2 experts + 1]; the auxiliary loss keeps fp32 scores; per chosen expert index, score and place
    maps = (8 * m.experts if spec.kernels == "te" else 0) + (4 * m.experts if m.aux_loss else 0) + 28 * m.top_k
    width = rate * m.ffn / spec.expert_tp * e
    inner_saved = [Saved("expert activation", width)]
    if model.clamped:
        inner_saved.append(Saved("clamped fc1 output", 2 * width))
    if not spec.fused_activation:
        inner_saved.append(Saved("silu(gate), linear half, unweighted product", 3 * width))
    saved = [Saved("router scores and maps", z.sp(maps, 1)), Saved("dispatched tokens", rate * h * e), Saved("expert fc1 output", 2 * width),
             Saved("permuted probabilities", rate * 4)] + inner_saved * (not act)
    if m.shared_ffn:
        saved += [Saved("shared expert fc1 output", z.tp(2 * m.shared_ffn)), Saved("shared expert activation", z.tp(m.shared_ffn)),
                  Saved("shared expert output", z.sp(h)), Saved("shared expert gate", z.sp(1))]
        if not spec.fused_activation:
            saved.append(Saved("shared silu(gate) and linear half", z.tp(2 * m.shared_ffn)))
    dispatch, kept_inner = rate * h * e, sum(item.bytes for item in inner_saved)
    extra = z.sp(h) + max((2 if spec.ep > 1 else 1) * dispatch + z.sp(h), dispatch + width, 3 * width + (kept_inner if act else 0))
    fc1_grad = e * 2 * m.ffn // spec.expert_tp * h * local
    at_grad = 2 * z.sp(h) + dispatch - (0 if act else kept_inner)
    if spec.recompute == "selective" and "moe" in spec.recompute_modules:
        again = sum(item.bytes for item in saved)
        return Block(saved=tuple(norm), backward_extra=extra + again, weight_grad=fc1_grad, weight_grad_extra=at_grad + again)
    return Block(saved=tuple(_drop_norms(norm, spec) + saved), backward_extra=extra, weight_grad=fc1_grad, weight_grad_extra=at_grad)


def _drop_norms(saved: list[Saved], spec: ActivationSpec) -> list[Saved]:
    """Without the normalised inputs where `layernorm` is recomputed."""
    if spec.recompute == "selective" and "layernorm" in spec.recompute_modules:
        return [item for item in saved if not item.name.endswith("norm output")]
    return saved


def layer_blocks(model: ModelShape, layer: int, spec: ActivationSpec) -> tuple[Block, Block]:
    """(token mixer, MLP) of decoder layer `layer`."""
    return _blocks(model, model.mixers[layer] == "gdn", spec)


@lru_cache(maxsize=4096)
def _blocks(model: ModelShape, gdn: bool, spec: ActivationSpec) -> tuple[Block, Block]:
    return gdn_block(model, spec) if gdn else attention_block(model, spec), dense_mlp_block(model, spec) if model.moe is None else moe_block(model,
                                                                                                                                             spec)


def layer_saved(model: ModelShape, layer: int, spec: ActivationSpec) -> float:
    """Bytes per token that decoder layer `layer` keeps from forward to backward."""
    if spec.recompute == "full":
        return _Sizes(spec).sp(model.hidden)
    return sum(block.saved_bytes for block in layer_blocks(model, layer, spec))


def layer_backward_extra(model: ModelShape, layer: int, spec: ActivationSpec, tokens: int, *, weight_gradients: bool = True) -> int:
    """Bytes above the saved activations at the worst moment of the backward of decoder layer `layer`. The MLP runs backward first, with
    everything saved still there; when the mixer runs, the MLP's tensors are gone. Full recompute brings the whole layer back first. Without
    `weight_gradients` (adapters) no gradient of a weight is formed."""
    mixer, mlp = layer_blocks(model, layer, spec)
    again = mixer.saved_bytes + mlp.saved_bytes if spec.recompute == "full" else 0.0
    moments = [mlp.backward_extra, -mlp.saved_bytes + mixer.backward_extra]
    at_grads = [(mlp.weight_grad_extra, mlp.weight_grad), (-mlp.saved_bytes + mixer.weight_grad_extra, mixer.weight_grad)]
    return int(max(0, *(tokens * (again + extra) for extra in moments), *(tokens * (again + extra) + grad * weight_gradients for extra,
                                                                          grad in at_grads)))


def layer_forward_peak(model: ModelShape, layer: int, spec: ActivationSpec) -> float:
    """Bytes per token alive at once while decoder layer `layer` runs without gradient (a teacher).

    Python holds a tensor as long as a frame on the stack names it. Beside the embedding's output and the layer's input that is:
    delta net (ssm/gated_delta_net/gdn.py, FLA's chunk_gated_delta_rule_fwd), when its output is made: the projection's and the convolution's
    outputs, q, k, v, gate, the chunk matrices, w, u, the states, the new values, the output;
    experts (MoEAlltoAllTokenDispatcher, TEGroupedMLP): the permuted tokens, with ep > 1 those received, the tokens sorted by expert (sorted also at
    ep=1) and the experts' output, and then either fc1's output and the activation (while fc2 runs) or, after these are freed, the output
    sorted back. A bias on fc2 is added expert by expert and joined: two more copies while fc2's frame lives. The residual, the norm's
    output and the shared expert's are there too.
    Experts without bias were held against an H200 at ep=1 (docs/planner.md) and against tracked allocations at ep 1 and 2; the others are counts.
    """
    z, h = _Sizes(spec), model.hidden
    if model.mixers[layer] == "gdn":
        g = model.gdn
        wide = g.value_heads * g.key_dim
        states = g.value_heads * g.key_dim * g.value_dim / CHUNK
        mixer = z.tp(4 * g.qk + 8 * g.v + 3 * wide + (2 + CHUNK) * g.value_heads + states)
    else:
        width = model.q * (2 if model.output_gate else 1) + 2 * model.kv
        mixer = z.tp(width) + z.tp(2 * model.q + 2 * model.kv)
        if spec.kernels == "torch":
            mixer += 2 * z.tp(model.heads * spec.seq)
    if model.moe is None:
        mlp = z.tp(3 * model.ffn)
    else:
        m = model.moe
        rate = m.top_k * spec.expert_tp / z.sp_parts
        before_sort = (2 if spec.ep > 1 else 1) * h / spec.expert_tp
        at_fc2 = 3 * m.ffn / spec.expert_tp + (2 * h if model.linear_bias else 0)
        mlp = rate * spec.dtype_bytes * (before_sort + 2 * h + max(h, at_fc2)) + z.sp((3 if m.shared_ffn else 2) * h) + routing_maps(model, spec)
    return 2 * z.sp(h) + max(mixer, mlp)


def routing_maps(model: ModelShape, spec: ActivationSpec) -> float:
    """Bytes per token of a layer's token dispatcher: the probabilities and the choice of all experts (1 byte each), and the permutation: int32
    [tokens, 2 experts + 1] where it is fused, one int64 a chosen expert where not (transformer/moe/token_dispatcher.py, dispatch_preprocess). A
    frozen teacher gives them back after the layer (mcore/model.py)."""
    experts = model.moe.experts
    permutation = 4 * (2 * experts + 1) if spec.kernels == "te" else 8 * model.moe.top_k
    return _Sizes(spec).sp(experts * (spec.dtype_bytes + 1) + permutation, 1)
