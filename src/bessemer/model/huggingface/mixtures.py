"""Rules for mixtures of experts in config.json: their number, the balance of their load, and layers without them."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.rules import ConfigRule, ForeignConfig, Values, unless


def mixture(key: str, alias: str, experts: int, coefficient: float) -> ConfigRule:
    """Return the rule for the number of experts and the weight of the balance loss, which is 0 without that loss.

    Args:
        key: The key of the number of experts in published files.
        alias: Its other name.
        experts: The default number.
        coefficient: The default weight.
    """

    def read(settings: ForeignConfig, values: Values) -> Values:
        weight = settings.raw("router_aux_loss_coef")
        weight = 0.0 if weight == 0 else settings.number("router_aux_loss_coef", coefficient)
        name = key if settings.raw(key) is not None else alias
        balance = {"balance": "loss", "balance_loss": weight} if weight else {"balance": "none"}
        return {"experts": settings.integer(name, experts), **balance}

    def write(config: ModelConfig) -> Values:
        weight = config.balance_loss if config.has_balance_loss else 0.0
        return {key: config.experts, "router_aux_loss_coef": weight, "output_router_logits": False}

    return ConfigRule(
        (key, alias, "router_aux_loss_coef", "output_router_logits"), read, write,
        unless(lambda c: not c.has_balance_bias, 'balance = "loss" or "none" instead of "{0.balance}"'), ("experts", "balance"),
    )  # fmt: skip


BIASED_ROUTER = ConfigRule(  # a file always has the bias
    obstacles=unless(lambda c: c.has_balance_bias, 'balance = "bias" or "both" instead of "{0.balance}"'),
    free=("balance",),
)


def _read_dense_layers(settings: ForeignConfig, values: Values) -> Values:
    dense = settings.integers("mlp_only_layers")
    if settings.integer("decoder_sparse_step", 1) != 1 or sorted(dense) != list(range(len(dense))):
        key = "mlp_only_layers" if settings.raw("decoder_sparse_step") in (None, 1) else "decoder_sparse_step"
        raise settings.error(key, "is not supported; only the first layers may have no experts")
    return {"dense_layers": len(dense)}


DENSE_LAYERS = ConfigRule(
    ("mlp_only_layers", "decoder_sparse_step"),
    _read_dense_layers,
    lambda config: {"mlp_only_layers": list(range(config.dense_layers)), "decoder_sparse_step": 1},
    free=("dense_layers",),
)
