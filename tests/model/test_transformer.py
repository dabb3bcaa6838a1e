import pytest
import torch

from bessemer.model.attention import AttentionScope, AttentionSpec, Documents, attention
from bessemer.model.config import Rope
from bessemer.model.kernels import rotate
from bessemer.model.layers import rotary_cos_sin
from bessemer.model.transformer import build_model
from tests.model.samples import config, stirred


def test_no_token_sees_a_later_one() -> None:
    model = stirred(config())
    tokens = torch.randint(0, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 97
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_documents_do_not_see_each_other(kv_heads: int) -> None:
    """A packed document has the logits it has alone: attention is masked and positions start at 0."""
    model = stirred(config(kv_heads=kv_heads))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 97, (2, 24), generator=generator)
    tokens[0, [5, 13]] = 0
    tokens[1, 20] = 0
    documents = Documents.from_tokens(tokens, end_of_text=0)
    assert documents.spans == ((0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 21), (1, 21, 24))
    packed = model.logits(tokens, documents)
    for row, start, end in documents.spans:
        alone = model.logits(tokens[row : row + 1, start:end])
        torch.testing.assert_close(packed[row : row + 1, start:end], alone, rtol=0, atol=2e-6)


def test_the_document_mask_equals_a_boolean_mask_forward_and_backward() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 24, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    tokens = torch.randint(0, 5, (2, 24), generator=generator)
    documents = Documents.from_tokens(tokens, end_of_text=0)
    number = documents.document_BT
    allowed = (number[:, :, None] == number[:, None, :]) & torch.ones(24, 24, dtype=torch.bool).tril()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=allowed[:, None]
    )
    found = attention(q, k, v, AttentionScope.of(AttentionSpec(), documents, 24, q.device))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    for left, right in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_rotation_depends_only_on_the_distance() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(first: int, second: int) -> float:
        left, right = (
            rotate(x, rotary_cos_sin(torch.tensor([[n]]), Rope(10_000.0, 16), 128))
            for x, n in ((q, first), (k, second))
        )
        return float((left * right).sum())

    assert score(3, 10) == pytest.approx(score(103, 110), abs=1e-5)
    assert score(3, 10) != pytest.approx(score(3, 11), abs=1e-3)


def test_initial_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (dict(build_model(config(), seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    # A deeper model starts with the same values where it has the same tensors.
    deeper = dict(build_model(config(layers=3), 0).named_parameters())
    assert all(torch.equal(first[name], deeper[name]) for name in first)


def test_the_first_prediction_is_near_uniform() -> None:
    wanted = config(vocabulary=997, width=64)
    tokens = torch.randint(0, 997, (4, 24), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(
        build_model(wanted, 0).logits(tokens).flatten(0, 1), tokens.roll(-1).flatten()
    )
    assert float(loss.detach()) == pytest.approx(torch.log(torch.tensor(997.0)).item(), abs=0.05)


def test_tied_embeddings_are_one_tensor() -> None:
    model = build_model(config(tie_embeddings=True), 0)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_document_mask_on_cuda_equals_the_one_on_cpu() -> None:
    wanted = config(head_dim=32, sequence_length=256)
    model = stirred(wanted)
    tokens = torch.randint(0, 97, (2, 256), generator=torch.Generator().manual_seed(5))
    on_cpu = model.logits(tokens, Documents.from_tokens(tokens, 0))
    cuda = tokens.cuda()
    on_cuda = model.cuda().logits(cuda, Documents.from_tokens(cuda, 0))
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=0, atol=1e-4)
