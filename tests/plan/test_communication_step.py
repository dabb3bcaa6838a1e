"""A step's bytes by formula, compared with sums written out."""

from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import ElementBytes
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.plan import communication
from bessemer.plan.communication import tensor_rank_parameters
from bessemer.recipe import Parallel, Train, parse

FP32 = ElementBytes(4, 4, 4, 4)
TOKENS, LENGTH, WIDTH, VOCABULARY, LAYERS = 3072, 64, 32, 256, 4


def config_of(tied: bool = False) -> ModelConfig:
    text = f"""
    run.name = "t"
    tokens.sequence_length = {LENGTH}
    [model]
    layers = {LAYERS}
    width = {WIDTH}
    heads = 8
    kv_heads = 4
    mlp_width = 96
    tie_embeddings = {str(tied).lower()}
    """
    return model_config(resolve(parse(text, "test"), VOCABULARY), VOCABULARY)


def step_bytes(
    config: ModelConfig, layout: Parallel, micro_batches: int, label_smoothing: float = 0.0
) -> dict[str, int] | None:
    micro_batch, rest = divmod(TOKENS // LENGTH, layout.data * micro_batches)
    assert rest == 0
    train = Train(global_batch_tokens=TOKENS, micro_batch=micro_batch, label_smoothing=label_smoothing)
    return communication.planned_bytes(train, layout, config, FP32)


def test_copies_and_shards() -> None:
    config = config_of()
    whole, outside = 4 * config.parameters, 4 * (2 * VOCABULARY * WIDTH + WIDTH)
    blocks = whole - outside

    def of(**layout: int) -> object:
        return step_bytes(config, Parallel(**layout), 3)

    # n processes that each send 2 (n - 1) / n of a sum
    assert of(replicate=4) == {"all_reduce": 6 * whole}
    assert of(shard=2, zero=1) == {"all_gather": whole, "reduce_scatter": whole}
    assert of(shard=2, zero=2) == {"all_gather": whole, "reduce_scatter": 3 * whole}
    assert of(shard=4) == {"all_gather": 3 * 3 * (outside + 2 * blocks), "reduce_scatter": 3 * 3 * whole}
    hybrid = of(replicate=2, shard=2)
    # two groups of two, and each of the four shards, half of a copy, summed with its like
    assert hybrid == {
        "all_gather": 2 * 3 * (outside + 2 * blocks), "reduce_scatter": 2 * 3 * whole, "all_reduce": 2 * whole,
    }  # fmt: skip


def test_stages_and_the_matrix_that_two_of_them_have() -> None:
    hidden = TOKENS * WIDTH * 4
    assert step_bytes(config_of(), Parallel(pipeline=4), 8) == {"send": 6 * hidden}
    tied = step_bytes(config_of(tied=True), Parallel(pipeline=4), 8)
    assert tied == {"send": 6 * hidden, "all_reduce": 2 * VOCABULARY * WIDTH * 4}
    assert step_bytes(config_of(), Parallel(pipeline=2, shard=2), 8) is None


def test_the_context_shares_the_weights_too() -> None:
    config = config_of()
    alone = step_bytes(config, Parallel(shard=2), 1)
    shared = step_bytes(config, Parallel(context=2), 1)
    assert alone is not None and shared is not None
    keys = LAYERS * 2 * 4 * 4 * TOKENS * 4  # layers, keys and values, heads, width of a head, tokens, bytes
    assert {kind: shared[kind] - alone[kind] for kind in shared} == {"all_gather": keys, "reduce_scatter": keys}


def test_what_a_process_holds() -> None:
    config, tied = config_of(), config_of(tied=True)
    assert sum(tensor_rank_parameters(config, Parallel())) == config.parameters
    norms = (2 * LAYERS + 1) * WIDTH + LAYERS * 2 * 4  # of the stream, and of queries and keys, 4 wide
    assert sum(tensor_rank_parameters(config, Parallel(tensor=4))) == (config.parameters - norms) // 4 + norms
    assert sum(tensor_rank_parameters(tied, Parallel(pipeline=2))) == tied.parameters + VOCABULARY * WIDTH
    assert sum(tensor_rank_parameters(tied, Parallel(pipeline=2, schedule="zbv"))) == tied.parameters


def test_label_smoothing_adds_a_sum_a_target() -> None:
    plain, smoothed = (
        step_bytes(config_of(), Parallel(tensor=4), 4, label_smoothing=smoothing) for smoothing in (0.0, 0.1)
    )
    assert plain is not None and smoothed is not None
    assert {kind: smoothed[kind] - plain[kind] for kind in plain} == {
        "all_gather": 0, "reduce_scatter": 0, "all_reduce": 2 * 3 * TOKENS * 4,
    }  # fmt: skip
