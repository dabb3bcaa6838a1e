"""Dropout: the statistics of its masks, its position (compared with transformers), and what it does not change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.model.attention import attention
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents
from bessemer.model.dropout import DropoutMasks, is_dropped, sequence_keys, splitmix64
from bessemer.model.huggingface.config import export_dropout, to_hugging_face
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import write_weights
from bessemer.recipe import Dropout
from tests.model.float64 import Float64
from tests.model.samples import config, stirred

RATE = 0.1


def keys(seed: int, first: int, count: int) -> Tensor:
    return sequence_keys(seed, torch.arange(first, first + count))


def masks_of(rates: Dropout, rows: int, length: int, seed: int = 3) -> DropoutMasks:
    return DropoutMasks.from_sequences(rates, keys(seed, 0, rows), length)


def correlation(first: Tensor, second: Tensor) -> float:
    """Return the correlation in units of its standard deviation under independence."""
    a, b = first.double().flatten() - RATE, second.double().flatten() - RATE
    return float((a * b).sum() / (RATE * (1 - RATE)) / len(a) ** 0.5)


def test_splitmix_equals_the_published_reference() -> None:
    """The first outputs of the reference implementation for the seed 1234567."""
    found = [int(splitmix64(torch.tensor(1234567), number)) % 2**64 for number in range(3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert int(splitmix64(torch.tensor(1234567), torch.tensor(2))) % 2**64 == found[2]


def test_masks_are_independent_of_each_other() -> None:
    """Compare neighbouring features, positions, samples, layers, sites, heads and seeds."""
    rates, index = Dropout(hidden=RATE, attention=RATE), torch.arange(256, dtype=torch.int32)
    masks = masks_of(rates, 4, 256)

    def at(token_BT: Tensor) -> Tensor:
        return is_dropped(token_BT, index, RATE)

    base = at(masks.token_BT)
    others = {
        "feature": (base[..., :-1], base[..., 1:]),
        "position": (base[:, :-1], base[:, 1:]),
        "sample": (base[:-1], base[1:]),
        "layer": (at(masks.for_layer(0).token_BT), at(masks.for_layer(1).token_BT)),
        "embedding and layer": (base, at(masks.for_layer(0).token_BT)),
        "seed": (base, at(masks_of(rates, 4, 256, seed=4).token_BT)),
    }
    ones = torch.ones(4, 256, 256)
    sites = [masks.stream(ones, site, RATE) == 0 for site in ("embedding", "attention", "mlp")]
    sites += [masks.hidden_units(ones) == 0, masks.attention(ones[:, None], slice(0, 256), 0)[:, 0] == 0]
    others |= {f"sites {n}, {m}": (sites[n], sites[m]) for n in range(5) for m in range(n)}
    weights = masks.attention(torch.ones(4, 2, 256, 256), slice(0, 256), 0) == 0
    others |= {"head": (weights[:, 0], weights[:, 1]), "query and key": (weights, weights.transpose(2, 3))}
    off_diagonal = ~torch.eye(256, dtype=torch.bool).expand(weights.shape)
    others["query and key"] = tuple(part[off_diagonal] for part in others["query and key"])  # type: ignore[assignment]
    far = {name: found for name, pair in others.items() if abs(found := correlation(*pair)) > 5}
    assert not far


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_equals_the_formula(
    causal: bool, window: int, soft_cap: float, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """softmax, then the mask; in several blocks of queries, with fewer key heads, including gradients."""
    from bessemer.model import attention as module

    monkeypatch.setattr(module, "dropping_chunk", lambda *sizes: 7)
    length, draw = 24, torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 8, generator=draw, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    tokens = torch.randint(0, 5, (2, length), generator=draw)
    documents = Documents.from_tokens(tokens, 0) if packed else None
    spec, masks = AttentionSpec(causal, window, soft_cap), masks_of(Dropout(attention=0.3), 2, length)
    found = attention(q, k, v, AttentionScope.build(spec, documents, length, q.device), masks)
    index = torch.arange(length)
    allowed = spec.allows(index[:, None], index).expand(2, length, length)
    if documents is not None:
        allowed = allowed & (documents.document_BT[:, :, None] == documents.document_BT[:, None, :])
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    factor = masks.attention(torch.ones_like(weights), slice(0, length), 0)
    wanted = (weights * factor) @ v.repeat_interleave(2, 1)
    assert torch.allclose(found, wanted, atol=1e-13, rtol=0)
    gradient = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), gradient) for x in (found, wanted)), strict=True):
        assert torch.allclose(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("family", "labels"), [*((family, 0) for family in FAMILIES), ("bert", 5), ("modernbert", 5)])
def test_dropout_is_at_the_same_positions_as_in_transformers(
    family: str, labels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the dropout of transformers' model in train mode: the n-th call of its forward pass gets our n-th mask at the same
    rate. Equal logits and gradients show that the positions are equal.
    """
    import transformers

    wanted = config(
        **{**FAMILIES[family].options, "family": family, "heads": 4, "kv_heads": 4, "head_dim": 8, "labels": labels},
        **({"pooling": "first"} if labels else {}),
    )
    model = stirred(wanted)
    decoder = "hidden" not in FAMILIES[family].dropout.values()  # Llama's lineage drops attention weights only
    rates = Dropout(hidden=0.0 if decoder else 0.1, attention=0.2, classifier=0.3 if labels else 0.0)
    written = to_hugging_face(wanted, 0) | export_dropout(wanted, rates)
    assert written["model_type"] == FAMILIES[family].model_type
    (tmp_path / "config.json").write_text(json.dumps(written))
    write_weights(model, tmp_path)
    kind = getattr(transformers, written["architectures"][0])
    with Float64():  # tables of rotary positions are built with the model
        theirs = kind.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").train()
        if wanted.experts:
            theirs.set_experts_implementation("eager")  # the default does not compute in float64
    rows, length = 3, wanted.sequence_length
    tokens = torch.randint(1, wanted.vocabulary, (rows, length), generator=torch.Generator().manual_seed(2))
    masks = masks_of(rates, rows, length)
    queue: list[tuple[float, Any]] = []
    if family == "phi3":  # nothing reads its embd_pdrop
        theirs.model.embed_tokens.register_forward_hook(lambda _m, _i, found: masks.stream(found, "embedding", 0.1))
    elif not decoder:
        queue.append((0.1, lambda x: masks.stream(x, "embedding", 0.1)))
    for layer in range(wanted.layers):
        of = masks.for_layer(layer)
        queue.append((0.2, lambda x, of=of: of.attention(x, slice(0, length), 0)))
        if family == "modernbert":
            queue += [
                (0.2, lambda x, of=of: of.stream(x, "attention", 0.2)),
                (0.1, lambda x, of=of: of.hidden_units(x)),
            ]
        elif not decoder:
            queue += [(0.1, lambda x, of=of, site=site: of.stream(x, site, 0.1)) for site in ("attention", "mlp")]
    if labels:
        queue.append((0.3, masks.classifier))

    def replaced(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert training
        if p == 0:
            return x
        rate, drop = queue.pop(0)
        assert rate == p
        found: Tensor = drop(x)
        return found

    monkeypatch.setattr(torch.nn.functional, "dropout", replaced)
    with Float64():
        expected = theirs(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert not queue, "it drops as often"
    ours = model.double()
    hidden = ours(tokens, masks=masks)
    lengths = torch.full((rows,), length)
    found = ours.classifier(hidden, lengths, masks) if labels else ours.head.logits(hidden)
    assert float((found - expected).detach().abs().max()) < 1e-10
    with torch.no_grad():
        plain = ours.classifier(ours(tokens), lengths) if labels else ours.logits(tokens)
    assert float((plain - found.detach()).abs().max()) > 1e-2, "dropout changes the logits"
    (one,) = torch.autograd.grad(found.square().sum(), ours.embedding.weight)
    (other,) = torch.autograd.grad(expected.square().sum(), theirs.get_input_embeddings().weight)
    assert float((one - other).abs().max()) < 1e-10 * float(other.abs().max())


@pytest.mark.parametrize("family", ["gpt2", pytest.param("modernbert", marks=pytest.mark.long)])
def test_compiled_blocks_drop_the_same_elements(family: str) -> None:
    """No layer triggers its own compilation."""
    wanted = config(**{**FAMILIES[family].options, "heads": 4, "kv_heads": 4, "head_dim": 8, "layers": 3})
    model = stirred(wanted).double()
    tokens = torch.randint(
        1, wanted.vocabulary, (2, wanted.sequence_length), generator=torch.Generator().manual_seed(2)
    )
    masks = masks_of(Dropout(hidden=0.1, attention=0.2), 2, wanted.sequence_length)
    expected = model(tokens, masks=masks)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    found = model(tokens, masks=masks)
    again = model(tokens, masks=masks_of(masks.rates, 2, wanted.sequence_length, seed=9))
    assert torch.allclose(found, expected, atol=1e-11)
    assert not torch.allclose(again, expected, atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
