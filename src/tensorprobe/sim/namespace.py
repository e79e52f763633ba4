"""The module that scripts find as `torch.npu` (or whatever the device is called): its cards, one stream, one random
state.

Everything is synchronous, so streams and events have no effect. They exist because scripts and torch itself use them.
"""

from __future__ import annotations

import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tensorprobe.sim import cards
from tensorprobe.sim.fallback import GENERATOR


class Stream:
    """The only stream: work is done when the call that started it returns."""

    def __init__(self, device: Any = None, priority: int = 0, **_options: Any) -> None:
        self.priority = priority
        self.stream_id = 0

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all work is done already."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: all work is done already."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return the event, recorded now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do nothing: all work is done already."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True


class Event:
    """A moment on the host's clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._moment_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._moment_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: all work is done already."""

    def synchronize(self) -> None:
        """Do nothing: all work is done already."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to the other."""
        return (end_event._moment_s - self._moment_s) * 1000


def device_module(name: str) -> types.ModuleType:
    """Return the module to be registered as `torch.<name>`."""
    module = types.ModuleType(f"torch.{name}", f"Simulated accelerator {name!r}: computes on the host.")
    stream = Stream()
    parts = (
        _device_functions(name),
        _random_functions(name),
        _stream_functions(stream),
        _memory_functions(),
        _amp(name),
    )
    for part in parts:
        for key, value in part.items():
            setattr(module, key, value)
    return module


def _index(name: str, device: Any) -> int:
    """Return the number of a card, that of the current one for None and -1; raise an error if it does not exist."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if index is None or index == -1:
        return cards.current()
    if not 0 <= index < cards.count():
        raise RuntimeError(cards.missing(f"{name}:{index}"))
    return int(index)


def _device_functions(name: str) -> dict[str, Any]:
    class Properties:
        def __init__(self) -> None:
            self.name = f"Simulated {name.upper()}"
            self.total_memory = 0
            self.multi_processor_count = 1

    @contextmanager
    def device(device: Any = None) -> Iterator[None]:
        with cards.on(_index(name, device)):
            yield

    def set_device(device: Any) -> None:
        cards.exchange(_index(name, device))

    def get_device_properties(device: Any = None) -> Properties:
        _index(name, device)
        return Properties()

    def synchronize(device: Any = None) -> None:
        _index(name, device)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # activation checkpointing saves the device's random state only then
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": cards.visible,
        "current_device": cards.current,
        "set_device": set_device,
        "_exchange_device": cards.exchange,
        "_maybe_exchange_device": cards.exchange,
        "device": device,
        "synchronize": synchronize,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "get_device_properties": get_device_properties,
        "get_device_capability": lambda device=None: (0, 0),
        "can_device_access_peer": lambda device, peer: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }


def _random_functions(name: str) -> dict[str, Any]:
    def get_rng_state(device: Any = name) -> torch.Tensor:
        _index(name, device)
        return GENERATOR.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = name) -> None:
        _index(name, device)
        GENERATOR.set_state(state)

    def manual_seed(seed: int) -> None:
        GENERATOR.manual_seed(int(seed))

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": lambda: GENERATOR.seed(),
        "seed_all": lambda: GENERATOR.seed(),
        "initial_seed": lambda: GENERATOR.initial_seed(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [GENERATOR.get_state()],
        "set_rng_state_all": lambda states: GENERATOR.set_state(states[0]),
    }


def _stream_functions(only: Stream) -> dict[str, Any]:
    @contextmanager
    def stream(stream: Any = None) -> Iterator[None]:
        yield

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: only,
        "default_stream": lambda device=None: only,
        "set_stream": lambda stream: None,
    }


def _memory_functions() -> dict[str, Any]:
    """Return memory statistics that are all zero: the device uses the host's memory, which is not counted."""
    zeros = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    nothing = "empty_cache reset_peak_memory_stats reset_max_memory_allocated ipc_collect"
    return {
        **{name: lambda device=None: 0 for name in zeros.split()},
        **{name: lambda device=None: None for name in nothing.split()},
        "memory_stats": lambda device=None: {},
        "memory_summary": lambda device=None, abbreviated=False: "the simulated device uses the host's memory",
    }


def _amp(name: str) -> dict[str, Any]:
    amp = types.ModuleType(f"torch.{name}.amp")

    class autocast(torch.amp.autocast):
        def __init__(self, enabled: bool = True, dtype: Any = None, cache_enabled: bool | None = None) -> None:
            super().__init__(name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    class GradScaler(torch.amp.GradScaler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(name, *args, **kwargs)

    amp.autocast, amp.GradScaler = autocast, GradScaler  # type: ignore[attr-defined]
    return {
        "amp": amp,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_autocast_enabled": lambda: torch.is_autocast_enabled(name),
    }
