"""Bytes that all ranks send in one training step, by kind of collective."""

from __future__ import annotations

from bessemer.distributed.shards import padding
from bessemer.distributed.stages import PartParameters, pipeline_ranks, replicated_parameters
from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import ElementBytes
from bessemer.recipe import Parallel, ResolvedTrain


def tensor_bytes(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, element_bytes: ElementBytes, recomputed_total: int
) -> tuple[dict[str, int], int]:
    """Return the bytes of the full tensors in one tensor group's collectives in a step.

    Each token of the global batch counts as a target.

    Args:
        train: Training settings of the resolved recipe.
        layout: Parallel layout.
        config: Model config.
        element_bytes: Bytes of an element, by use.
        recomputed_total: Blocks of the whole model that are recomputed, in full or selectively.

    Returns:
        Bytes by kind of collective, and the number of replicated parameters, whose gradients are all-reduced once a
            step.
    """
    if layout.tensor == 1:
        return dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0), 0
    tokens = train.global_batch_tokens
    stream_bytes, layers = tokens * config.width * element_bytes.activation, config.layers
    squares = sum(sublayer.reduced_numbers for sublayer in config.sublayers) * tokens * element_bytes.sums
    scattered = 2 if config.recomputes_mlp_output else 1
    loss = 0 if config.labels else 3 * tokens * element_bytes.sums
    kinds = {
        # An all-gather before attention and MLP, a reduce-scatter after; each becomes the other in the backward pass
        # (Korthikanti et al. 2022, section 4.2.2). The constants add the embedding's output and gradient, and the last norm's
        # output for the loss.
        "all_gather": (4 * layers + 2 * recomputed_total + 2) * stream_bytes,
        "reduce_scatter": (4 * layers + scattered * recomputed_total + (1 if config.labels else 2)) * stream_bytes,
        "all_reduce": (2 * layers + recomputed_total) * squares + loss,
    }
    return kinds, replicated_parameters(config) - config.classifier_parameters


def pipeline_bytes(config: ModelConfig, layout: Parallel, tokens: int, element_bytes: ElementBytes) -> tuple[int, int]:
    """Return the bytes that one pipeline sends in a step.

    Args:
        config: Model config.
        layout: Parallel layout.
        tokens: Tokens that the pipeline reads in a step. With context parallelism, each pipeline reads a part of each
            sequence.
        element_bytes: Bytes of an element, by use.

    Returns:
        Bytes of hidden states with their gradients, and bytes of the tied matrix's gradient as each of its two ranks
            sends it.
    """
    # One less than the number of stages. The two stages at the bottom of a V share a rank and need no transfer.
    crossings = layout.pipeline * layout.stages_per_rank - 1 - layout.is_v_shaped if layout.pipeline > 1 else 0
    matrix = config.vocabulary * config.width * element_bytes.gradient
    sent = 2 * crossings * tokens * config.width * element_bytes.activation
    # In a V-shaped schedule, the first and the last stage share a rank.
    return sent, matrix if config.is_tied and layout.pipeline > 1 and not layout.is_v_shaped else 0


def tensor_rank_parameters(config: ModelConfig, layout: Parallel) -> tuple[int, int]:
    """Return the parameters of one tensor rank over all pipeline stages, as (in blocks, outside blocks).

    A tied matrix counts twice if two stages hold it.
    """
    # The mean over ranks is exact here, because the bytes of all ranks are summed.
    parts = [PartParameters.count(config, rank, layout.tensor, is_mean=True) for rank in pipeline_ranks(config, layout)]
    return sum(part.blocks * part.block for part in parts), sum(part.root for part in parts)


def _data_bytes(
    config: ModelConfig, layout: Parallel, micro_batches: int, element_bytes: ElementBytes
) -> dict[str, float]:
    """Return the bytes of the FSDP2 and DDP collectives, summed over all ranks."""
    num_shards, ranks = layout.state_shards, layout.data * layout.context * layout.tensor
    ring_share = (num_shards - 1) / num_shards  # share of a tensor that each rank sends in a gather or a reduce-scatter
    unpadded, outside = tensor_rank_parameters(config, layout)
    blocks = unpadded * padding(config, layout.tensor, num_shards)
    parameters = blocks + outside
    gathered_parameters = (2 * blocks + outside) * micro_batches if layout.effective_zero == 3 else parameters
    reduced = parameters * (1 if layout.effective_zero == 1 else micro_batches)
    copies = 2 * (layout.replicate - 1) / layout.replicate
    return {
        "all_gather": ranks * ring_share * gathered_parameters * element_bytes.gathered,
        "reduce_scatter": ranks * ring_share * reduced * element_bytes.gradient,
        "all_reduce": ranks * copies * parameters * element_bytes.gradient / num_shards,
    }


def planned_bytes(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, element_bytes: ElementBytes, recomputed_total: int = 0
) -> dict[str, int] | None:
    """Return the bytes that all ranks together send in one step, by kind of collective, for ring algorithms.

    Gradients are reduced once a step (replicas, ZeRO 1) or once a micro-batch (ZeRO 2 and 3, over `shard` and
    `context`). Weights are gathered once a step (ZeRO 1 and 2) or for each micro-batch, those of blocks again for the
    backward pass (ZeRO 3: Rajbhandari et al. 2020, section 7.2). A ring of n ranks sends (n - 1) / n of a tensor for an
    all-gather or a reduce-scatter, and twice that for an all-reduce (Patarasuk and Yuan 2009, section 3). The
    additional traffic of an optimizer that gathers whole matrices is not included.

    Args:
        train: Training settings of the resolved recipe.
        layout: Parallel layout.
        config: Model config.
        element_bytes: Bytes of an element, by use.
        recomputed_total: Blocks of the whole model that are recomputed.

    Returns:
        Bytes by kind, or None if pipeline stages are sharded, because the number of gathers then depends on the
            schedule.
    """
    if layout.pipeline > 1 and layout.state_shards > 1:
        return None
    tokens = train.global_batch_tokens
    micro_batches = layout.micro_batches(tokens // config.sequence_length, train.micro_batch)
    groups = layout.data * layout.context  # number of tensor groups in a stage
    # Gradients of parameters that every tensor rank holds in full are all-reduced in each tensor group before FSDP2 shards them.
    # FSDP2 sums them at each reduction, in the dtype of the gathered weights.
    tensor, replicated = tensor_bytes(train, layout, config, element_bytes, recomputed_total)
    reductions = micro_batches if groups > 1 and layout.effective_zero > 1 else 1
    each = element_bytes.gathered if groups > 1 else element_bytes.gradient
    replicated_bytes = replicated * each * groups * reductions
    tensor_peers = layout.tensor - 1
    # Pipeline parallelism sends hidden states of all tokens, and the tied matrix's gradient in each pipeline.
    hidden, tied = pipeline_bytes(config, layout, tokens, element_bytes)
    # Context parallelism gathers keys and values of all tokens, and reduces their gradients in the backward pass.
    keys = 2 * config.kv_heads * config.head_dim * tokens * element_bytes.activation * (layout.context - 1)
    data = _data_bytes(config, layout, micro_batches, element_bytes)
    gathered = data["all_gather"] + tensor_peers * tensor["all_gather"] + (config.layers + recomputed_total) * keys
    scattered = data["reduce_scatter"] + tensor_peers * tensor["reduce_scatter"] + config.layers * keys
    reduced = data["all_reduce"] + 2 * tensor_peers * (tensor["all_reduce"] + replicated_bytes)
    reduced += 2 * tied * groups / layout.state_shards
    sent = {"all_gather": gathered, "reduce_scatter": scattered, "all_reduce": reduced, "send": hidden}
    return {kind: round(value) for kind, value in sent.items() if value}
