import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.distributed.element_bytes import ElementBytes
from bessemer.distributed.memory import peak_memory
from bessemer.distributed.stages import PartParameters, pipeline_ranks
from bessemer.distributed.step_flops import hardware_flops
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import Parallel, Train, load, parse

FP32 = ElementBytes(4)


SMALL = ModelConfig(
    vocabulary=512, layers=3, width=256, heads=4, kv_heads=4, head_dim=64, mlp_width=640, sequence_length=128
)


def test_depth_derives_everything_and_every_part_can_be_overridden() -> None:
    text = '[run]\nname = "x"\n[model]\ndepth = {depth}\n'
    small, large = (recipe_defaults.resolve(parse(text.format(depth=depth), "x"), 32_768) for depth in (4, 16))
    for recipe in (small, large):
        width, batch, steps = recipe.model.width, recipe.train.global_batch_tokens, recipe.train.steps
        assert width == 64 * recipe.model.layers
        assert recipe.model.heads * recipe.model.head_dim == width
        parameters = model_config(recipe, 32_768).parameters
        assert batch * steps / parameters == pytest.approx(20, rel=0.01)
        assert batch % recipe.tokens.sequence_length == 0
    assert large.train.optimizer.learning_rate < small.train.optimizer.learning_rate
    assert large.train.global_batch_tokens > small.train.global_batch_tokens
    chosen = recipe_defaults.resolve(
        parse(
            text.format(depth=4),
            "x",
            ["model.width=512", "train.optimizer.learning_rate=0.5", "train.steps=7", "train.global_batch_tokens=2048"],
        ),
        32_768,
    )
    assert (chosen.model.width, chosen.model.mlp_width, chosen.train.steps) == (512, 1408, 7)
    assert (chosen.train.optimizer.learning_rate, chosen.train.global_batch_tokens) == (0.5, 2048)


def test_a_resolved_recipe_resolves_to_itself() -> None:
    resolved = recipe_defaults.resolve(load("llama-1b"), 65_536)
    assert recipe_defaults.resolve(resolved, 65_536) == resolved


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_optimizer_state_has_its_planned_size(kind: str, state: str) -> None:
    from bessemer.distributed.optimizer_bytes import optimizer_bytes
    from bessemer.recipe import Optimizer
    from bessemer.train import optimizer as optimizers

    wanted, settings = SMALL, Optimizer(learning_rate=0.01, betas=(0.9, 0.95), kind=kind, state=state)  # type: ignore[arg-type]
    model = build_model(wanted, 0)
    optimizer = optimizers.build(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state_of = optimizers.state_tensors(model, optimizer)
    held = sum(tensor.nbytes for name, tensor in state_of.items() if not name.endswith("/step"))
    assert optimizer_bytes(Train(optimizer=settings), wanted) == held


def test_a_frozen_transformer_keeps_nothing_for_a_backward_pass() -> None:
    """Compared with a step: autograd keeps nothing of the blocks, and gradients and moments are those of the head."""
    from bessemer.train import optimizer as optimizers
    from bessemer.train.parallelize import require_trainable
    from bessemer.train.task import task_of

    text = '[run]\nname="x"\n[[corpus.sources]]\nname="a"\nformat="text"\npaths=["."]\nlabel="b"\n[tokens]\nsequence_length=128\n[model]\nlayers=3\nwidth=256\nheads=4\n[train]\nobjective="classify"\nmicro_batch=2\nglobal_batch_tokens=256\nclassify.frozen={frozen}\n[train.optimizer]\nlearning_rate=0.1\nbetas=[0.9, 0.95]\n'
    frozen, whole = (parse(text.format(frozen=value), "x") for value in ("true", "false"))
    wanted = SMALL.with_changes(labels=4)
    model = build_model(wanted, 0)
    task_of(frozen.train, False, wanted, 0).prepare(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == wanted.head_parameters == 4 * 256
    optimizer = optimizers.build(model, frozen.train.optimizer)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizers.state_tensors(model, optimizer)
    held = sum(tensor.nbytes for name, tensor in state.items() if not name.endswith("/step"))
    planned, unfrozen = (
        peak_memory(frozen.train, frozen.parallel, wanted, FP32),
        peak_memory(whole.train, whole.parallel, wanted, FP32),
    )
    assert planned.optimizer == held
    assert planned.gradients == 4 * wanted.head_parameters
    assert not model(torch.zeros(2, 128, dtype=torch.long)).requires_grad
    assert planned.activations < unfrozen.activations / 2
    assert (planned.logits, unfrozen.logits) == (0, 0)
    assert planned.weights == unfrozen.weights == 4 * wanted.parameters
    for layout in (Parallel(replicate=2), Parallel(shard=2), Parallel(tensor=2)):
        of_two = peak_memory(frozen.train, layout, wanted, FP32)
        assert of_two.gradients <= 2 * planned.gradients and of_two.optimizer * layout.state_shards == held, layout
        assert of_two.activations < peak_memory(whole.train, layout, wanted, FP32).activations / 2, layout
    recomputed = frozen.train.model_copy(update={"recompute": "full"})
    assert hardware_flops(recomputed, wanted, 3) == hardware_flops(frozen.train, wanted, 0)
    with pytest.raises(InputError, match=r"train.classify.frozen: a pipeline"):
        require_trainable(frozen.train, Parallel(pipeline=2), wanted, "cpu")


@pytest.mark.parametrize(
    ("keys", "batch", "micro"),
    [
        ("", 8, 8),
        ("replicate=2", 8, 4),
        ("shard=8", 8, 1),
        ("replicate=2\npipeline=2", 8, 2),
        ("pipeline=4\nschedule='dualpipev'", 8, 1),
    ],
)
def test_a_derived_micro_batch_fits_the_layout(keys: str, batch: int, micro: int) -> None:
    text = f'[run]\nname="x"\n[tokens]\nsequence_length=128\n[model]\nlayers=4\nwidth=256\nheads=4\n[train]\nglobal_batch_tokens={128 * batch}\n[parallel]\n{keys}\n'
    made = recipe_defaults.resolve(parse(text, "t"), 512)
    assert made.train.micro_batch == micro


@pytest.mark.parametrize(
    ("keys", "micro_batch"),
    [
        ("pipeline=3\nschedule='interleaved'", None),
        ("pipeline=3\nreplicate=2\nschedule='interleaved'", None),
        ("pipeline=5\nschedule='interleaved'", 2),
        ("replicate=2", 3),
    ],
)
def test_the_derived_batch_fits_the_schedule(keys: str, micro_batch: int | None) -> None:
    given = "" if micro_batch is None else f"micro_batch={micro_batch}"
    text = f'[run]\nname="x"\n[tokens]\nsequence_length=4096\n[model]\ndepth=16\n[train]\n{given}\n[parallel]\n{keys}\n'
    asked = parse(text, "t")
    plain, made = (
        recipe_defaults.resolve(one, 32_768)
        for one in (asked.changed(parallel=Parallel(), train={"micro_batch": 1}), asked)
    )
    sequences, usual = (one.train.global_batch_tokens // 4096 for one in (made, plain))
    size, data = made.train.micro_batch or 0, made.parallel.data
    assert (micro_batch or size) == size <= 3 and sequences % (data * size) == 0
    assert made.parallel.fits_micro_batches(sequences // data // size)
    assert usual <= sequences <= 1.2 * usual + data * made.parallel.pipeline


LENGTH, WIDTH, VOCABULARY, LAYERS = 64, 32, 256, 4


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


def rank_parameters(config: ModelConfig, layout: Parallel) -> int:
    return sum(PartParameters.count(config, rank, layout.tensor).all for rank in pipeline_ranks(config, layout))


def test_the_parameters_of_a_process() -> None:
    config, tied = config_of(), config_of(tied=True)
    assert rank_parameters(config, Parallel()) == config.parameters
    norms = (2 * LAYERS + 1) * WIDTH + LAYERS * 2 * 4  # of the stream, and of queries and keys, 4 wide
    assert rank_parameters(config, Parallel(tensor=4)) == (config.parameters - norms) // 4 + norms
    assert rank_parameters(tied, Parallel(pipeline=2)) == tied.parameters + VOCABULARY * WIDTH
    assert rank_parameters(tied, Parallel(pipeline=2, schedule="zbv")) == tied.parameters
