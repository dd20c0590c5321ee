"""Log-probs and entropy over a vocabulary that is cut over ranks, against plain log-softmax on whole logits."""

import pytest
import torch
import torch.distributed as dist

TOKENS, DIM = 37, 16


def problem(vocab_size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64) * 2
    weight = torch.randn(vocab_size, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    grads = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, grads.to(dtype)


def plain(vocab_size, temperature):
    """In double precision, all at once."""
    hidden, weight, targets, grads = problem(vocab_size, torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs * grads[0] + entropy * grads[1]).sum().backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def on_ranks(vocab_size, rows, temperature, chunk_elements):
    """This rank's part; its share of the hidden states' gradient is summed here, as the model's region does."""
    from meshrl.engines import packed_model
    from meshrl.engines.megatron.vocab_parallel import VocabularyPart, vocab_parallel_log_probs

    before, packed_model.CHUNK_ELEMENTS = packed_model.CHUNK_ELEMENTS, chunk_elements
    rank = dist.get_rank()
    hidden, weight, targets, grads = problem(vocab_size)
    padded = torch.zeros(rows * dist.get_world_size(), DIM)
    padded[:vocab_size] = weight
    # Padding must not count, whatever it holds.
    padded[vocab_size:] = 100.0
    own = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    part = VocabularyPart.of(rank, rows, vocab_size, dist.group.WORLD)
    found = vocab_parallel_log_probs(hidden, own, targets, part, temperature=temperature, with_entropy=True)
    (found[0] * grads[0] + found[1] * grads[1]).sum().backward()
    dist.all_reduce(hidden.grad)
    alone, none = vocab_parallel_log_probs(hidden, own, targets, part, temperature=temperature)
    packed_model.CHUNK_ELEMENTS = before
    assert none is None
    assert torch.equal(alone, found[0])
    return *(x.detach() for x in found), hidden.grad, own.grad


@pytest.mark.parametrize(
    ("world", "vocab_size", "rows"), [(1, 61, 61), (2, 61, 31), (2, 61, 64), (4, 50, 13), (4, 9, 8)]
)
@pytest.mark.parametrize(("temperature", "chunk_elements"), [(1.0, 1 << 25), (0.7, 300)])
def test_same_as_plain(megatron_ranks, world, vocab_size, rows, temperature, chunk_elements):
    log_probs, entropy, grad_hidden, grad_weight = plain(vocab_size, temperature)
    results = megatron_ranks(world).run(on_ranks, vocab_size, rows, temperature, chunk_elements)
    for found in results:
        torch.testing.assert_close(found[0].double(), log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1].double(), entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[2].double(), grad_hidden, rtol=1e-4, atol=1e-5)
    whole = torch.cat([found[3] for found in results]).double()
    torch.testing.assert_close(whole[:vocab_size], grad_weight, rtol=1e-4, atol=1e-5)
    assert not whole[vocab_size:].any()


def test_a_target_of_another_rank_is_told_apart(megatron_ranks):
    """Control: with the targets moved by one, the log-probs differ."""
    shifted = plain(61, 1.0)[0].roll(1)
    found = megatron_ranks(2).run(on_ranks, 61, 31, 1.0, 1 << 25)[0]
    assert (found[0] - shifted).abs().max() > 0.1
