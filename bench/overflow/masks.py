"""Programs with infinities on purpose: a watch must say nothing of them. For bench.overflow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.overflow.case import Planted, Watching, plants

MASKS: dict[str, Planted] = {}
nothing = plants(MASKS)
HALF = torch.float16


def future() -> Tensor:
    return torch.ones(4, 4, dtype=torch.bool).triu(1)


@nothing
def masked_fill_before_softmax(watching: Watching) -> None:
    scores = torch.randn(2, 4, 4, requires_grad=True)
    with watching():
        (F.softmax(scores.masked_fill(future(), -torch.inf), -1) @ torch.randn(2, 4, 3)).sum().backward()


@nothing
def masked_fill_in_place(watching: Watching) -> None:
    scores = torch.randn(2, 4, 4)
    with watching():
        scores.masked_fill_(future(), float("-inf")).softmax(-1)


@nothing
def given_by_keyword(watching: Watching) -> None:
    with watching():
        scores = torch.randn(4, 4).masked_fill(mask=future(), value=-torch.inf)
        F.softmax(scores + torch.full(size=(4, 4), fill_value=-torch.inf).triu(diagonal=2), -1)


@nothing
def where_before_softmax(watching: Watching) -> None:
    scores = torch.randn(4, 4, requires_grad=True)
    with watching():
        torch.where(future(), torch.tensor(-torch.inf), scores).softmax(-1).square().sum().backward()


@nothing
def triu_of_full(watching: Watching) -> None:
    scores = torch.randn(2, 4, 4)
    with watching():
        mask = torch.triu(torch.full((4, 4), -torch.inf), diagonal=1)
        F.log_softmax(scores + mask, -1).exp().sum()


@nothing
def mask_made_before_the_watch(watching: Watching) -> None:
    mask = torch.zeros(4, 4).masked_fill(future(), -torch.inf)
    with watching():
        F.softmax(mask[None].expand(2, 4, 4) + torch.randn(2, 4, 4), -1)


@nothing
def set_by_index(watching: Watching) -> None:
    logits = torch.randn(2, 8)
    with watching():
        logits[logits < logits.topk(3).values[:, -1:]] = -torch.inf
        torch.multinomial(F.softmax(logits, -1), 1)


@nothing
def scatter_of_a_number(watching: Watching) -> None:
    logits = torch.randn(2, 8)
    with watching():
        logits.scatter(1, torch.tensor([[1], [2]]), -torch.inf).softmax(-1)


@nothing
def log_of_zero_into_softmax(watching: Watching) -> None:
    keep = (~future()).float()
    with watching():
        F.softmax(torch.randn(2, 4, 4) + torch.log(keep), -1)


@nothing
def product_that_becomes_a_fp16_mask(watching: Watching) -> None:
    hidden = future().half()
    with watching():
        F.softmax(torch.randn(2, 4, 4).half() + hidden * -1e9, -1)


@nothing
def cast_that_becomes_a_fp16_mask(watching: Watching) -> None:
    mask = torch.zeros(4, 4).masked_fill(future(), -1e9)
    with watching():
        F.softmax(torch.randn(2, 4, 4).half() + mask.to(HALF), -1)


@nothing
def least_number_twice_in_fp16(watching: Watching) -> None:
    mask = torch.zeros(4, 4, dtype=HALF).masked_fill(future(), torch.finfo(HALF).min)
    with watching():
        F.softmax(torch.randn(4, 4).half() + (mask + mask), -1)


@nothing
def fused_attention(watching: Watching) -> None:
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    with watching():
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


@nothing
def transformer_layer_with_masks(watching: Watching) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.tensor([[False, False, False, True]] * 2)
    with watching(layer):
        hidden = torch.zeros(2, 4).masked_fill(padding, -torch.inf)
        layer(torch.randn(2, 4, 8), src_mask=mask, src_key_padding_mask=hidden).sum().backward()


@nothing
def masked_logits_in_cross_entropy(watching: Watching) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    with watching():
        masked = logits.masked_fill(torch.tensor([False, False, False, True, True]), -torch.inf)
        F.cross_entropy(masked, torch.tensor([0, 1, 2])).backward()


@nothing
def logsumexp_of_a_masked_row(watching: Watching) -> None:
    scores = torch.randn(3, 4)
    with watching():
        torch.logsumexp(scores.masked_fill(torch.tensor([[True], [False], [False]]), -torch.inf), -1)


@nothing
def smallest_so_far(watching: Watching) -> None:
    with watching():
        best = torch.tensor(float("inf"))
        for _ in range(3):
            best = torch.minimum(best, torch.rand(()))


@nothing
def beam_scores(watching: Watching) -> None:
    with watching():
        scores = torch.full((2, 3), -torch.inf)
        scores[:, 0] = 0
        for _ in range(2):
            grown = scores[:, :, None] + F.log_softmax(torch.randn(2, 3, 5), -1)
            scores = grown.flatten(1).topk(3).values


@nothing
def memory_that_is_filled_later(watching: Watching) -> None:
    with watching():
        buffer = torch.empty(64, 64)
        buffer.copy_(torch.randn(64, 64))
        torch.empty(3, 4).normal_().sum()
        (buffer @ buffer).sum()


@nothing
def greatest_number_on_purpose(watching: Watching) -> None:
    scores = torch.randn(4, 4, dtype=HALF)
    with watching():
        F.softmax(scores.masked_fill(future(), torch.finfo(HALF).min), -1)
        scores.clamp(max=torch.finfo(HALF).max).amin()


@nothing
def mask_in_two_fillings(watching: Watching) -> None:
    with watching():
        keep = (~future()).float()
        mask = keep.masked_fill(keep == 0, -torch.inf).masked_fill(keep == 1, 0.0)
        F.softmax(torch.randn(2, 4, 4) + mask, -1)


@nothing
def ones_times_infinity(watching: Watching) -> None:
    with watching():
        mask = torch.triu(torch.ones(4, 4) * -torch.inf, diagonal=1)
        F.softmax(torch.randn(4, 4) + mask, -1)


@nothing
def padded_before_pooling(watching: Watching) -> None:
    x = torch.randn(1, 1, 4, requires_grad=True)
    with watching():
        F.max_pool1d(F.pad(x, (1, 1), value=-torch.inf), 3, stride=1).sum().backward()


@nothing
def softmax_written_out(watching: Watching) -> None:
    scores = torch.randn(4, 4, requires_grad=True)
    with watching():
        masked = scores.masked_fill(future(), -torch.inf)
        weights = torch.exp(masked - masked.amax(-1, keepdim=True))
        (weights / weights.sum(-1, keepdim=True)).square().sum().backward()


@nothing
def softmax_in_blocks(watching: Watching) -> None:
    with watching():
        greatest, total = torch.full((4,), -torch.inf), torch.zeros(4)
        for block in torch.randn(3, 4, 5):
            now = torch.maximum(greatest, block.amax(-1))
            total = total * torch.exp(greatest - now) + torch.exp(block - now[:, None]).sum(-1)
            greatest = now
        torch.log(total) + greatest


@nothing
def sums_of_logarithms(watching: Watching) -> None:
    with watching():
        alpha = torch.full((3,), -torch.inf)
        alpha[0] = 0.0
        for _ in range(3):
            alpha = torch.logaddexp(alpha, alpha.roll(1)) + F.log_softmax(torch.randn(3), -1)


@nothing
def masked_categorical(watching: Watching) -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    with watching():
        masked = logits.masked_fill(torch.tensor([False, True, False, False]), -torch.inf)
        choice = torch.distributions.Categorical(logits=masked)
        (choice.log_prob(choice.sample()).sum() + choice.entropy().sum()).backward()


@nothing
def shortest_paths(watching: Watching) -> None:
    """Positive infinities, and they are added to."""
    costs = torch.rand(4, 4)
    with watching():
        best = torch.full((4,), torch.inf)
        best[0] = 0.0
        for _ in range(3):
            best = torch.minimum(best, (best[:, None] + costs).amin(0))


@nothing
def nearest_neighbours(watching: Watching) -> None:
    points = torch.randn(4, 2)
    with watching():
        torch.cdist(points, points).fill_diagonal_(torch.inf).min(-1)


@nothing
def gradient_of_a_constant_row(watching: Watching) -> None:
    """Which torch defines as zero."""
    x = torch.ones(2, 4, requires_grad=True)
    with watching():
        (x.std(-1).sum() + x.norm()).backward()


@nothing
def batch_norm_of_a_constant_batch(watching: Watching) -> None:
    """Without eps: torch takes zero for one divided by no variance."""
    x = torch.ones(4, 3, requires_grad=True)
    with watching():
        torch.batch_norm(x, None, None, None, None, True, 0.1, 0.0, False).sum().backward()


@nothing
def allowed_by_the_user(watching: Watching) -> None:
    with watching(allow=["Torch.exp"]):
        torch.exp(torch.full((3,), 100.0)).clamp(max=1e4).sum()
