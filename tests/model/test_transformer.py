import pytest
import torch

from bessemer.model.attention_scope import Documents
from bessemer.model.transformer import build_model
from tests.model.samples import config, stirred


def test_initial_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (dict(build_model(config(), seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    # A deeper model starts with the same values where it has the same tensors.
    deeper = dict(build_model(config(layers=3), 0).named_parameters())
    assert all(torch.equal(first[name], deeper[name]) for name in first)


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
