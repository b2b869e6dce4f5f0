"""Which experts a MoE model uses: gate probability and choices, summed per layer and expert while it runs.

Called by `megatron-kd convert router-stats`; its result tells the pruning which experts stay.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_kd.config.schema import DataConfig
from megatron_kd.errors import ConfigError, rule
from megatron_kd.mcore.data import documents


class RouterStatistics:
    """`with RouterStatistics(chunks) as stats: run the model`; then `stats.result()` on every rank."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        from megatron.core.transformer.moe.router import TopKRouter

        config = chunks[0].config
        if not config.num_moe_experts:
            raise ConfigError(rule("num_moe_experts", config.num_moe_experts, "this model has no experts", "Take a mixture-of-experts model"))
        self._routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter) and not getattr(m, "is_mtp_layer", False)]
        self._sums_2LE = torch.zeros(2, config.num_layers, config.num_moe_experts, dtype=torch.float64)
        self._tokens_L = torch.zeros(config.num_layers, dtype=torch.float64)
        self._handles = []

    def __enter__(self) -> "RouterStatistics":
        self._handles = [router.register_forward_hook(self._add) for router in self._routers]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _add(self, router, args, output) -> None:
        probs_TE, chosen_TE = output
        layer = router.layer_number - 1
        self._sums_2LE[0, layer] += probs_TE.double().sum(0).cpu()
        self._sums_2LE[1, layer] += chosen_TE.double().sum(0).cpu()
        self._tokens_L[layer] += probs_TE.shape[0]

    def result(self) -> dict[str, dict]:
        """{layer: {"tokens": n, "mass": [E], "chosen": [E]}} over all ranks. Collective. `mass` is the summed gate probability.

        Ranks that see the same tokens (tensor parallelism without sequence parallelism) count each of them once, in all three figures alike.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
            packed = torch.cat([self._sums_2LE.reshape(-1), self._tokens_L]).to(device)
            dist.all_reduce(packed)
            packed = packed.cpu()
            self._sums_2LE = packed[: self._sums_2LE.numel()].reshape(self._sums_2LE.shape)
            self._tokens_L = packed[self._sums_2LE.numel():]
        return {str(layer): {"tokens": int(tokens), "mass": self._sums_2LE[0, layer].tolist(), "chosen": self._sums_2LE[1, layer].tolist()}
                for layer, tokens in enumerate(self._tokens_L) if tokens}


def token_sequences(text: str, tokenizer_dir: str, *, seq_length: int, rank: int, num_ranks: int, limit: int) -> Iterator[torch.Tensor]:
    """Up to `limit` int64 [seq_length] pieces of the tokenised text for `rank` of `num_ranks`; every rank gets the same number.

    Errors: ConfigError where the text is too short for one piece a rank.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    held: list[int] = []
    served = 0
    for document in documents(DataConfig(kind="text", text=text)):
        held += tokenizer(document).input_ids
        while len(held) >= seq_length * num_ranks and served < limit:
            yield torch.tensor(held[rank * seq_length:(rank + 1) * seq_length])
            held = held[seq_length * num_ranks:]
            served += 1
        if served == limit:
            return
    if served == 0:
        raise ConfigError(rule("text", text, f"has fewer than {seq_length * num_ranks} tokens", "Give more text, or a shorter --seq"))
