"""Programs of many kinds do the same, say the same and raise the same with a watch on them."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from tensorprobe import torch_names
from tests.harm.programs import WATCHES, Program, Say, Watch, assert_unharmed, described

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2))


def _train(model: nn.Module, say: Say, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        say(loss, [p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    say(list(model.parameters()), torch.get_rng_state())


class Logged(Tensor):
    """A subclass that writes down what it sees."""

    log: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func))
        cls.log.append((name, [t.__name__ for t in types], len(args), kwargs and sorted(kwargs)))
        return super().__torch_function__(func, types, args, kwargs or {})


def _logged(*size: int) -> Logged:
    return torch.randn(*size).as_subclass(Logged)


@program
def a_subclass_that_logs_its_calls(watch: Watch, say: Say) -> None:
    Logged.log = []
    model = _model()
    with watch(model):
        value = _logged(3, 4).requires_grad_()
        result = model(value)
        (result * 2 + value.sum()).sum().backward()
        say(value.grad, result, F.relu(value), value[0], torch.cat([value, value]), value.T @ value)
        value.data.add_(1)
        torch.autograd.grad((value * value).sum(), value)
        F.multi_head_attention_forward(
            _logged(2, 1, 4), _logged(2, 1, 4), _logged(2, 1, 4), 4, 2, torch.randn(12, 4), None, None, None,
            False, 0.0, torch.eye(4), None,
        )  # fmt: skip
        torch.max(value, dim=0), value.unbind(), torch.stack([value, value]), F.max_pool1d(value[None], 2)
        value.numpy, repr(value.shape), value.tolist(), len(value), bool((value > 0).any())
    say(Logged.log)


@program
def a_subclass_that_overrides_backward(watch: Watch, say: Say) -> None:
    seen: list[str] = []

    class Own(Tensor):
        def backward(self, *args: Any, **kwargs: Any) -> None:
            seen.append("backward")
            with torch._C.DisableTorchFunctionSubclass():
                super().backward(*args, **kwargs)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.autograd.grad, torch.autograd.backward, F.multi_head_attention_forward):
                seen.append(func.__name__)
                return "mine"
            return super().__torch_function__(func, types, args, kwargs or {})

    with watch():
        value = torch.randn(3).as_subclass(Own).requires_grad_()
        (value * 2).sum().backward()
        say(torch.autograd.grad((value * 3).sum(), [value]), value.grad, seen)
        say(torch.autograd.backward([(value * 3).sum()]), seen)


@program
def a_subclass_with_properties_that_lie(watch: Watch, say: Say) -> None:
    counts: dict[str, int] = {}

    class Lies(Tensor):
        @property
        def shape(self) -> Any:
            counts["shape"] = counts.get("shape", 0) + 1
            return (99,)

        @property
        def dtype(self) -> Any:
            counts["dtype"] = counts.get("dtype", 0) + 1
            return "none"

        def __getattr__(self, name: str) -> Any:
            counts[name] = counts.get(name, 0) + 1
            raise AttributeError(name)

        def __len__(self) -> int:
            counts["len"] = counts.get("len", 0) + 1
            return 7

        def __bool__(self) -> bool:
            counts["bool"] = counts.get("bool", 0) + 1
            return False

        def __eq__(self, other: Any) -> Any:
            counts["eq"] = counts.get("eq", 0) + 1
            raise RuntimeError("no comparing")

        __hash__ = Tensor.__hash__

    with watch():
        value = torch.randn(3).as_subclass(Lies)
        say((value + 1).sum(), torch.sin(value), F.relu(value))
    say(counts)


@program
def a_subclass_that_sees_every_look_at_it(watch: Watch, say: Say) -> None:
    looks: list[str] = []

    class Shy(Tensor):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__"):  # what torch looks for in every argument while a mode is on
                looks.append(name)
            return super().__getattribute__(name)

    with watch():
        value = torch.randn(3).as_subclass(Shy).requires_grad_()
        torch.log(value * 0 - 1).sum().backward()  # NaN, in backward too
        other = torch.zeros(3).as_subclass(Shy)
        other.div_(other).add_(1, alpha=2)
        say(torch.stack([other, other]), torch.max(other, dim=0).values, value.grad)
    say(looks)


@program
def a_wrapper_subclass_that_dispatches(watch: Watch, say: Say) -> None:
    log: list[str] = []

    class Wrapper(Tensor):
        inner: Tensor

        @staticmethod
        def __new__(cls, inner: Tensor) -> Any:
            made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)
            made.inner = inner
            return made

        def __tensor_flatten__(self) -> Any:
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
            return Wrapper(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(str(func))
            taken = torch.utils._pytree.tree_map_only(Wrapper, lambda w: w.inner, (args, kwargs or {}))
            result = func(*taken[0], **taken[1])
            return torch.utils._pytree.tree_map_only(Tensor, Wrapper, result)

    with watch():
        value = Wrapper(torch.randn(3, 3))
        result = (value @ value + value).relu()
        say(result.inner)
        linear = nn.Linear(3, 3)
        linear.weight = nn.Parameter(Wrapper(linear.weight.detach()))
        linear(torch.randn(2, 3)).inner.sum()
    say(log)


@program
def an_object_with_torch_function_that_is_no_tensor(watch: Watch, say: Say) -> None:
    seen: list[str] = []

    class Odd:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return "odd"

    with watch():
        say(torch.add(torch.ones(2), Odd()), torch.cat([Odd(), torch.ones(1)]), F.relu(Odd()), torch.sin(Odd()))  # type: ignore
    say(seen)


@program
def modes_of_its_own(watch: Watch, say: Say) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    log: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(f"{getattr(func, '__name__', func)} {sorted(kwargs or {})} {kwargs is None}")
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            log.append(str(func))
            return func(*args, **(kwargs or {}))

    model = _model()
    with watch(model):
        for mode in (Functions, Ops):
            with mode():
                model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    for mode in (Functions, Ops):
        with mode(), watch(model):
            model(torch.randn(2, 4)).sum().backward()
    say(log)


@program
def hooks_of_every_kind(watch: Watch, say: Say) -> None:
    model = _model()
    order: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, n=name: order.append(f"pre {n}"))
        module.register_forward_hook(lambda *_, n=name: order.append(f"forward {n}"))
        module.register_full_backward_pre_hook(lambda *_, n=name: order.append(f"backward pre {n}"))
        module.register_full_backward_hook(lambda *_, n=name: order.append(f"backward {n}"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, n=name: order.append(f"grad {n}"))
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: order.append(f"accumulated {n}"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: order.append("global"))
    try:
        with watch(model):
            value = torch.randn(2, 4, requires_grad=True)
            middle = model(value)
            middle.register_hook(lambda g: g * 2)
            middle.retain_grad()
            node = middle.grad_fn
            node.register_prehook(lambda g: order.append("node pre"))
            node.register_hook(lambda *_: order.append("node"))
            middle.square().sum().backward()
            say(middle.grad, value.grad)
            handle = model.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
            say(model(value))
            handle.remove()
    finally:
        everywhere.remove()
    say(order)


@program
def saved_tensor_hooks(watch: Watch, say: Say) -> None:
    packed: list[Any] = []

    def pack(value: Tensor) -> Any:
        packed.append((tuple(value.shape), value.requires_grad, value._version))
        return value.clone()

    model = _model()
    with watch(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        _train(model, say)
    with watch(model), torch.autograd.graph.save_on_cpu():
        _train(model, say)
    say(packed)


@program
def an_error_in_every_place(watch: Watch, say: Say) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("in backward")

    def tried(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            say(type(error).__name__, str(error), error.__cause__ is None, error.__context__ is None)

    with watch():
        value = torch.randn(3, requires_grad=True)
        tried(lambda: torch.ones(2) @ torch.ones(3))
        tried(lambda: Fails.apply(value).sum().backward())
        tried(lambda: value.add_(1))
        tried(lambda: F.linear(torch.ones(2, 3), torch.ones(2, 2)))
        tried(lambda: torch.sin())  # type: ignore[call-arg]
        tried(lambda: torch.sin("text"))  # type: ignore[arg-type]
        tried(lambda: torch.sin(value, nothing=1))  # type: ignore[call-arg]
        tried(lambda: F.relu(value, nothing=1))  # type: ignore[call-arg]
        tried(lambda: value.backward())
        tried(lambda: nn.Linear(2, 2)(torch.ones(3)))
        tried(lambda: torch.cat([]))
        tried(lambda: value.view(7))
        loss = value.exp().sum()
        loss.backward()
        tried(lambda: loss.backward())
        changed = value * 1
        squared = changed * changed
        changed.zero_()
        tried(lambda: squared.sum().backward())
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the stack in its text has our frames
            tried(lambda: torch.sqrt(-value.abs()).sum().backward())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.tensor(torch.ones(1))
            value.grad_fn, (value * 2).grad
            F.softmax(value)
            F.mse_loss(torch.ones(2), torch.ones(1))
        say([(w.category.__name__, str(w.message)[:80]) for w in caught])
    raise KeyError("last")


@program
def warnings_of_every_kind(watch: Watch, say: Say) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            warnings.warn("here", stacklevel=1)
            warnings.warn("at the caller", stacklevel=2)
            return value * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            warnings.warn("in backward", stacklevel=1)
            return grads[0]

    def warns() -> None:
        value = torch.randn(2, 2, 2, requires_grad=True)
        torch.tensor(torch.ones(1)), (value * 2).grad, value.T
        torch.add(torch.ones(3), 1, out=torch.empty(2))
        for _ in range(2):
            F.softmax(value), F.mse_loss(torch.ones(2), torch.ones(1))
        F.softmax(value)
        Own.apply(value).sum().backward()

    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with watch():
            warns()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    F.softmax(torch.ones(2))
                except UserWarning as error:
                    say(described(error))
                try:
                    say((torch.ones(2, requires_grad=True) * 2).grad)
                except UserWarning as error:
                    say(described(error))
            with warnings.catch_warnings(record=True) as once:
                warnings.resetwarnings()  # once for each line
                globals().pop("__warningregistry__", None)
                warns()
                warns()
            say([(str(w.message), w.filename, w.lineno) for w in once])
    finally:
        torch.set_warn_always(always)


@program
def generators_and_random_numbers(watch: Watch, say: Say) -> None:
    own = torch.Generator().manual_seed(3)
    with watch():
        say(torch.rand(3, generator=own), torch.randperm(5, generator=own), torch.bernoulli(torch.full((4,), 0.5)))
        say(F.dropout(torch.ones(20), 0.5), torch.multinomial(torch.ones(5), 3), torch.empty(3).normal_(generator=own))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            say(torch.rand(2))
        say(nn.init.xavier_uniform_(torch.empty(3, 3)), F.gumbel_softmax(torch.ones(4)), torch.initial_seed())
    say(own.get_state())


@program
def checkpointing_of_every_kind(watch: Watch, say: Say) -> None:
    for reentrant in (True, False):
        for preserve in (True, False):
            model = _model()
            with watch(model):
                value = torch.randn(3, 4, requires_grad=True)
                inner = checkpoint.checkpoint(model, value, use_reentrant=reentrant, preserve_rng_state=preserve)
                checkpoint.checkpoint(torch.sin, inner, use_reentrant=reentrant).sum().backward()
                say(value.grad, [p.grad for p in model.parameters()], torch.get_rng_state())
    model = _model()
    with watch(model):
        say(checkpoint.checkpoint_sequential(model, 2, torch.randn(3, 4, requires_grad=True), use_reentrant=False))


@program
def functorch(watch: Watch, say: Say) -> None:
    from torch import func

    model = _model().eval()
    state = dict(model.named_parameters())

    def loss(parameters: Any, value: Tensor) -> Tensor:
        return func.functional_call(model, parameters, (value,)).square().sum()

    with watch(model):
        values = torch.randn(5, 4)
        say(func.vmap(func.grad(loss), in_dims=(None, 0))(state, values))
        say(func.jacrev(torch.sin)(torch.randn(3)), func.jacfwd(torch.tanh)(torch.randn(3)))
        say(func.hessian(lambda x: x.pow(3).sum())(torch.randn(3)), func.jvp(torch.sin, (values,), (values,)))
        say(func.vmap(lambda x: F.dropout(x, 0.5), randomness="different")(values))
        say(func.linearize(torch.sin, values)[0], func.vjp(torch.sin, values)[1](values))
        say(torch.autograd.functional.hessian(lambda x: x.pow(3).sum(), torch.randn(3)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(values, values)
            say(torch.autograd.forward_ad.unpack_dual(dual.sin() * dual))


@program
def traces_exports_and_fakes(watch: Watch, say: Say) -> None:
    from torch.fx import symbolic_trace
    from torch.fx.experimental.proxy_tensor import make_fx

    model = _model().eval()
    value = torch.randn(2, 4)
    with watch(model):
        say([str(node) for node in make_fx(lambda x: F.relu(model(x)).sin())(value).graph.nodes])
        say([str(node) for node in symbolic_trace(model).graph.nodes], symbolic_trace(model)(value))
        say([str(node) for node in torch.export.export(model, (value,)).graph.nodes])
        traced = torch.jit.trace(model, value)
        say([node.kind() for node in traced.inlined_graph.nodes()], traced(value))
        with torch._subclasses.FakeTensorMode() as fakes:
            say(fakes.from_tensor(value).sin().shape)


@program
def functions_and_operators_of_its_own(watch: Watch, say: Say) -> None:
    log: list[Any] = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, scale: float) -> Any:
            ctx.save_for_backward(value)
            ctx.scale = scale
            ctx.set_materialize_grads(False)
            log.append((torch.is_grad_enabled(), value.requires_grad))
            return value * scale, value + 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (value,) = ctx.saved_tensors
            log.append([ctx.needs_input_grad, *(grad is None for grad in grads)])
            return (grads[0] * ctx.scale + value.sin(), None)

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.mark_dirty(value)
            return value.mul_(2)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    with watch():
        value = torch.randn(3, requires_grad=True)
        Own.apply(value, 2.0)[0].sum().backward()
        InPlace.apply(value * 1).sum().backward()
        say(value.grad, torch.ops.aten.sin(value), torch.ops.aten.add.Tensor(value, value))
        double = torch.autograd.grad((value**3).sum(), value, create_graph=True)[0]
        double.sum().backward()
        say(value.grad)
    say(log)


@program
def a_function_with_a_vmap_of_its_own(watch: Watch, say: Say) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(value: Tensor) -> Tensor:
            return value.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * ctx.saved_tensors[0].cos()

        @staticmethod
        def vmap(info: Any, in_dims: Any, value: Tensor) -> Any:
            return Own.apply(value), in_dims[0]

    with watch():
        value = torch.randn(2, 3)
        say(torch.func.vmap(Own.apply)(value), torch.func.grad(lambda each: Own.apply(each).sum())(value))


@program
def a_backward_hook_where_no_input_has_a_gradient(watch: Watch, say: Say) -> None:
    """torch warns, five frames above itself: at the line that calls backward."""
    model = _model()
    model[0].register_full_backward_hook(lambda *_: None)
    with watch(model):
        model(torch.ones(1, 4)).sum().backward()
        torch.autograd.backward([model(torch.ones(1, 4)).sum()])


@program
def modules_that_hash_and_compare_themselves(watch: Watch, say: Say) -> None:
    log: list[str] = []

    class Own(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * 2

        def __eq__(self, other: object) -> bool:
            log.append("eq")
            return True

        def __hash__(self) -> int:
            log.append("hash")
            return 5

        def __bool__(self) -> bool:
            log.append("bool")
            return False

        def __len__(self) -> int:
            log.append("len")
            return 0

    one, other = Own(), Own()
    with watch():
        say(one(torch.ones(1)), other(torch.ones(1)))
    say(log)


@program
def a_watch_that_begins_in_a_thread_that_ends(watch: Watch, say: Say) -> None:
    model = _model().eval()
    for starter, stopper in ((True, True), (False, True), (True, False)):
        block = watch(model)
        for action, in_thread in ((block.__enter__, starter), (lambda: block.__exit__(None, None, None), stopper)):  # noqa: B023
            if in_thread:
                thread = threading.Thread(target=action)
                thread.start()
                thread.join()
            else:
                action()
            say(model(torch.ones(1, 4)))
        say(torch.utils._python_dispatch.is_in_torch_dispatch_mode())


@program
def modules_with_arguments_named_like_ours(watch: Watch, say: Say) -> None:
    class Own(nn.Module):
        def forward(self, module: Tensor, original: int = 1, *, args: int = 2, kwargs: int = 3, tap: int = 4) -> Tensor:
            return module * original + args + kwargs + tap

    with watch():
        say(Own()(module=torch.ones(1), args=5, kwargs=6, tap=7), Own()(torch.ones(1), original=2))


@program
def callables_that_cannot_be_hashed(watch: Watch, say: Say) -> None:
    class Own:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, value: Tensor) -> Any:
            if torch.overrides.has_torch_function((value,)):
                return torch.overrides.handle_torch_function(self, (value,), value)
            return value * 6

    with watch():
        say(Own()(torch.ones(1)))


@program
def arguments_that_log_who_reads_them(watch: Watch, say: Say) -> None:
    log: list[str] = []

    class Own(dict[str, Tensor]):
        def items(self) -> Any:
            log.append("items")
            return super().items()

    class Takes(nn.Module):
        def forward(self, given: Own) -> Own:
            return given

    with watch():
        Takes()(Own(a=torch.ones(1)))
    say(log)


@pytest.mark.skipif(torch_names.torch_version() < (2, 13), reason="an older torch has no way for modes to pass them")
def test_higher_order_operators_run_under_every_watch(tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(watch: Watch, say: Say) -> None:
        values = torch.randn(1, 2, 8, 4)
        with warnings.catch_warnings(), watch():
            warnings.simplefilter("ignore")
            say(flex_attention(values, values, values))
            say(flex_attention(values, values, values, score_mod=lambda score, b, h, q, k: score + q - k))

    assert_unharmed(attend, tmp_path)
    torch._dynamo.reset()


@program
def grad_modes(watch: Watch, say: Say) -> None:
    model = _model()
    with watch(model):
        with torch.no_grad():
            say(model(torch.ones(1, 4)).requires_grad)
        with torch.inference_mode():
            found = model(torch.ones(1, 4))
            say(found.is_inference(), found.requires_grad, found + 1)
            found.add_(1)
        with torch.inference_mode(), torch.inference_mode(False):
            say(model(torch.ones(1, 4)).requires_grad)
        with torch.set_grad_enabled(False), torch.enable_grad():
            say(model(torch.ones(1, 4)).requires_grad)
        with torch.autocast("cpu", torch.bfloat16):
            say(model(torch.ones(1, 4)), torch.is_autocast_enabled("cpu"))

        @torch.no_grad()
        def decorated() -> bool:
            return (torch.ones(1, requires_grad=True) * 2).requires_grad

        say(decorated(), torch.is_grad_enabled())


@program
def versions_views_and_identity(watch: Watch, say: Say) -> None:
    with watch():
        value = torch.randn(4, 4)
        view = value[1:]
        view.mul_(2)
        say(value._version, view._base is value, view.storage_offset(), view.data_ptr() - value.data_ptr())
        out = torch.empty(4, 4)
        say(torch.add(value, value, out=out) is out, value.add_(1) is value, F.relu(value, inplace=True) is value)
        leaf = torch.randn(3, requires_grad=True)
        branch = leaf * 2
        say(branch.grad_fn.name(), len(branch.grad_fn.next_functions), branch.is_leaf, leaf.grad_fn is None)
        say(sys.getrefcount(leaf), sys.getrefcount(branch), leaf._backward_hooks, branch._backward_hooks)
        alive = weakref.ref(branch)
        del branch
        say(alive() is None)
        say(value.untyped_storage().nbytes(), value.is_shared())


@program
def memory_is_freed_as_early(watch: Watch, say: Say) -> None:
    freed: list[int] = []
    gc.collect()
    gc.disable()
    try:
        with watch():
            value = torch.randn(4, requires_grad=True)
            for number in range(5):
                value = torch.sin(value) * 2
                weakref.finalize(value, freed.append, number)
            del value
            say(list(freed))

            class Loop(nn.Module):
                def forward(self, x: Tensor) -> Tensor:
                    return x * 2

            module = Loop()
            module(torch.ones(1))
            weakref.finalize(module, freed.append, 99)
            del module
            say(list(freed))
            say(gc.isenabled())
    finally:
        gc.enable()


@program
def no_tensor_is_kept_beyond_its_graph(watch: Watch, say: Say) -> None:
    model = _model()
    with watch(model):
        counts = []
        for _ in range(3):
            model(torch.randn(3, 4)).square().mean().backward()
            model.zero_grad(set_to_none=False)
            gc.collect()
            counts.append(sum(type(each) is Tensor for each in gc.get_objects()))
        say(counts[1] - counts[0], counts[2] - counts[1])


@program
def models_are_copied_and_pickled(watch: Watch, say: Say) -> None:
    model = _model()
    with watch(model):
        model(torch.ones(1, 4)).sum().backward()
        twin = copy.deepcopy(model)
        say([p.grad for p in twin.parameters()], pickle.dumps(model.state_dict()) == pickle.dumps(twin.state_dict()))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        say(torch.load(file, weights_only=False)(torch.ones(1, 4)), len(file.getvalue()))
        say(sorted(vars(model)), sorted(vars(model[0])), type(model).__mro__, nn.Module.__call__.__qualname__)
        say(torch.nn.Module.__call__ is nn.Sequential.__call__, F.gelu is torch._C._nn.gelu, model._forward_hooks)


@program
def threads(watch: Watch, say: Say) -> None:
    import concurrent.futures

    model = _model().eval()

    class Named(threading.Thread):
        def run(self) -> None:
            self.result = model(torch.ones(2, 4)).sum()
            self.result.backward()

    with watch(model):
        workers = [Named() for _ in range(3)]
        for worker in workers:
            worker.start()
            worker.join()
        say([worker.result for worker in workers], [p.grad for p in model.parameters()])
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            say(list(pool.map(lambda n: model(torch.full((1, 4), float(n))), range(6))))
        failing = threading.Thread(target=lambda: torch.ones(2) @ torch.ones(3))
        caught: list[Any] = []
        old, threading.excepthook = threading.excepthook, lambda found: caught.append(found.exc_type)
        failing.start()
        failing.join()
        threading.excepthook = old
        say(caught, threading.active_count() > 0, threading.local().__dict__)
    _train(model, say)


@program
def generators_coroutines_and_recursion(watch: Watch, say: Say) -> None:
    import asyncio

    model = _model().eval()

    def batches() -> Any:
        with torch.no_grad():
            for number in range(3):
                yield model(torch.full((1, 4), float(number)))

    async def one(number: int) -> Tensor:
        await asyncio.sleep(0)
        return model(torch.full((1, 4), float(number)))

    async def several() -> Any:
        return await asyncio.gather(*map(one, range(3)))

    def deep(value: Tensor, left: int) -> Tensor:
        return value if left == 0 else deep(value + 1, left - 1)

    def too_deep(value: Tensor) -> Tensor:
        return too_deep(value + 1)

    with watch(model):
        say(list(batches()), asyncio.run(several()), deep(torch.zeros(1), 200))
        say(torch.is_grad_enabled())
        try:
            too_deep(torch.zeros(1))
        except RecursionError as error:
            say(type(error).__name__)
        say(model(torch.ones(1, 4)))


@program
def patches_of_torch(watch: Watch, say: Say) -> None:
    calls: list[str] = []
    relu, add, backward = F.relu, Tensor.add, Tensor.backward

    @functools.wraps(relu)
    def my_relu(*args: Any, **kwargs: Any) -> Any:
        calls.append("relu")
        return relu(*args, **kwargs)

    def my_add(self: Tensor, *args: Any) -> Any:
        calls.append("add")
        return add(self, *args)

    def my_backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append("backward")
        return backward(self, *args, **kwargs)

    for inside in (True, False):
        try:
            if not inside:
                F.relu, Tensor.add, Tensor.backward = my_relu, my_add, my_backward  # type: ignore
            with watch():
                if inside:
                    F.relu, Tensor.add, Tensor.backward = my_relu, my_add, my_backward  # type: ignore
                value = torch.randn(3, requires_grad=True)
                F.relu(value).add(1).sum().backward()
                say(value.grad, F.relu is my_relu, relu(value))
        finally:
            F.relu, Tensor.add, Tensor.backward = relu, add, backward  # type: ignore[method-assign]
    pool = F.max_pool1d
    try:
        F.max_pool1d = lambda *a, **k: calls.append("pool") or pool(*a, **k)  # type: ignore[assignment]
        gelu, F.relu = F.relu, F.leaky_relu  # type: ignore[assignment]
        with watch():
            say(F.max_pool1d(torch.randn(1, 1, 4), 2), gelu(torch.tensor([-1.0])), F.relu(torch.tensor([-1.0])))
    finally:
        F.max_pool1d, F.relu = pool, relu  # type: ignore[assignment]
    say(calls)


@program
def what_python_shows(watch: Watch, say: Say) -> None:
    names, path = set(sys.modules), list(sys.path)
    with watch():
        model = _model()
        model(torch.ones(1, 4)).sum().backward()
        say(sys.gettrace() is None, sys.getprofile() is None, sys.path == path, sys.excepthook is sys.__excepthook__)
        say(sys.getswitchinterval(), sys.flags.optimize, gc.get_threshold(), torch.get_num_threads())
        say(torch.are_deterministic_algorithms_enabled(), torch.is_warn_always_enabled(), warnings.filters[:1])
        say(torch.get_printoptions() if hasattr(torch, "get_printoptions") else 0, repr(torch.ones(2)), str(model))
    say(sorted(name for name in set(sys.modules) - names if not name.startswith(("tensorprobe", "torch"))))


@program
def parametrizations_lazy_modules_and_tied_weights(watch: Watch, say: Say) -> None:
    from torch.nn.utils import parametrizations, parametrize

    tied = nn.Linear(4, 4)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), tied, tied, nn.LazyLinear(4))
    model = nn.Sequential(model, parametrizations.spectral_norm(nn.Linear(4, 2)))
    with watch(model):
        _train(model, say, steps=1)
        with parametrize.cached():
            say(model(torch.ones(1, 4)))
    say([type(m).__name__ for m in model.modules()])


@program
def recurrent_attention_and_convolution(watch: Watch, say: Say) -> None:
    modules = [nn.LSTM(4, 4, 2, dropout=0.2), nn.TransformerEncoderLayer(4, 2, 8), nn.GRUCell(4, 4)]
    for module in modules:
        with watch(module):
            found = module(torch.randn(3, 4) if isinstance(module, nn.GRUCell) else torch.randn(3, 2, 4))
            found = found[0] if isinstance(found, tuple) else found
            found.sum().backward()
            say(found, [p.grad for p in module.parameters()])
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Flatten())
    with watch(net):
        net(torch.randn(2, 1, 6, 6)).sum().backward()
    say(net.state_dict(), F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 3, 4)))


@program
def optimizers_of_every_kind(watch: Watch, say: Say) -> None:
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.LBFGS):
        for settings in ({}, {"foreach": True}):
            if settings and make is torch.optim.LBFGS:
                continue
            model = _model()
            optimizer: Any = make(model.parameters(), lr=0.01, **settings)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

            def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad(set_to_none=False)
                loss: Tensor = model(torch.ones(2, 4)).square().sum()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            with watch(model):
                for _ in range(2):
                    optimizer.step(closure)
                    schedule.step()
                say(list(model.parameters()), [len(state) for state in optimizer.state.values()])


@program
def odd_tensors(watch: Watch, say: Say) -> None:
    with watch():
        sparse = torch.eye(3).to_sparse()
        say((sparse @ torch.ones(3, 2)), sparse.to_sparse_csr().values(), torch.quantize_per_tensor(
            torch.ones(3), 0.1, 0, torch.qint8).dequantize())  # fmt: skip
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        say([each.sum() for each in nested.unbind()], torch.ones(2, device="meta").sin().shape)
        say(
            torch.ones(0).sum(),
            torch.ones(()).item(),
            torch.ones(3, dtype=torch.complex64).conj(),
            torch.ones(3)._neg_view(),
        )
        say(torch.tensor([1, 2]).tolist(), torch.ones(3).expand(2, 3), torch.arange(3)[None].T, torch.ones(2, 2).T)
        array = torch.ones(3).numpy()
        array[0] = 5
        say(torch.from_numpy(array).sum(), torch.utils.dlpack.from_dlpack(torch.ones(2)))
        say(torch.ones(3).share_memory_().is_shared(), torch.ones(3).to(torch.float8_e4m3fn).float())
        say(torch.ones(3).untyped_storage().tolist(), nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]).data)


DETACHES = () if torch_names.DETACHES_ONCE else ("a wrapper subclass that dispatches", "traces exports and fakes")
"""Before torch 2.10 these show one more `detach` under any dispatch mode, also under one that does nothing."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_the_same_with(name: str, tmp_path: Path) -> None:
    # Where every warning is wanted, the second execution of a kernel warns once more.
    by = tuple(watch for watch in WATCHES if watch != "online" or "warnings" not in name)
    by = tuple(watch for watch in by if watch not in ("aten", "online") or name not in DETACHES)
    assert_unharmed(PROGRAMS[name], tmp_path, by=by)
