"""Planted overflows by the way a call is made (in place, into a given tensor, in threads), and arrivals. For bench.overflow."""

from __future__ import annotations

import functools
import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.overflow.case import Planted, Watching, plants

WAYS: dict[str, Planted] = {}
plant = functools.partial(plants, WAYS)
HALF = torch.float16


@plant("Tensor.exp_.0.forward inf")
def in_place(watching: Watching) -> None:
    x = torch.full((4,), 50.0)
    with watching():
        x.mul_(2).exp_().add_(1)


@plant("Tensor.div_.0.forward nan")
def in_place_operator_on_a_view(watching: Watching) -> None:
    x = torch.zeros(4, 4)
    with watching():
        x[1] /= x[2]
        x.sum()


@plant("Torch.exp.0.forward inf")
def into_a_given_tensor(watching: Watching) -> None:
    x = torch.full((4,), 100.0)
    with watching():
        torch.exp(x, out=torch.empty(4))


@plant("Torch.div.0.forward nan")
def into_a_tensor_that_was_infinite(watching: Watching) -> None:
    x, into = torch.zeros(4), torch.full((4,), torch.inf)
    with watching():
        torch.div(x, x, out=into)


@plant("Torch._foreach_exp.0.forward inf")
def foreach(watching: Watching) -> None:
    several = [torch.zeros(2), torch.full((3,), 100.0)]
    with watching():
        torch._foreach_add(torch._foreach_exp(several), 1.0)


@plant("Torch._foreach_div_.0.forward nan")
def foreach_in_place(watching: Watching) -> None:
    several = [torch.ones(2), torch.zeros(3)]
    with watching():
        torch._foreach_div_(several, [torch.ones(2), torch.zeros(3)])


@plant("Tensor.copy_.0.forward inf")
def copied_into_fp16(watching: Watching) -> None:
    into, x = torch.zeros(2, dtype=HALF), torch.tensor([1.0, 7e4])
    with watching():
        into.copy_(x)
        into.sum()


@plant("Tensor.__setitem__.0.forward inf")
def assigned_into_fp16(watching: Watching) -> None:
    into, x = torch.zeros(2, dtype=HALF), torch.tensor(7e4)
    with watching():
        into[1] = x
        into.sum()


@plant("Tensor.index_add_.0.forward inf")
def added_by_index(watching: Watching) -> None:
    into = torch.zeros(2, dtype=HALF)
    with watching():
        into.index_add_(0, torch.tensor([0, 0, 1]), torch.full((3,), 4e4, dtype=HALF))


@plant("Torch.exp.0.forward inf")
def in_inference_mode(watching: Watching) -> None:
    with watching(), torch.inference_mode():
        torch.exp(torch.full((3,), 100.0)).mul_(2).sum()


@plant("Functional.linear.0.forward inf")
def fp16_autocast(watching: Watching) -> None:
    linear = nn.Linear(64, 4)
    nn.init.constant_(linear.weight, 50.0)
    with watching(linear), torch.autocast(torch.empty(0).device.type, dtype=HALF):
        linear(torch.full((2, 64), 50.0)).float().mean()


@plant("Torch.exp.0.forward inf")
def in_another_thread(watching: Watching) -> None:
    thread = threading.Thread(target=lambda: torch.exp(torch.full((3,), 100.0)).sum())
    with watching():
        thread.start()
        thread.join()


@plant("Torch.exp.0.forward inf", "Torch.sqrt.0.forward nan")
def two_of_different_causes(watching: Watching) -> None:
    with watching():
        torch.exp(torch.full((3,), 100.0)).sum()
        torch.sqrt(torch.tensor([-1.0])).sum()


@plant("Torch.exp.0.forward inf step 2")
def in_the_third_step(watching: Watching) -> None:
    linear = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    with watching(linear):
        for scale in (1.0, 20.0, 90.0, 1.0):
            optimizer.zero_grad()
            linear(torch.ones(1, 2)).mean().backward()
            torch.exp(torch.full((2,), scale)).clamp(max=1.0).sum()
            optimizer.step()


class Custom(torch.autograd.Function):
    """Overflows in forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.exp(x).log()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


@plant("Torch.exp.0.forward inf")
def inside_a_custom_function(watching: Watching) -> None:
    x = torch.full((3,), 100.0, requires_grad=True)
    with watching():
        Custom.apply(x).sum().backward()


@plant(arrivals=("Functional.linear.0.forward had input",))
def nan_in_data(watching: Watching) -> None:
    linear, batch = nn.Linear(3, 2), torch.tensor([[1.0, torch.nan, 2.0]])
    with watching(linear):
        F.gelu(linear(batch)).mean().backward()


@plant(arrivals=("Functional.linear.0.forward had parameter 1.weight",))
def nan_in_weights(watching: Watching) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.ReLU())
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with watching(model):
        model(torch.randn(4, 3)).mean().backward()


@plant(arrivals=("Functional.embedding.0.forward had parameter weight",))
def infinite_row_of_an_embedding(watching: Watching) -> None:
    embedding = nn.Embedding(5, 4)
    with torch.no_grad():
        embedding.weight[3] = torch.inf
    with watching(embedding):
        F.layer_norm(embedding(torch.tensor([1, 3])), [4])


@plant(arrivals=("Functional.batch_norm.0.forward had buffer running_mean",))
def infinite_statistics_in_batch_norm(watching: Watching) -> None:
    norm = nn.BatchNorm1d(3).eval()
    norm.running_mean.fill_(torch.inf)
    with watching(norm):
        norm(torch.randn(4, 3))


@plant(arrivals=("Torch.stack.0.forward had input step 1",))
def nan_in_the_second_batch(watching: Watching) -> None:
    batches = DataLoader([torch.ones(2), torch.tensor([1.0, torch.nan])])
    with watching() as watch:
        for batch in batches:
            (batch * 2).sum()
            watch.step()


@plant(arrivals=("Torch.tensor.0.forward had number",))
def nan_in_a_list(watching: Watching) -> None:
    with watching():
        (torch.tensor([1.0, torch.nan]) * 2).sum()
